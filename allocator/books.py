"""Books: all that a ledger knows about the pages of its pool, as one value."""

from collections import Counter, deque
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from kvloom.allocator.errors import BrokenInvariant, InvalidArgument
from kvloom.allocator.indices import whole
from kvloom.allocator.reports import PageTimes, PoolStatistics
from kvloom.allocator.ring import PageArray, PageRing
from kvloom.allocator.tally import Tally

FREE = -1
QUARANTINED = -2
CACHED = -3
DUMP = -4  # page 0: where padding writes; never handed out
CALLER = 2**31 - 2  # the holder of pages taken through a public allocator; no row has this number
OPS = ("prefill", "decode", "restore")  # what pages are taken for
GROUP_PAGES = tuple(4.0**power for power in range(10))  # 1 to 262,144: upper bounds of the buckets


@dataclass(slots=True)
class Books:
    """The state of each page, the orders in which pages come back, and the counts that follow from both.

    holder    int32 [pages + 1]: a holder's number from 0 up, or one of the states above
    free      the next page to be taken first
    released  with `need_sort`: given back, and not in the free list before the next merge
    waiting   quarantined behind a fence: (fence, pages, whether they will go to the front)
    queued    quarantined in the open free group, in queue order; nobody writes to the arrays in either
    used      of the cached pages, those in use when somebody last said how many are not
    """

    holder: NDArray[np.int32]
    free: PageRing
    released: PageRing
    waiting: deque[tuple[int, PageArray, bool]] = field(default_factory=deque)
    queued: list[PageArray] = field(default_factory=list)
    held: int = 0
    cached: int = 0
    quarantined: int = 0
    used: int = 0
    peak_held: int = 0
    peak_active: int = 0
    allocated: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(OPS, 0)))
    failures: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(OPS, 0)))
    groups: int = 0
    group_pages: Tally = field(default_factory=lambda: Tally(GROUP_PAGES))
    sorts: int = 0
    freed: Counter[str] = field(default_factory=Counter)

    @classmethod
    def fresh(cls, pages: int, need_sort: bool) -> "Books":
        """Every page free, in ascending order."""
        holder = np.full(pages + 1, FREE, np.int32)
        holder[0] = DUMP
        books = cls(holder, PageRing(pages), PageRing(pages if need_sort else 0))
        books.free.push_back(np.arange(1, pages + 1, dtype=np.int32))
        return books

    def copy(self) -> "Books":
        """The same, for somebody else to change; O(pages)."""
        return replace(
            self,
            holder=self.holder.copy(),
            free=self.free.copy(),
            released=self.released.copy(),
            waiting=self.waiting.copy(),
            queued=self.queued.copy(),
            allocated=self.allocated.copy(),
            failures=self.failures.copy(),
            group_pages=self.group_pages.copy(),
            freed=self.freed.copy(),
        )

    def taken(self, count: int, op: str) -> None:
        """So many pages more are held."""
        self.held += count
        self.allocated[op] += count
        self.peak_held = max(self.peak_held, self.held)
        self.peak_active = max(self.peak_active, self.held + self.used)

    def retired(self, count: int) -> None:
        """So many pages were given back at once."""
        self.groups += 1
        self.group_pages.add(count)

    def free_list(self) -> PageArray:
        """All free pages in the order in which they would be taken without a merge, then the released ones; O(free)."""
        return np.concatenate((self.free.to_array(), self.released.to_array()))

    def merge_released(self) -> None:
        """What was given back joins the free list, all in ascending order; O(free)."""
        merged = np.sort(self.free_list())
        self.free.clear()
        self.released.clear()
        self.free.push_back(merged)
        self.sorts += 1

    def report(self, pool: str, page_size: int, times: PageTimes) -> PoolStatistics:
        """An immutable report."""
        return PoolStatistics(
            pool=pool,
            page_size=page_size,
            capacity=len(self.holder) - 1,
            free=len(self.free) + len(self.released),
            held=self.held,
            cached=self.cached,
            quarantined=self.quarantined,
            peak_held=self.peak_held,
            peak_active=self.peak_active,
            allocated_by_op=dict(self.allocated),
            freed=dict(self.freed),
            failures_by_op=dict(self.failures),
            groups=self.groups,
            group_pages=self.group_pages.state(),
            sorts=self.sorts,
            times=times,
        )

    def check(self, pool: str) -> None:
        """Raise BrokenInvariant unless every page is in exactly one state and the counts agree; O(pages)."""
        waiting = [np.empty(0, np.int32), *self.queued, *(pages for _, pages, _ in self.waiting)]
        for state, listed in ((FREE, self.free_list()), (QUARANTINED, np.concatenate(waiting))):
            if not np.array_equal(np.sort(listed), np.flatnonzero(self.holder == state)):
                raise BrokenInvariant(f"pool {pool!r}: the pages listed as {state} are not those in that state")
        by_page = {
            "held": (int(np.count_nonzero(self.holder >= 0)), self.held),
            "cached": (int(np.count_nonzero(self.holder == CACHED)), self.cached),
            "quarantined": (int(np.count_nonzero(self.holder == QUARANTINED)), self.quarantined),
            "free": (int(np.count_nonzero(self.holder == FREE)), len(self.free) + len(self.released)),
        }
        total, pages = sum(counted for _, counted in by_page.values()), len(self.holder) - 1
        if any(found != counted for found, counted in by_page.values()) or total != pages or self.holder[0] != DUMP:
            raise BrokenInvariant(f"pool {pool!r} of {pages} pages: (by page, counted) {by_page}")


def checked_sizes(pool: str, pages: int, page_size: int) -> tuple[int, int]:
    """Pages of a pool, and tokens of a page.  Raises InvalidArgument when they make no sense."""
    pages, page_size = whole("pages", pages), whole("page_size", page_size)
    if pages < 1:
        raise InvalidArgument(f"pool {pool!r}: {pages} pages; at least 1 is needed")
    if pages >= 2**31 - 1:
        raise InvalidArgument(f"pool {pool!r}: {pages} pages; page ids are int32, at most {2**31 - 2}")
    if page_size < 1:
        raise InvalidArgument(f"pool {pool!r}: page_size={page_size} must be at least 1")
    return pages, page_size
