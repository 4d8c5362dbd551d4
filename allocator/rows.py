"""Row verbs on the host: ledger, request table and shares of one pool together.  Numbers only; no tensor."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvloom.allocator.errors import BrokenInvariant, InvalidArgument
from kvloom.allocator.indices import page_count
from kvloom.allocator.pages import PageLedger
from kvloom.allocator.reports import Shortfall
from kvloom.allocator.ring import PageArray
from kvloom.allocator.sharing import SHARED, PageShares
from kvloom.allocator.table import RequestTable, RowArray


class Growth(NamedTuple):
    """Which rows took pages: the `takers[i]`-th of them took `counts[i]`; `pages` has them one after the other."""

    takers: NDArray[np.intp]
    counts: RowArray
    pages: PageArray


class Fork(NamedTuple):
    """New rows that go on where another stands: whole pages are shared, the partly filled last one is to be copied.

    If `tokens` > 0, the first `tokens` slots of page `source` belong into each page of `targets`, one for each row.
    """

    rows: RowArray
    source: int
    targets: PageArray
    tokens: int


class Grown(NamedTuple):
    """`Growth` by one token each: the rows' lengths now, which of them took a page, and these pages."""

    lengths: RowArray
    takers: NDArray[np.intp]
    pages: PageArray


NO_GROWTH = Growth(np.empty(0, np.intp), np.empty(0, np.int32), np.empty(0, np.int32))


class RowAllocator:
    """Pages of one pool for the rows of one table; the ledger names each page's row as its holder.

    After a fork a page may have several rows: the ledger then has `SHARED` as its holder, and it is free once the last
    of them has given it back.
    """

    def __init__(self, ledger: PageLedger, table: RequestTable) -> None:
        self.ledger = ledger
        self.table = table
        self.shares = PageShares(ledger)
        self.page_size = ledger.page_size

    def pages_for(self, tokens: int) -> int:
        """Pages that `tokens` tokens take."""
        return -(-tokens // self.page_size)

    def reserve(self, rows: RowArray, lengths: RowArray, evictable: int = 0) -> Shortfall | None:
        """`grow` for those who do not ask which pages it took."""
        growth = self.grow(rows, lengths, evictable)
        return growth if isinstance(growth, Shortfall) else None

    def grow(self, rows: RowArray, lengths: RowArray, evictable: int = 0) -> Growth | Shortfall:
        """Let each of the distinct `rows` hold at least `lengths[i]` tokens (int32); when short nothing has changed.

        A row keeps the pages it has.  Raises InvalidArgument when a row would outgrow the table, or is none; DoubleFree
        when one that needs pages is not in use, or named twice.
        """
        table, size = self.table, self.page_size
        at = rows.astype(np.intp)  # once: numpy would do it for each look-up, at three times the price
        counts = table.page_counts[at]
        takers = (lengths > counts * size).nonzero()[0]
        growth = NO_GROWTH
        if len(takers):  # few rows in most steps: what follows is for them alone
            everyone = len(takers) == len(rows)  # as when prompts come in
            some, have, wanted = (
                (rows, counts, lengths) if everyone else (rows[takers], counts[takers], lengths[takers])
            )
            need = page_count(wanted, size) - have
            if np.maximum.reduce(have + need) > table.max_pages:
                raise InvalidArgument(f"a row of {lengths.max()} tokens; the table has {table.max_pages} pages a row")
            table.require_held(some)
            free, total = self.ledger.free_pages, int(np.add.reduce(need))
            pages = self.ledger.take(total, some if total == len(some) else np.repeat(some, need))
            if pages is None:
                fits = int(takers[np.searchsorted(np.cumsum(need), free, side="right")])
                return Shortfall(self.ledger.pool, total, free, evictable, fits)
            table.append(some, need, pages)
            growth = Growth(takers, need, pages)
        table.lengths[at] = lengths
        return growth

    def grow_by_one(self, rows: RowArray) -> Grown | Shortfall:
        """`grow` for a decode step: one more token for each of the distinct `rows`.  Raises as `grow` does.

        Half the work of `grow`, which counts pages: who takes one here takes one.
        """
        table = self.table
        at = table.index_of_held(rows)
        lengths, counts = table.lengths[at], table.page_counts[at]
        takers = (lengths == counts * self.page_size).nonzero()[0]
        pages = NO_GROWTH.pages
        if len(takers):
            some, have = at[takers], counts[takers]
            if np.maximum.reduce(have) >= table.max_pages:
                raise InvalidArgument(
                    f"a row of {lengths.max() + 1} tokens; the table has {table.max_pages} pages a row"
                )
            taken = self.ledger.take(len(takers), rows[takers])
            if taken is None:
                free = self.ledger.free_pages
                return Shortfall(self.ledger.pool, len(takers), free, 0, int(takers[free]))
            pages = taken
            table.pages[some, have] = pages
            table.page_counts[some] = have + 1
        lengths += 1
        table.lengths[at] = lengths
        return Grown(lengths, takers, pages)

    def release(self, rows: RowArray, fences: Sequence[int], reason: str) -> None:
        """One free group: all pages of `rows` and the rows themselves, free once step `fences[i]` is settled.

        Raises DoubleFree or InvalidArgument and changes nothing.
        """
        self._require_leaving(rows, fences)
        for fence, some in _by_fence(rows, fences):
            self._give_back(*self.table.pages_of(rows[some]), fence, reason)
            self.table.close(rows[some], fence)

    def truncate(self, rows: RowArray, lengths: RowArray, fences: Sequence[int], reason: str = "rollback") -> None:
        """Cut `rows` to `lengths[i]` tokens (int32): whole pages beyond are free once step `fences[i]` is settled.

        Raises DoubleFree, or InvalidArgument (also for a row that would go on inside a page that others use too: fork
        again, from where they part) and changes nothing.
        """
        self._require_leaving(rows, fences)
        if len(lengths) != len(rows) or (lengths < 0).any() or (lengths > self.table.lengths[rows]).any():
            raise InvalidArgument(
                f"rows of {self.table.lengths[rows].tolist()[:8]} tokens cannot be cut to {lengths.tolist()[:8]}"
            )
        kept = page_count(lengths, self.page_size)
        partly = lengths % self.page_size > 0
        ends = self.table.pages[rows[partly], kept[partly] - 1]
        if (self.shares.users(ends) > 1).any():
            raise InvalidArgument(f"rows cut to {lengths.tolist()[:8]} tokens would go on in pages that they share")
        for fence, some in _by_fence(rows, fences):
            self._give_back(*self.table.pages_of(rows[some], kept[some]), fence, reason)
        self.table.cut(rows, kept)
        self.table.lengths[rows] = lengths

    def fork(self, row: int, count: int) -> Fork | Shortfall:
        """`count` new rows with the tokens of `row`; short of rows (pool "rows") or pages nothing has changed.

        Raises DoubleFree or InvalidArgument and changes nothing.
        """
        table, size = self.table, self.page_size
        if count < 1:
            raise InvalidArgument(f"{count} new rows from row {row}; at least 1")
        table.require_held(np.array([row], np.int32))
        if count > table.free_rows:
            return Shortfall("rows", count, table.free_rows, 0, table.free_rows)
        whole, tokens = divmod(int(table.lengths[row]), size)
        free, need = self.ledger.free_pages, count if tokens else 0
        if need > free:
            return Shortfall(self.ledger.pool, need, free, 0, free)
        rows = np.array([table.open() for _ in range(count)], np.int32)
        targets = self.ledger.take(need, rows[:need])
        if targets is None:
            raise BrokenInvariant(f"pool {self.ledger.pool!r}: {need} pages that were free a moment ago are gone")
        if whole:
            shared = table.pages[row, :whole].copy()
            self.shares.add_users(shared, row, count)
            table.append(rows, np.full(count, whole, np.int32), np.tile(shared, count))
        if tokens:
            table.append(rows, np.ones(count, np.int32), targets)
        table.lengths[rows] = table.lengths[row]
        return Fork(rows, int(table.pages[row, whole]) if tokens else 0, targets, tokens)

    def check(self) -> None:
        """Raise BrokenInvariant unless ledger and table agree: each page in a row's line is held by that row.

        A shared page is in as many lines as it has users.
        """
        self.ledger.check()
        self.table.check()
        lengths, room = self.table.lengths, self.table.page_counts * np.int64(self.page_size)
        if lengths.min() < 0 or (lengths > room).any():
            raise BrokenInvariant("a row has reserved more tokens than its pages hold, or fewer than 0")
        pages, rows = self.table.pages_of(np.arange(self.table.max_rows, dtype=np.int32))
        lines = np.bincount(pages, minlength=self.ledger.pages + 1)
        users = self.shares.users(np.arange(self.ledger.pages + 1, dtype=np.int32))
        named = np.count_nonzero(lines)
        if named != self.ledger.held_pages or (lines != np.where(users > 0, users, lines > 0)).any():
            raise BrokenInvariant(
                f"pool {self.ledger.pool!r}: {self.ledger.held_pages} pages held, {np.count_nonzero(users)} shared; "
                f"the table names {named} in {len(pages)} places"
            )
        if not np.array_equal(self.ledger.holders_of(pages), np.where(users[pages] > 0, SHARED, rows)):
            raise BrokenInvariant(f"pool {self.ledger.pool!r}: a row's line names a page that another holds")

    def _require_leaving(self, rows: RowArray, fences: Sequence[int]) -> None:
        self.table.require_held(rows)
        if len(fences) != len(rows):
            raise InvalidArgument(f"{len(fences)} fences for {len(rows)} rows")

    def _give_back(self, pages: PageArray, holders: RowArray, fence: int, reason: str) -> None:
        if self.shares.pages:
            shared = self.shares.users(pages) > 0
            for last, left in self.shares.drop(pages[shared], fence).items():
                self.ledger.release(left, SHARED, reason=reason, fence=last)
            pages, holders = pages[~shared], holders[~shared]
        self.ledger.release_lines(pages, holders, reason=reason, fence=fence)


def _by_fence(rows: RowArray, fences: Sequence[int]) -> list[tuple[int, slice | NDArray[np.bool_]]]:
    """Which of the rows have which fence; in most steps all have the same."""
    different = sorted(set(fences))
    if len(different) == 1:
        return [(different[0], slice(None))]
    by_row = np.asarray(fences, np.int64)
    return [(fence, by_row == fence) for fence in different]
