"""Row verbs: the ledger and the request table together, as the loop uses them.  Host numbers only."""

from collections.abc import Sequence

import numpy as np

from kvloom.allocator.errors import InvalidArgument
from kvloom.allocator.indices import page_count
from kvloom.allocator.pages import PageLedger
from kvloom.allocator.reports import Shortfall
from kvloom.allocator.table import RequestTable, RowArray


class RowAllocator:
    """Pages of one pool for the rows of one table; the ledger names each page's row as its holder."""

    def __init__(self, ledger: PageLedger, table: RequestTable) -> None:
        self.ledger = ledger
        self.table = table
        self._page_size = ledger.page_size

    def pages_for(self, tokens: int) -> int:
        """Pages that `tokens` tokens take."""
        return -(-tokens // self._page_size)

    def reserve(self, rows: RowArray, lengths: RowArray, evictable: int = 0) -> Shortfall | None:
        """Let each of the distinct `rows` hold at least `lengths[i]` tokens; None when done, else nothing has changed.

        A row keeps the pages it has.  Raises InvalidArgument when a row would outgrow the table, or is none; DoubleFree
        when one that needs pages is not in use, or named twice.
        """
        table, size = self.table, self._page_size
        counts = table.page_counts[rows]
        short = lengths > counts * size
        if short.any():  # few rows in most steps: what follows is for them alone
            some, have = rows[short], counts[short]
            need = page_count(lengths[short], size) - have
            if int((have + need).max()) > table.max_pages:
                raise InvalidArgument(f"a row of {lengths.max()} tokens; the table has {table.max_pages} pages a row")
            table.require_held(some)
            free, total = self.ledger.free_pages, int(need.sum())
            pages = self.ledger.take(total, some if total == len(some) else np.repeat(some, need))
            if pages is None:
                fits = int(np.flatnonzero(short)[np.searchsorted(np.cumsum(need), free, side="right")])
                return Shortfall(self.ledger.pool, total, free, evictable, fits)
            table.append(some, need, pages)
        table.lengths[rows] = lengths
        return None

    def release(self, rows: RowArray, fences: Sequence[int], reason: str) -> None:
        """One free group: all pages of `rows` and the rows themselves, free once step `fences[i]` is settled.

        Raises DoubleFree or InvalidArgument and changes nothing.
        """
        self.table.require_held(rows)
        if len(fences) != len(rows):
            raise InvalidArgument(f"{len(fences)} fences for {len(rows)} rows")
        by_row = np.asarray(fences, np.int64)
        for fence in sorted(set(fences)):
            pages, holders = self.table.pages_of(rows[by_row == fence])
            self.ledger.release(pages, holders, reason=reason, fence=fence)
        self.table.close(rows, fences)
