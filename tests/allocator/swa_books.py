"""`books.py` for the sliding-window allocator, whose books are two and a mapping."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from kvloom.allocator import AllocatorError, SWATokenToKVPoolAllocator
from tests.allocator.books import Books, books

SWABooks = tuple[Books, Books, list[int]]


def make(pages: int = 8, swa_pages: int = 8, page_size: int = 4, need_sort: bool = False) -> SWATokenToKVPoolAllocator:
    sizes = pages * page_size, swa_pages * page_size
    return SWATokenToKVPoolAllocator(*sizes, torch.float16, "cpu", None, need_sort, page_size)


def taken(slots: torch.Tensor | None) -> list[int]:
    assert slots is not None
    assert slots.dtype == torch.int64
    return slots.tolist()


def swa_books(allocator: SWATokenToKVPoolAllocator) -> SWABooks:
    """All that it knows: both ledgers, and the window slot of each full slot."""
    mapping: list[int] = allocator.full_to_swa_index_mapping.tolist()
    return books(allocator.ledger), books(allocator.swa_ledger), mapping


@contextmanager
def refused(allocator: SWATokenToKVPoolAllocator, error: type[AllocatorError]) -> Iterator[None]:
    """The block must raise exactly `error` and leave the books as they were."""
    before = swa_books(allocator)
    with pytest.raises(error) as caught:
        yield
    assert type(caught.value) is error
    assert swa_books(allocator) == before
    allocator.check()


def balanced(allocator: SWATokenToKVPoolAllocator) -> None:
    """At idle everything is there: draining either pool gives each of its pages once, and no slot is mapped."""
    allocator.check()
    assert allocator.full_available_size() == allocator.num_pages * allocator.page_size
    assert allocator.swa_available_size() == allocator.swa_ledger.pages * allocator.page_size
    for ledger in (allocator.ledger, allocator.swa_ledger):
        assert sorted(ledger.free_list().tolist()) == list(range(1, ledger.pages + 1))
    assert not allocator.full_to_swa_index_mapping.any()
