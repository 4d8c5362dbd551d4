"""RequestTable: one row per running request, its page ids in order.

The host's copy is the truth; the device's is written by the kernels from what the host sends along with a step (on the
CPU the two are the same memory).  A row that is given back is handed out again only once the last step that names it is
settled.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from kvloom.allocator.devices import device_of
from kvloom.allocator.errors import BrokenInvariant, DoubleFree, InvalidArgument
from kvloom.allocator.indices import counting, spans, whole
from kvloom.allocator.ring import PageArray

RowArray = NDArray[np.int32]


class RequestTable:
    """Rows 0 .. max_rows - 1 of up to `max_pages` pages; row `max_rows` is the pad row and belongs to nobody.

    Public arrays, to read only:
    pages        int32 [max_rows + 1, max_pages], page ids in order, 0 behind the last
    page_counts  int32 [max_rows + 1]
    lengths      int32 [max_rows + 1], tokens that the row has reserved
    device_pages the device's copy of `pages`, torch int32
    """

    def __init__(self, max_rows: int, max_pages: int, device: torch.device | str = "cpu") -> None:
        max_rows, max_pages = whole("max_rows", max_rows), whole("max_pages", max_pages)
        if max_rows < 1 or max_pages < 1:
            raise InvalidArgument(f"a table of {max_rows} rows of {max_pages} pages; at least 1 each")
        self.max_rows = max_rows
        self.max_pages = max_pages
        self.pages = np.zeros((max_rows + 1, max_pages), np.int32)
        # The same in one row: numpy takes three times as long to index with a row and a place.
        self._lines = self.pages.reshape(-1)
        self.page_counts = np.zeros(max_rows + 1, np.int32)
        self.lengths = np.zeros(max_rows + 1, np.int32)
        device = device_of(device)
        if device.type == "cpu":
            self.device_pages = torch.from_numpy(self.pages)
        else:
            self.device_pages = torch.zeros(self.pages.shape, dtype=torch.int32, device=device)
        self._held = np.zeros(max_rows + 1, np.bool_)
        self._mark = np.zeros(max_rows + 1, np.int32)  # scratch: finds rows named twice
        self._free = list(range(max_rows - 1, -1, -1))  # a stack: low rows first
        self._waiting: list[tuple[int, list[int]]] = []  # (fence, rows)
        self._quarantined = 0
        self._checked = np.empty(0, np.int32)  # rows that are known to be held, and distinct
        self._checked_index = np.empty(0, np.intp)
        self._settled = -1

    @property
    def pad_row(self) -> int:
        """The row that padding may name."""
        return self.max_rows

    @property
    def free_rows(self) -> int:
        """Rows that `open` could hand out now."""
        return len(self._free)

    @property
    def quarantined_rows(self) -> int:
        """Rows given back that wait for a step in flight."""
        return self._quarantined

    @property
    def held_rows(self) -> int:
        """Rows in use."""
        return self.max_rows - len(self._free) - self._quarantined

    def open(self) -> int | None:
        """An empty row; None when all are taken."""
        if not self._free:
            return None
        row = self._free.pop()
        self._held[row] = True
        return row

    def append(self, rows: RowArray, counts: RowArray, pages: PageArray) -> None:
        """Put `counts[i]` further page ids, at least one, behind those of `rows[i]`.  Rows are distinct.

        Raises InvalidArgument when a line is too short, and changes nothing.
        """
        before = self.page_counts[rows]
        if np.maximum.reduce(before + counts, initial=0) > self.max_pages:
            raise InvalidArgument(f"a row of {int((before + counts).max())} pages; a line has {self.max_pages}")
        if len(pages) == len(rows):  # one each, as in a decode step
            self.pages[rows, before] = pages
        elif len(rows) == 1:  # a prompt that comes alone
            self.pages[rows[0], before[0] : before[0] + len(pages)] = pages
        else:
            self._lines[self._places(rows, before, counts)] = pages
        self.page_counts[rows] = before + counts

    def pages_of(self, rows: RowArray, skip: RowArray | None = None) -> tuple[PageArray, RowArray]:
        """Page ids of `rows`, row after row, and whose each is: two int32 arrays of the same length.

        The first `skip[i]` of each row, if given, are left out.
        """
        counts = self.page_counts[rows]
        width = self._common_width(counts)
        if skip is None and width is not None:
            return self.pages[rows, :width].reshape(-1), np.repeat(rows, counts)
        if skip is None:
            skip = np.zeros_like(counts)
        counts = counts - skip
        return self.pages_at(rows, skip, counts), np.repeat(rows, counts)

    def pages_at(self, rows: RowArray, first: RowArray, counts: RowArray) -> PageArray:
        """The page ids `first[i]` and following of `rows[i]`, `counts[i]` of them, row after row; int32."""
        return self._lines[self._places(rows, first, counts)]

    def cut(self, rows: RowArray, counts: RowArray) -> None:
        """Forget the page ids of `rows` behind the first `counts[i]`."""
        gone = self.page_counts[rows] - counts
        self._lines[self._places(rows, counts, gone)] = 0
        self.page_counts[rows] = counts

    def close(self, rows: RowArray, fence: int) -> None:
        """Give rows back, free once step `fence` is settled.

        Raises DoubleFree or InvalidArgument and changes nothing.
        """
        self.require_held(rows)
        fence = whole("fence", fence)
        width = self._common_width(self.page_counts[rows])
        if width is None:
            self.cut(rows, np.zeros_like(rows))
        else:
            self.pages[rows, :width] = 0
            self.page_counts[rows] = 0
        self.lengths[rows] = 0
        self._held[rows] = False
        self._checked, self._checked_index = self._checked[:0], self._checked_index[:0]
        if fence <= self._settled:
            self._free += rows.tolist()
        else:
            self._waiting.append((fence, rows.tolist()))
            self._quarantined += len(rows)

    def settle(self, step: int) -> None:
        """Step `step` is over: rows fenced up to it are free."""
        self._settled = max(self._settled, step)
        for _ in range(len(self._waiting)):
            fence, rows = self._waiting.pop(0)
            if fence <= self._settled:
                self._free += rows
                self._quarantined -= len(rows)
            else:
                self._waiting.append((fence, rows))

    def require_held(self, rows: RowArray) -> None:
        """Raise DoubleFree or InvalidArgument unless `rows` are distinct rows in use."""
        self.index_of_held(rows)

    def index_of_held(self, rows: RowArray) -> NDArray[np.intp]:
        """`rows` as numpy indexes with them.  Raises as `require_held`.

        In a decode loop the same rows are named step after step: those that were looked at last are known, for as long
        as no row comes or goes.
        """
        if len(rows) == len(self._checked) and not np.count_nonzero(rows != self._checked):
            return self._checked_index
        count, at = len(rows), rows.astype(np.intp)
        # Below 0 is huge without a sign. `count_nonzero`, because `all` takes ten times as long for a few.
        if np.count_nonzero(at.view(np.uintp) < self.max_rows) == count:
            order = counting(count)
            self._mark[at] = order
            if np.count_nonzero(self._held[at]) == count == np.count_nonzero(self._mark[at] == order):
                at.setflags(write=False)
                self._checked, self._checked_index = rows.astype(np.int32), at
                return at
        if len(rows) and (rows.min() < 0 or rows.max() >= self.max_rows):
            raise InvalidArgument(f"rows run from 0 to {self.max_rows - 1}; got {rows.tolist()[:8]}")
        raise DoubleFree(f"rows {rows.tolist()[:8]} are not all in use, or one is named twice")

    def slack_tokens(self, page_size: int) -> int:
        """Slots in held pages that no reserved token fills."""
        return int(self.page_counts.sum(dtype=np.int64)) * page_size - int(self.lengths.sum(dtype=np.int64))

    def check(self) -> None:
        """Raise BrokenInvariant unless each row is free, held or waiting, and those that nobody holds are empty."""
        held = np.flatnonzero(self._held).tolist()
        everyone = [*self._free, *(row for _, rows in self._waiting for row in rows), *held]
        if sorted(everyone) != list(range(self.max_rows)):
            raise BrokenInvariant(f"rows are not each in one state: {len(everyone)} entries for {self.max_rows} rows")
        loose = np.flatnonzero(~self._held)  # the pad row too
        if self.page_counts[loose].any() or self.lengths[loose].any() or self.pages[self.pad_row].any():
            raise BrokenInvariant("a row that nobody holds has pages or tokens")
        if self.page_counts.min() < 0 or self.page_counts.max() > self.max_pages:
            raise BrokenInvariant(f"a row has fewer than 0 or more than {self.max_pages} pages")

    def _places(self, rows: RowArray, first: RowArray, counts: RowArray) -> NDArray[np.int64]:
        """Where in `_lines` the page ids `first[i]` and following of `rows[i]` stand, `counts[i]` of them."""
        return spans(first + rows * np.int64(self.max_pages), counts)

    @staticmethod
    def _common_width(counts: RowArray) -> int | None:
        """The number of pages that all have, as when one row leaves; None when they differ.

        Whole blocks of lines are three times as fast as places.  Among rows of different length they would cost each
        row what the longest has.
        """
        width = int(np.maximum.reduce(counts, initial=0))
        return width if np.count_nonzero(counts == width) == len(counts) else None
