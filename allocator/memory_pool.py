"""One pool of a memory: its storage, its allocator, and a line of its pages for every row."""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from kvloom.allocator.errors import BrokenInvariant, InvalidArgument
from kvloom.allocator.paged import PagedTokenToKVPoolAllocator
from kvloom.allocator.pools import KVCache, MHATokenToKVPool
from kvloom.allocator.reports import PoolGeometry, PoolStatistics
from kvloom.allocator.ring import PageArray
from kvloom.allocator.row_slots import RowSlots
from kvloom.allocator.rows import RowAllocator
from kvloom.allocator.spec import PoolSpec
from kvloom.allocator.table import RequestTable, RowArray


@dataclass(frozen=True, slots=True, eq=False)
class MemoryPool:
    """The parts of a pool; `rows` is its row verbs on the host, `table` and `allocator.ledger` are what they write."""

    spec: PoolSpec
    storage: KVCache
    allocator: PagedTokenToKVPoolAllocator
    table: RequestTable
    rows: RowAllocator

    @classmethod
    def make(
        cls,
        spec: PoolSpec,
        tokens: int,
        page_size: int,
        slots: RowSlots,
        max_pages: int,
        device: torch.device,
        pinned: int = 0,
    ) -> Self:
        """A pool of `tokens` slots in whole pages, of which nobody can count on `pinned` pages.

        Raises InvalidArgument when a window pool is too small for one row to go on.
        """
        size = tokens // page_size * page_size
        least = pinned + min(least_window_pages(spec.window, page_size), max_pages)
        if size < least * page_size:
            raise InvalidArgument(
                f"pool {spec.name!r}: {size // page_size} pages of {page_size}; a row needs {least}: a window of "
                f"{spec.window} tokens, and the page that it grows into"
            )
        storage = MHATokenToKVPool(
            size, page_size, spec.dtype, spec.kv_heads, spec.head_dim, len(spec.layers), device, layers=spec.layers
        )
        allocator = PagedTokenToKVPoolAllocator(size, page_size, spec.dtype, device, storage, pool=spec.name)
        table = RequestTable(slots.max_rows, max_pages, device, slots)
        return cls(spec, storage, allocator, table, RowAllocator(allocator.ledger, table))

    @property
    def name(self) -> str:
        """As in the spec."""
        return self.spec.name

    @property
    def free_pages(self) -> int:
        """Pages that could be taken now."""
        return self.allocator.ledger.free_pages

    @property
    def geometry(self) -> PoolGeometry:
        """What one of its pages is."""
        spec, size = self.spec, self.rows.page_size
        return PoolGeometry(size, spec.bytes_per_token * size, str(spec.dtype).removeprefix("torch."), len(spec.layers))

    def statistics(self, evictable: int) -> PoolStatistics:
        """An immutable report, given how many of the cached pages nobody uses."""
        self.allocator.ledger.count_idle(evictable)  # pins come and go without a word
        slack = self.table.slack_tokens(self.rows.page_size)
        return self.allocator.statistics()._replace(slack_tokens=slack, evictable=evictable)

    def check(self) -> None:
        """Raise BrokenInvariant unless ledger and table agree, and nobody else has taken pages."""
        self.rows.check()
        ledger = self.allocator.ledger
        if ledger.held_pages != ledger.pages_of_rows():
            raise BrokenInvariant(f"pool {self.name!r}: somebody else has taken pages: {ledger.statistics()}")

    def first_in_window(self, lengths: RowArray) -> RowArray:
        """The place of the first page that a token behind `lengths[i]` others reads, int32; 0 without a window.

        Or that a token behind the whole pages among these reads: what is cached of a row must have a window before it.
        """
        if self.spec.window is None:
            return np.zeros_like(lengths)
        size = np.int32(self.rows.page_size)
        first: RowArray = np.maximum(lengths // size * size - np.int32(self.spec.window - 1), 0) // size
        return first

    def entry_pages(self, length: int, cached: PageArray) -> int:
        """Free pages that a row of `length` tokens should find when it enters with `cached` pages of the prefix cache.

        All that it lacks; in a window pool, where they come and go, what it lacks of a window.
        """
        pages = self.rows.pages_for(length)
        if self.spec.window is not None:
            pages = min(pages, least_window_pages(self.spec.window, self.rows.page_size))
        return max(pages - int(np.count_nonzero(cached)), 0)


@contextmanager
def counting_violations(pool: MemoryPool) -> Iterator[None]:
    """Counts a BrokenInvariant that passes; it may be of another pool, for the count is of all together."""
    try:
        yield
    except BrokenInvariant:
        pool.allocator.ledger.count_violation("conservation")
        raise


def violations(pools: Iterable[MemoryPool]) -> dict[str, int]:
    """What was found since start, by check, in all pools together."""
    found: Counter[str] = Counter()
    for pool in pools:
        found.update(pool.allocator.ledger.violations)
    return dict(found)


def least_window_pages(window: int | None, page_size: int) -> int:
    """Pages without which a row alone could get stuck: a window lying across pages, and one to grow into."""
    return 1 if window is None else -(-(window - 1) // page_size) + 2
