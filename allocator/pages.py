"""PageLedger: the one truth about the pages of a pool.

Every page is in exactly one state, named by one number per page (`Books.holder`):

    free          in the free list or the released list; may be taken
    held          by one holder, a number >= 0 (a row of the request table, or the caller of a public allocator)
    cached        by the prefix cache, whether or not rows use it
    quarantined   given back, but not free yet: a step in flight may still use it (free once that step is settled),
                  or it waits in an open free group

Only the ledger moves a page from one state to another, and it checks each move before it makes any: a page that is
given back twice, by somebody else, or that is no page at all raises and changes nothing.  All costs are O(pages
touched); no verb walks the pool except `check`, `clear` and the merge of the released list.

Pages are PagedAttention's (Kwon et al., arXiv:2309.06180).  The fence comes from TigerBeetle's free set: a released
block is reusable once the checkpoint that may refer to it is durable; here, once the step that names it is settled.
"""

from collections import Counter
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvloom.allocator.books import CACHED, CALLER, DUMP, FREE, QUARANTINED, Books, checked_sizes
from kvloom.allocator.errors import DoubleFree, ForeignPage, InvalidArgument
from kvloom.allocator.indices import whole
from kvloom.allocator.page_checks import Holders, Index, PageChecks
from kvloom.allocator.page_sampling import PageSampling
from kvloom.allocator.reports import PoolStatistics
from kvloom.allocator.ring import PageArray
from kvloom.allocator.snapshots import LedgerState, Snapshots

__all__ = ["CACHED", "CALLER", "DUMP", "FREE", "QUARANTINED", "PageLedger"]


class PageLedger:
    """Pages 1 .. `pages` of one pool; page 0 is the dump and belongs to nobody.

    `need_sort`: pages given back go to a released list, and the two lists are merged in ascending order when the free
    list alone cannot serve.  Not thread-safe: one thread (the loop's) owns it.
    """

    def __init__(self, pages: int, *, pool: str = "full", page_size: int = 1, need_sort: bool = False) -> None:
        self.pool = pool
        self.pages, self.page_size = pages, _ = checked_sizes(pool, pages, page_size)
        self.need_sort = need_sort
        self._checks = PageChecks(pool, pages)
        self._snapshots = Snapshots(pool)
        self.violations: Counter[str] = Counter()  # since start, by check, whatever is cleared or restored
        self.clear()

    def clear(self) -> None:
        """As new: every page free, in ascending order; counters since start too.  No state outlives this."""
        self._snapshots.end_all()
        self._books = Books.fresh(self.pages, self.need_sort)
        self.sampling = PageSampling(self.pages)
        self._settled = -1

    @property
    def free_pages(self) -> int:
        """Pages that `take` could hand out now."""
        return len(self._books.free) + len(self._books.released)

    @property
    def settled_step(self) -> int:
        """The last step that is over, -1 before the first."""
        return self._settled

    @property
    def held_pages(self) -> int:
        """Pages with a holder."""
        return self._books.held

    def take(self, count: int, holders: Holders = CALLER, op: str = "prefill") -> PageArray | None:
        """The first `count` free pages, int32, now held by `holders` (one for all, or one each); None when short.

        Mutates nothing when short, except the count of failures of `op`.  Raises InvalidArgument and changes nothing.
        """
        count = whole("count", count)
        if count < 0:
            raise InvalidArgument(f"pool {self.pool!r}: cannot take {count} pages")
        self._checks.holders(holders, count)
        return self.take_for_rows(count, holders, op)

    def take_for_rows(
        self, count: int, rows: Holders, op: str = "prefill", again: bool = False, spare: int = 0
    ) -> PageArray | None:
        """`take` for rows of a request table, fit for holders: one for all, or one each; `spare` pages stay free.

        A shortage that is still there when somebody tries `again` is not counted once more.
        """
        books = self._books
        if count + spare > self.free_pages:
            if not again:
                books.failures[op] += 1
            return None
        if count > len(books.free):
            books.merge_released()
        pages = books.free.take(count)
        index = pages.astype(np.intp)
        books.holder[index] = rows
        books.taken(count, op)
        self.sampling.taken(index)
        return pages

    def count_shortage(self, op: str) -> None:
        """There are fewer free pages than somebody wants for `op`, who looks for others before he takes any."""
        self._books.failures[op] += 1

    def count_idle(self, pages: int) -> None:
        """So many of the cached pages are used by nobody."""
        books = self._books
        books.used = books.cached - pages
        books.peak_active = max(books.peak_active, books.held + books.used)

    def count_violation(self, check: str) -> None:
        """Somebody has found what must not be."""
        self.violations[check] += 1

    def release(
        self,
        pages: PageArray,
        holders: Holders = CALLER,
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
        fence = whole("fence", fence)
        self._take_back(pages, self._distinct_held(pages, holders), reason, fence, front)

    def release_lines(self, pages: PageArray, holders: NDArray[np.int32], *, reason: str, fence: int) -> None:
        """`release` for pages of a request table's lines, which come from here: distinct, and in the pool."""
        if len(pages):
            index = self._index(self._checks.of_holders, holders, pages, distinct=False)
            self._take_back(pages, index, reason, fence, front=True)

    def settle(self, step: int) -> None:
        """Step `step` is over: pages fenced up to it are free.  Cheap when there are none."""
        self._settled = max(self._settled, whole("step", step))
        books = self._books
        for _ in range(len(books.waiting)):
            fence, pages, front = books.waiting.popleft()
            if fence <= self._settled:
                books.quarantined -= len(pages)
                self._to_free(pages, pages.astype(np.intp), front)
            else:
                books.waiting.append((fence, pages, front))

    def queue(self, pages: PageArray, holders: Holders = CALLER) -> None:
        """Give back distinct pages of `holders`, but only with the next `free_queued`.  Raises like `release`.

        The ids are copied here: what the caller does to its array afterwards changes nothing.
        """
        if len(pages) == 0:
            return
        index = self._distinct_held(pages, holders)
        books = self._leave(pages)
        books.holder[index] = QUARANTINED
        books.quarantined += len(pages)
        books.queued.append(np.array(pages, np.int32))

    def free_queued(self, *, reason: str = "finish", front: bool = True, ascending: bool = False) -> int:
        """All that was queued is free, in queue order (or ascending); returns the number of pages."""
        books = self._books
        if not books.queued:
            return 0
        pages = np.concatenate(books.queued)
        books.freed[reason] += len(pages)
        books.queued.clear()
        books.quarantined -= len(pages)
        books.retired(len(pages))
        pages = np.sort(pages) if ascending else pages
        self._to_free(pages, pages.astype(np.intp), front)
        return len(pages)

    def hand_over(self, pages: PageArray, holders: Holders, new_holder: int) -> None:
        """Distinct pages of `holders` are now held by `new_holder`.

        Raises ForeignPage, DoubleFree or InvalidArgument and changes nothing.
        """
        self._checks.holders(new_holder, 1)
        index = self._distinct_held(pages, holders)
        books = self._leave(pages)
        books.holder[index] = new_holder
        books.held += len(pages)

    def cache(self, pages: PageArray, holders: Holders) -> None:
        """Distinct pages of `holders` now belong to the prefix cache.  Raises ForeignPage or DoubleFree."""
        index = self._distinct_held(pages, holders)
        books = self._leave(pages)
        books.holder[index] = CACHED
        books.cached += len(pages)
        self.sampling.used(index)

    def evict(self, pages: PageArray) -> None:
        """Distinct pages of the prefix cache are free again.  Raises ForeignPage or DoubleFree."""
        index = self._index(self._checks.state, CACHED, pages)
        if self._snapshots.outstanding:
            self._snapshots.lose(pages)
        self._books.cached -= len(pages)
        self._books.freed["evict"] += len(pages)
        self.sampling.evicted(index)
        self._to_free(pages, index, front=True)

    def backup_state(self) -> LedgerState:
        """A state to come back to: the books, not the settled steps, for time goes on; O(pages)."""
        return self._snapshots.take(self._books)

    def require_restorable(self, state: LedgerState) -> None:
        """Raise StaleState unless `state` can be restored; see `kvloom.allocator.snapshots`."""
        self._snapshots.require(state)

    def restore_state(self, state: LedgerState) -> None:
        """Pages are where they were; those whose fence has been settled since are free.

        No step in flight may use pages taken since.  Ends `state` and younger ones.  Raises StaleState and changes
        nothing.
        """
        self._books = self._snapshots.give(state)
        self.settle(self._settled)

    def holders_of(self, pages: PageArray) -> NDArray[np.int32]:
        """Who has each page: a holder's number, or FREE, QUARANTINED, CACHED, DUMP.  Raises ForeignPage."""
        self._checks.in_pool(pages)
        return self._books.holder[pages]

    def pages_of_rows(self) -> int:
        """Pages held by others than the caller of a public allocator; O(pages)."""
        holder = self._books.holder
        return int(np.count_nonzero((holder >= 0) & (holder != CALLER)))

    def require_held(self, pages: PageArray, holders: Holders = CALLER) -> None:
        """Raise ForeignPage or DoubleFree unless each page is held by its holder and none is named twice."""
        self._distinct_held(pages, holders)

    def distinct(self, pages: PageArray) -> PageArray:
        """`pages` in order, each only where it comes first; O(pages).  Raises ForeignPage."""
        self._checks.in_pool(pages)
        return pages[self._checks.firsts(pages.astype(np.intp))]

    def free_list(self) -> PageArray:
        """All free pages in the order in which they would be taken without a merge, then the released ones; O(free)."""
        return self._books.free_list()

    def statistics(self) -> PoolStatistics:
        """An immutable report."""
        return self._books.report(self.pool, self.page_size, self.sampling.times())

    def check(self) -> None:
        """Raise BrokenInvariant unless every page is in exactly one state and the counts agree; O(pages)."""
        self._books.check(self.pool)

    def _distinct_held(self, pages: PageArray, holders: Holders) -> Index:
        return self._index(self._checks.held, holders, pages)

    def _index(self, check: Callable[..., Index], wanted: Holders, pages: PageArray, *, distinct: bool = True) -> Index:
        """The pages as an index, if `check` lets them pass; a page that it does not is counted."""
        try:
            index = check(self._books.holder, wanted, pages)
            return self._checks.distinct(pages, index) if distinct else index
        except (DoubleFree, ForeignPage) as error:
            self.count_violation("double_free" if isinstance(error, DoubleFree) else "foreign_page")
            raise

    def _leave(self, pages: PageArray) -> Books:
        """The books, in which these pages no longer count as held."""
        if self._snapshots.outstanding:
            self._snapshots.lose(pages)
        self._books.held -= len(pages)
        return self._books

    def _take_back(self, pages: PageArray, index: Index, reason: str, fence: int, front: bool) -> None:
        self._books.freed[reason] += len(pages)
        books = self._leave(pages)
        books.retired(len(pages))
        if fence <= self._settled:
            self._to_free(pages, index, front)
            return
        books.holder[index] = QUARANTINED
        books.quarantined += len(pages)
        books.waiting.append((fence, np.array(pages, np.int32), front))

    def _to_free(self, pages: PageArray, index: Index, front: bool) -> None:
        books = self._books
        books.holder[index] = FREE
        self.sampling.freed(index)
        home = books.released if self.need_sort else books.free
        if front:
            home.push_front(pages)
        else:
            home.push_back(pages)
