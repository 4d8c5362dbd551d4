"""PageLedger: the one truth about the pages of a pool.

Every page is in exactly one state, named by one number per page (`_holder`):

    free          in the free list or the released list; may be taken
    held          by one holder, a number >= 0 (a row of the request table, or the caller of a public allocator)
    cached        by the prefix cache, used by nobody
    quarantined   given back, but not free yet: a step in flight may still use it (free once that step is settled),
                  or it waits in an open free group

Only the ledger moves a page from one state to another, and it checks each move before it makes any: a page that is
given back twice, by somebody else, or that is no page at all raises and changes nothing.  All costs are O(pages
touched); no verb walks the pool except `check`, `clear` and the merge of the released list.

The fence comes from TigerBeetle's free set, where a released block is reusable once the checkpoint that may refer to
it is durable; read "the step that names it is settled" for "durable".
"""

from collections import Counter, deque

import numpy as np
from numpy.typing import NDArray

from kvloom.allocator.errors import BrokenInvariant, DoubleFree, ForeignPage, InvalidArgument
from kvloom.allocator.indices import whole
from kvloom.allocator.reports import PoolStatistics
from kvloom.allocator.ring import PageArray, PageRing

FREE = -1
QUARANTINED = -2
CACHED = -3
DUMP = -4  # page 0: where padding writes; never handed out
CALLER = 2**31 - 2  # the holder of pages taken through a public allocator; no row has this number


class PageLedger:
    """Pages 1 .. `pages` of one pool; page 0 is the dump and belongs to nobody.

    `need_sort`: pages given back go to a released list, and the two lists are merged in ascending order when the free
    list alone cannot serve.  Not thread-safe: one thread (the loop's) owns it.
    """

    def __init__(self, pages: int, *, pool: str = "full", page_size: int = 1, need_sort: bool = False) -> None:
        if pages < 1:
            raise InvalidArgument(f"pool {pool!r}: {pages} pages; at least 1 is needed")
        if pages >= 2**31 - 1:
            raise InvalidArgument(f"pool {pool!r}: {pages} pages; page ids are int32, at most {2**31 - 2}")
        if page_size < 1:
            raise InvalidArgument(f"pool {pool!r}: page_size={page_size} must be at least 1")
        self.pool = pool
        self.pages = pages
        self.page_size = page_size
        self.need_sort = need_sort
        self._holder = np.full(pages + 1, FREE, np.int32)
        self._mark = np.zeros(pages + 1, np.int32)  # scratch: finds ids named twice without sorting
        self._free = PageRing(pages)
        self._released = PageRing(pages if need_sort else 0)
        self._waiting: deque[tuple[int, PageArray, bool]] = deque()  # (fence, pages, to the front)
        self._queued: list[PageArray] = []  # the open free group
        self.clear()

    def clear(self) -> None:
        """As new: every page free, in ascending order; counters since start too."""
        self._holder.fill(FREE)
        self._holder[0] = DUMP
        self._free.clear()
        self._released.clear()
        self._waiting.clear()
        self._queued.clear()
        self._free.push_back(np.arange(1, self.pages + 1, dtype=np.int32))
        self._settled = -1
        self._held = self._cached = self._quarantined = self._peak_held = 0
        self._allocated = self._failures = self._groups = self._sorts = 0
        self._freed: Counter[str] = Counter()

    @property
    def free_pages(self) -> int:
        """Pages that `take` could hand out now."""
        return len(self._free) + len(self._released)

    @property
    def settled_step(self) -> int:
        """The last step that is over, -1 before the first."""
        return self._settled

    @property
    def held_pages(self) -> int:
        """Pages with a holder."""
        return self._held

    def take(self, count: int, holders: int | NDArray[np.int32] = CALLER) -> PageArray | None:
        """The first `count` free pages, int32, now held by `holders` (one for all, or one each); None when short.

        Mutates nothing when short, except the count of failures.  Raises InvalidArgument and changes nothing.
        """
        count = whole("count", count)
        if count < 0:
            raise InvalidArgument(f"pool {self.pool!r}: cannot take {count} pages")
        self._require_holders(holders, count)
        if count > self.free_pages:
            self._failures += 1
            return None
        if count > len(self._free):
            self._merge_released()
        pages = self._free.take(count)
        self._holder[pages] = holders
        self._held += count
        self._allocated += count
        self._peak_held = max(self._peak_held, self._held)
        return pages

    def release(
        self,
        pages: PageArray,
        holders: int | NDArray[np.int32] = CALLER,
        *,
        reason: str = "finish",
        fence: int = -1,
        front: bool = True,
    ) -> None:
        """Give back distinct pages of `holders` in one go; they are free when step `fence` is settled (-1: now).

        `front` puts them where they are taken next, `pages[0]` first; else behind all others.
        Raises ForeignPage or DoubleFree and changes nothing.
        """
        if len(pages) == 0:
            return
        self._require_held_by(holders, pages)
        self._held -= len(pages)
        self._freed[reason] += len(pages)
        self._groups += 1
        if fence <= self._settled:
            self._to_free(pages, front)
            return
        self._holder[pages] = QUARANTINED
        self._quarantined += len(pages)
        self._waiting.append((fence, np.array(pages, np.int32), front))

    def settle(self, step: int) -> None:
        """Step `step` is over: pages fenced up to it are free.  Cheap when there are none."""
        self._settled = max(self._settled, step)
        for _ in range(len(self._waiting)):
            fence, pages, front = self._waiting.popleft()
            if fence <= self._settled:
                self._quarantined -= len(pages)
                self._to_free(pages, front)
            else:
                self._waiting.append((fence, pages, front))

    def queue(self, pages: PageArray, holders: int | NDArray[np.int32] = CALLER) -> None:
        """Give back distinct pages of `holders`, but only with the next `free_queued`.  Raises like `release`.

        The ids are copied here: what the caller does to its array afterwards changes nothing.
        """
        if len(pages) == 0:
            return
        self._require_held_by(holders, pages)
        self._holder[pages] = QUARANTINED
        self._held -= len(pages)
        self._quarantined += len(pages)
        self._queued.append(np.array(pages, np.int32))

    def free_queued(self, *, reason: str = "finish", front: bool = True, ascending: bool = False) -> int:
        """All that was queued is free, in queue order (or ascending); returns the number of pages."""
        if not self._queued:
            return 0
        pages = np.concatenate(self._queued)
        self._queued.clear()
        self._quarantined -= len(pages)
        self._freed[reason] += len(pages)
        self._groups += 1
        self._to_free(np.sort(pages) if ascending else pages, front)
        return len(pages)

    def cache(self, pages: PageArray, holders: int | NDArray[np.int32]) -> None:
        """Distinct pages of `holders` now belong to the prefix cache.  Raises ForeignPage or DoubleFree."""
        self._require_held_by(holders, pages)
        self._holder[pages] = CACHED
        self._held -= len(pages)
        self._cached += len(pages)

    def evict(self, pages: PageArray) -> None:
        """Distinct pages of the prefix cache are free again.  Raises ForeignPage or DoubleFree."""
        self._require(CACHED, pages)
        self._cached -= len(pages)
        self._freed["evict"] += len(pages)
        self._to_free(pages, front=True)

    def holders_of(self, pages: PageArray) -> NDArray[np.int32]:
        """Who has each page: a holder's number, or FREE, QUARANTINED, CACHED, DUMP.  Raises ForeignPage."""
        self._require_in_pool(pages)
        return self._holder[pages]

    def distinct(self, pages: PageArray) -> PageArray:
        """`pages` in order, each only where it comes first; O(pages).  Raises ForeignPage."""
        self._require_in_pool(pages)
        order = np.arange(len(pages), dtype=np.int32)
        self._mark[pages[::-1]] = order[::-1]  # of several writes to one place the last one stays: the first here
        first: NDArray[np.bool_] = self._mark[pages] == order
        return pages[first]

    def free_list(self) -> PageArray:
        """All free pages in the order in which they would be taken without a merge, then the released ones; O(free)."""
        return np.concatenate((self._free.to_array(), self._released.to_array()))

    def statistics(self) -> PoolStatistics:
        """An immutable report."""
        return PoolStatistics(
            pool=self.pool,
            page_size=self.page_size,
            capacity=self.pages,
            free=self.free_pages,
            held=self._held,
            cached=self._cached,
            quarantined=self._quarantined,
            peak_held=self._peak_held,
            allocated=self._allocated,
            freed=dict(self._freed),
            failures=self._failures,
            groups=self._groups,
            sorts=self._sorts,
        )

    def check(self) -> None:
        """Raise BrokenInvariant unless every page is in exactly one state and the counts agree; O(pages)."""
        waiting = [np.empty(0, np.int32), *self._queued, *(pages for _, pages, _ in self._waiting)]
        for state, listed in ((FREE, self.free_list()), (QUARANTINED, np.concatenate(waiting))):
            if not np.array_equal(np.sort(listed), np.flatnonzero(self._holder == state)):
                raise BrokenInvariant(f"pool {self.pool!r}: the pages listed as {state} are not those in that state")
        by_page = {
            "held": (int(np.count_nonzero(self._holder >= 0)), self._held),
            "cached": (int(np.count_nonzero(self._holder == CACHED)), self._cached),
            "quarantined": (int(np.count_nonzero(self._holder == QUARANTINED)), self._quarantined),
            "free": (int(np.count_nonzero(self._holder == FREE)), self.free_pages),
        }
        total = sum(counted for _, counted in by_page.values())
        if (
            any(pages != counted for pages, counted in by_page.values())
            or total != self.pages
            or self._holder[0] != DUMP
        ):
            raise BrokenInvariant(f"pool {self.pool!r} of {self.pages} pages: (by page, counted) {by_page}")

    def _to_free(self, pages: PageArray, front: bool) -> None:
        self._holder[pages] = FREE
        home = self._released if self.need_sort else self._free
        if front:
            home.push_front(pages)
        else:
            home.push_back(pages)

    def _merge_released(self) -> None:
        merged = np.sort(self.free_list())
        self._free.clear()
        self._released.clear()
        self._free.push_back(merged)
        self._sorts += 1

    def _require_in_pool(self, pages: PageArray) -> None:
        if len(pages) and (pages.min() < 1 or pages.max() > self.pages):
            wrong = pages[(pages < 1) | (pages > self.pages)]
            raise ForeignPage(f"pool {self.pool!r} has pages 1 to {self.pages}; got {wrong[:8].tolist()}")

    def _require_holders(self, holders: int | NDArray[np.int32], count: int) -> None:
        """Raise InvalidArgument unless `holders` is the number of a holder, or `count` of them."""
        if isinstance(holders, np.ndarray):
            if holders.shape != (count,) or (count and holders.min() < 0):
                raise InvalidArgument(f"pool {self.pool!r}: {count} pages, holders {holders[:8].tolist()}")
        elif holders < 0:
            raise InvalidArgument(f"pool {self.pool!r}: holder {holders}; holders are numbers from 0 up")

    def _require_held_by(self, holders: int | NDArray[np.int32], pages: PageArray) -> None:
        """Each page is held by its holder, and none is named twice."""
        self._require_holders(holders, len(pages))
        self._require(holders, pages)

    def _require(self, holders: int | NDArray[np.int32], pages: PageArray) -> None:
        """The same; `holders` may be a state."""
        self._require_in_pool(pages)
        wrong = self._holder[pages] != holders
        if wrong.any():
            culprits = pages[wrong]
            states = self._holder[culprits]
            error = DoubleFree if np.all((states == FREE) | (states == QUARANTINED)) else ForeignPage
            raise error(
                f"pool {self.pool!r}: pages {culprits[:8].tolist()} are not held by whoever gives them back "
                f"(holders {states[:8].tolist()}; {FREE} free, {QUARANTINED} quarantined, {CACHED} cached)"
            )
        order = np.arange(len(pages), dtype=np.int32)
        self._mark[pages] = order
        twice = self._mark[pages] != order
        if twice.any():
            raise DoubleFree(f"pool {self.pool!r}: pages {pages[twice][:8].tolist()} are named twice in one call")
