"""What an extend step takes from ledger and table, in as few passes over its rows as there may be.

`RowAllocator.grow` picks out the rows that need pages, which in most steps are few.  Here, where most of them do, they
are treated alike, and what the kernels want to know falls off on the way.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvloom.allocator.errors import InvalidArgument
from kvloom.allocator.indices import places_below
from kvloom.allocator.pages import PageLedger
from kvloom.allocator.reports import Shortfall
from kvloom.allocator.ring import NO_PAGES, PageArray
from kvloom.allocator.rows import shortfall
from kvloom.allocator.table import RequestTable, RowArray


class Extended(NamedTuple):
    """An extend step: the rows' lengths before it, where the new pages and tokens of each begin, and the pages.

    For N rows `page_start` and `token_start` are int32 [N + 1], with the totals at their ends; the next step writes
    over them.
    """

    prefix_lens: RowArray
    page_start: NDArray[np.int32]
    token_start: NDArray[np.int32]
    pages: PageArray


class Extending:
    """Extends rows of `table` with pages of `ledger`, which a `RowAllocator` has in its care."""

    def __init__(self, ledger: PageLedger, table: RequestTable) -> None:
        self.ledger = ledger
        self.table = table
        size = ledger.page_size
        # Arrays, because numpy takes as long to look at a number as to add it to 256 others.
        self._size, self._size_less_one = np.array(size, np.int32), np.array(size - 1, np.int32)
        self._line, self._line_tokens = np.array(table.max_pages), table.max_pages * size
        self._row_tokens_max = np.array(min(self._line_tokens, 2**31 - size), np.int32)
        self._lines = table.pages.reshape(-1)
        self._starts = np.zeros((2, table.max_rows + 1), np.int32)  # scratch: of tokens, of pages

    def extend(self, rows: RowArray, lengths: RowArray, tokens_max: int) -> Extended | Shortfall:
        """Let each of the distinct `rows` grow to `lengths[i]` tokens (int32), by at most `tokens_max` all together.

        When short nothing has changed.  Raises InvalidArgument when a row would shrink, or outgrow the table, or is
        none, or the tokens are too many; DoubleFree when one is not in use, or named twice.
        """
        table = self.table
        at = table.slots.index_of_held(rows)
        before = table.lengths[at]
        if len(lengths) != len(rows):
            raise InvalidArgument(f"{len(lengths)} lengths for {len(rows)} rows")
        tokens = lengths - before
        # Below 0 is huge without a sign.
        if np.count_nonzero(tokens.view(np.uint32) > (self._row_tokens_max - before).view(np.uint32)):
            raise InvalidArgument(
                f"rows of {before[:8].tolist()} tokens cannot grow to {lengths[:8].tolist()}; a row of the table has "
                f"{table.max_pages} pages of {self.ledger.page_size}"
            )
        token_start, page_start = self._starts[:, : len(rows) + 1]
        np.add.accumulate(tokens, 0, None, token_start[1:])
        # What might not fit into 32 bits is added up in 64.
        fits = len(rows) * self._line_tokens < 2**31
        total = int(token_start[-1] if fits else np.add.reduce(tokens, dtype=np.int64))
        if total > tokens_max:
            raise InvalidArgument(f"{total} new tokens in a step of at most {tokens_max}")
        have = table.page_counts[at]
        need = (lengths + self._size_less_one) // self._size - have
        np.add.accumulate(need, 0, None, page_start[1:])
        pages = self._taken(rows, at, have, need, page_start)
        if pages is None:
            return shortfall(self.ledger, have, page_start, self.ledger.free_pages)
        table.lengths[at] = lengths
        return Extended(before, page_start, token_start, pages)

    def _taken(
        self, rows: RowArray, at: NDArray[np.intp], have: RowArray, need: RowArray, page_start: RowArray
    ) -> PageArray | None:
        """`need[i]` further pages for each row, by now in the table; None when short."""
        table, count = self.table, int(page_start[-1])
        if count == 0:
            return NO_PAGES
        alone = len(rows) == 1
        times = need.astype(np.intp)
        pages = self.ledger.take_for_rows(count, rows if alone else rows.repeat(times))
        if pages is None:
            return None
        if alone:
            table.pages[rows[0], have[0] : have[0] + count] = pages
        else:
            places = (at * self._line + (have - page_start[:-1])).repeat(times)
            places += places_below(count)
            self._lines[places] = pages
        table.page_counts[at] = have + need
        return pages
