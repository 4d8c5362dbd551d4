"""What a test compares to see that nothing has changed, and small makers of arrays."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvloom.allocator import AllocatorError, KVMemory, PageLedger, PoolStatistics

Container = Callable[[list[int]], Any]
CONTAINERS: tuple[Container, ...] = (  # of all makes in which a caller may have his slots and lengths
    list,
    lambda slots: np.array(slots, np.int32),
    lambda slots: torch.tensor(slots, dtype=torch.int64),
    lambda slots: torch.tensor(slots, dtype=torch.int32),
)
Books = tuple[PoolStatistics, list[int], list[int]]


def ints(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def books(ledger: PageLedger) -> Books:
    """All that a ledger knows: counts, the free list in order, who holds each page."""
    everyone = np.arange(1, ledger.pages + 1, dtype=np.int32)
    return ledger.statistics(), ledger.free_list().tolist(), ledger.holders_of(everyone).tolist()


@contextmanager
def refused(ledger: PageLedger, error: type[AllocatorError]) -> Iterator[None]:
    """The block must raise exactly `error` and leave the books as they were."""
    before = books(ledger)
    with pytest.raises(error) as caught:
        yield
    assert type(caught.value) is error
    assert books(ledger) == before
    ledger.check()


def memory_books(memory: KVMemory) -> tuple[object, ...]:
    """The same of a memory: its ledgers, its tables, pool after pool; but for how often it was short."""
    report = memory.statistics()
    pools = {name: pool._replace(failures_by_op={}) for name, pool in report.pools.items()}
    found: list[object] = [report._replace(pools=pools)]
    for pool, table in memory.tables.items():
        arrays = (table.pages, table.page_counts, table.lengths, table.first, table.reused)
        found += [*books(memory.allocators[pool].ledger)[1:], *(array.tolist() for array in arrays)]
    return tuple(found)


@contextmanager
def memory_refuses(memory: KVMemory, error: type[AllocatorError]) -> Iterator[None]:
    """The block must raise exactly `error` and leave the memory as it was."""
    before = memory_books(memory)
    with pytest.raises(error) as caught:
        yield
    assert type(caught.value) is error
    assert memory_books(memory) == before
    memory.check()
