"""Row verbs on the host: ledger, request table and shares of one pool together.  Numbers only; no tensor."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvloom.allocator.errors import BrokenInvariant, InvalidArgument
from kvloom.allocator.indices import page_count
from kvloom.allocator.pages import PageLedger
from kvloom.allocator.reports import Shortfall
from kvloom.allocator.ring import NO_PAGES, PageArray
from kvloom.allocator.sharing import SHARED, PageShares
from kvloom.allocator.table import RequestTable, RowArray

SlotArray = NDArray[np.int64]


class Fork(NamedTuple):
    """New rows that go on where another stands: whole pages are shared, the partly filled last one is to be copied.

    If `tokens` > 0, the first `tokens` slots of page `source` belong into each page of `targets`, one for each row.
    """

    rows: RowArray
    source: int
    targets: PageArray
    tokens: int

    def slots(self, page_size: int) -> tuple[SlotArray, SlotArray]:
        """From which slots to which ones tokens are to be copied: int64 [rows * tokens] both."""
        within = np.arange(self.tokens, dtype=np.int64)
        source = np.tile(self.source * page_size + within, len(self.rows))
        target = (self.targets.astype(np.int64)[:, None] * page_size + within).reshape(-1)
        return source, target


class Grown(NamedTuple):
    """A decode step: the rows' lengths now, which of them took a page (indices), and these pages."""

    lengths: RowArray
    takers: NDArray[np.intp]
    pages: PageArray


def shortfall(ledger: PageLedger, have: RowArray, page_start: NDArray[np.integer], free: int) -> Shortfall:
    """Of rows that have `have[i]` pages and want `page_start[i + 1] - page_start[i]` more, which fit into `free`."""
    first = int(page_start[1:].searchsorted(free, "right"))  # who does not fit
    upto = int(have[first] + free - page_start[first]) * ledger.page_size
    return Shortfall(ledger.pool, int(page_start[-1]), free, 0, first, upto)


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
        # Arrays, because numpy takes as long to look at a number as to add it to 256 others.
        self._one, self._size = np.array(1, np.int32), np.array(self.page_size, np.int32)
        self._line, self._lines = np.array(table.max_pages), table.pages.reshape(-1)

    def pages_for(self, tokens: int) -> int:
        """Pages that `tokens` tokens take."""
        return -(-tokens // self.page_size)

    def reserve(
        self, rows: RowArray, lengths: RowArray, op: str = "decode", spare: int = 0, again: bool = False
    ) -> Shortfall | None:
        """`grow` for those who do not ask which pages it took."""
        pages = self.grow(rows, lengths, op, spare, again)
        return pages if isinstance(pages, Shortfall) else None

    def grow(
        self, rows: RowArray, lengths: RowArray, op: str = "prefill", spare: int = 0, again: bool = False
    ) -> PageArray | Shortfall:
        """Let each of the distinct `rows` hold at least `lengths[i]` tokens (int32); the pages taken, row after row.

        `op` is what they are for, and if any are taken, `spare` must stay free; a shortage that is there `again` is not
        counted once more.
        When short nothing has changed.  A row that holds more stays as it is.  Raises InvalidArgument when a row would
        outgrow the table, or is none; DoubleFree when one is not in use, or named twice.
        """
        table, size = self.table, self.page_size
        at = table.slots.index_of_held(rows)
        # Below 0 is huge without a sign.
        if len(lengths) != len(rows) or np.maximum.reduce(lengths.view(np.uint32), initial=0) > table.max_pages * size:
            raise InvalidArgument(
                f"{len(lengths)} lengths for {len(rows)} rows: {lengths[:8].tolist()} tokens; a row of the table has "
                f"{table.max_pages} pages of {size}"
            )
        counts = table.page_counts[at]
        takers = (lengths > counts * size).nonzero()[0]
        pages = NO_PAGES
        if len(takers):  # few rows in most steps: what follows is for them alone
            some, have, wanted = rows, counts, lengths
            if len(takers) < len(rows):
                some, have, wanted = rows[takers], counts[takers], lengths[takers]
            need = page_count(wanted, size) - have
            free, total = max(self.ledger.free_pages - spare, 0), int(np.add.reduce(need))
            holders = int(some[0]) if len(some) == 1 else np.repeat(some, need)
            taken = self.ledger.take_for_rows(total, holders, op, again, spare)
            if taken is None:
                short = shortfall(self.ledger, have, np.concatenate(([0], np.cumsum(need))), free)
                return short._replace(fits=int(takers[short.fits]))
            table.append(some, need, taken)
            pages = taken
        table.lengths[at] = np.maximum(table.lengths[at], lengths)
        return pages

    def grow_by_one(self, rows: RowArray) -> Grown | Shortfall:
        """`grow` for a decode step: one more token for each of the distinct `rows`.  Raises as `grow` does.

        Half the work of `grow`, which counts pages: who takes one here takes one.
        """
        table = self.table
        at = table.slots.index_of_held(rows)
        # "wrap", because they are known to be in range, and numpy need not look.
        lengths, counts = table.lengths.take(at, mode="wrap"), table.page_counts.take(at, mode="wrap")
        takers = (lengths == counts * self._size).nonzero()[0]
        pages = NO_PAGES
        if len(takers):
            some, have = at[takers], counts[takers]
            if np.count_nonzero(have == self._line):
                raise InvalidArgument(
                    f"a row of {lengths.max() + 1} tokens; the table has {table.max_pages} pages a row"
                )
            taken = self.ledger.take_for_rows(len(takers), rows[takers], "decode")
            if taken is None:
                free = self.ledger.free_pages
                return Shortfall(
                    self.ledger.pool, len(takers), free, 0, int(takers[free]), int(have[free]) * self.page_size
                )
            pages = taken
            self._lines[some * self._line + have] = pages
            table.page_counts[some] = have + self._one
        lengths += self._one
        table.lengths[at] = lengths
        return Grown(lengths, takers, pages)

    def undo(self, rows: RowArray, lengths: RowArray) -> None:
        """After an upload or a launch that failed: rows are as long as they were; the device has not heard of more."""
        self.truncate(rows, lengths, [-1] * len(rows))

    def release(self, rows: RowArray, fences: Sequence[int], reason: str) -> None:
        """One free group: all pages of `rows` and the rows themselves, free once step `fences[i]` is settled.

        Raises DoubleFree or InvalidArgument and changes nothing.
        """
        for fence, some in self.table.slots.by_fence(rows, fences):
            self.drop(rows[some], fence, reason)
            self.table.slots.close(rows[some], fence)

    def drop(self, rows: RowArray, fence: int, reason: str) -> None:
        """Rows in use give back what is theirs, and are empty."""
        self._give_back(*self.table.own_pages(rows), fence, reason)
        self.table.empty(rows)

    def trim(self, rows: RowArray, first: RowArray) -> None:
        """The places before `first[i]` of rows in use are left of the window: the pages there that are theirs are free.

        Nothing happens to a row that begins there already.  No step in flight may read these pages.
        """
        moved = first > self.table.first[rows]
        if np.count_nonzero(moved):
            rows, first = rows[moved], first[moved]
            begin = np.maximum(self.table.first[rows], self.table.reused[rows])
            count = np.maximum(first - begin, 0)
            self._give_back(self.table.pages_at(rows, begin, count), np.repeat(rows, count), -1, "window")
            self.table.drop_front(rows, first)

    def truncate(self, rows: RowArray, lengths: RowArray, fences: Sequence[int], reason: str = "rollback") -> None:
        """Cut `rows` to `lengths[i]` tokens (int32): whole pages beyond are free once step `fences[i]` is settled.

        Raises DoubleFree, or InvalidArgument (also for a row that would go on inside a page that others use too: fork
        again, from where they part) and changes nothing.
        """
        groups = self.table.slots.by_fence(rows, fences)
        if len(lengths) != len(rows) or (lengths < 0).any() or (lengths > self.table.lengths[rows]).any():
            raise InvalidArgument(
                f"rows of {self.table.lengths[rows].tolist()[:8]} tokens cannot be cut to {lengths.tolist()[:8]}"
            )
        kept = page_count(lengths, self.page_size)
        if (kept < np.maximum(self.table.first[rows], self.table.reused[rows])).any():
            raise InvalidArgument(f"rows cut to {lengths.tolist()[:8]} tokens would end in pages that are not theirs")
        partly = lengths % self.page_size > 0
        ends = self.table.pages[rows[partly], kept[partly] - 1]
        if (self.shares.users(ends) > 1).any():
            raise InvalidArgument(f"rows cut to {lengths.tolist()[:8]} tokens would go on in pages that they share")
        for fence, some in groups:
            self._give_back(*self.table.own_pages(rows[some], kept[some]), fence, reason)
        self.table.cut(rows, kept)
        self.table.lengths[rows] = lengths

    def fork(self, row: int, count: int) -> Fork | Shortfall:
        """`count` new rows with the tokens of `row`; short of rows (pool "rows") or pages nothing has changed.

        Raises DoubleFree or InvalidArgument and changes nothing.
        """
        table = self.table
        if count < 1:
            raise InvalidArgument(f"{count} new rows from row {row}; at least 1")
        table.slots.require_held(np.array([row], np.int32))
        if count > table.free_rows:
            return Shortfall("rows", count, table.free_rows, 0, table.free_rows)
        rows = np.array([table.open() for _ in range(count)], np.int32)
        forked = self.fork_into(row, rows, int(table.lengths[row]))
        if isinstance(forked, Shortfall):
            table.close(rows, -1)
        return forked

    def fork_into(self, row: int, rows: RowArray, length: int, *, again: bool = False) -> Fork | Shortfall:
        """`fork` the first `length` tokens into empty rows; a shortage that is there `again` is not counted once more.

        Their lines name pages of the prefix cache too, whose users are not counted here.
        """
        table, count = self.table, len(rows)
        full, tokens = divmod(length, self.page_size)
        need = count if tokens else 0
        targets = self.ledger.take_for_rows(need, rows[:need], "decode", again)
        if targets is None:
            return Shortfall(self.ledger.pool, need, self.ledger.free_pages, 0, self.ledger.free_pages)
        own = table.pages[row, max(table.first[row], table.reused[row]) : full].copy()
        if len(own):
            self.shares.add_users(own, row, count)
        table.pages[rows, :full] = table.pages[row, :full]
        table.page_counts[rows] = full
        for array in (table.first, table.reused):
            array[rows] = array[row]
        if tokens:
            table.append(rows, np.ones(count, np.int32), targets)
        table.lengths[rows] = length
        return Fork(rows, int(table.pages[row, full]) if tokens else 0, targets, tokens)

    def shared(self, row: int, pages: PageArray) -> NDArray[np.bool_]:
        """Which of the pages (0: none) in the line of `row` others use too; what only it uses is its own again."""
        shared = np.zeros(len(pages), np.bool_)
        if self.shares.pages:
            users = self.shares.users(pages)
            self.shares.take_over(pages[users == 1], row)
            shared = users > 1
        return shared

    def check(self) -> None:
        """Raise BrokenInvariant unless ledger and table agree: each page in a row's line is held by that row.

        A shared page is in as many lines as it has users.
        """
        self.ledger.check()
        self.table.check()
        lengths, room = self.table.lengths, self.table.page_counts * np.int64(self.page_size)
        if lengths.min() < 0 or (lengths > room).any():
            raise BrokenInvariant("a row has reserved more tokens than its pages hold, or fewer than 0")
        pages, rows = self.table.own_pages(np.arange(self.table.max_rows, dtype=np.int32))
        lines = np.bincount(pages, minlength=self.ledger.pages + 1)
        users = self.shares.users(np.arange(self.ledger.pages + 1, dtype=np.int32))
        named = np.count_nonzero(lines)
        held = self.ledger.pages_of_rows()
        if named != held or (lines != np.where(users > 0, users, lines > 0)).any():
            raise BrokenInvariant(
                f"pool {self.ledger.pool!r}: rows hold {held} pages, {np.count_nonzero(users)} shared; "
                f"the table names {named} in {len(pages)} places"
            )
        if not np.array_equal(self.ledger.holders_of(pages), np.where(users[pages] > 0, SHARED, rows)):
            raise BrokenInvariant(f"pool {self.ledger.pool!r}: a row's line names a page that another holds")

    def _give_back(self, pages: PageArray, holders: RowArray, fence: int, reason: str) -> None:
        if self.shares.pages:
            shared = self.shares.users(pages) > 0
            for last, left in self.shares.drop(pages[shared], fence).items():
                self.ledger.release(left, SHARED, reason=reason, fence=last)
            pages, holders = pages[~shared], holders[~shared]
        self.ledger.release_lines(pages, holders, reason=reason, fence=fence)
