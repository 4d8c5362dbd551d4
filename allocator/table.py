"""RequestTable: one row per running request, its page ids in order.

The host's copy is the truth; the device's is written by the kernels from what the host sends along with a step (on the
CPU the two are the same memory).  A row that is given back is handed out again only once the last step that names it is
settled.

A line has up to three parts: places that have been given back (left of a window; 0), pages of the prefix cache that
the row only uses, and pages of its own.  The first two are there in a memory with windows or a prefix cache only.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from kvloom.allocator.devices import device_of
from kvloom.allocator.errors import BrokenInvariant, InvalidArgument
from kvloom.allocator.indices import spans, whole
from kvloom.allocator.ring import PageArray
from kvloom.allocator.row_slots import RowArray, RowSlots

__all__ = ["RequestTable", "RowArray"]


class RequestTable:
    """Rows 0 .. max_rows - 1 of up to `max_pages` pages; row `max_rows` is the pad row and belongs to nobody.

    Public arrays, to read only:
    pages        int32 [max_rows + 1, max_pages], page ids in order, 0 behind the last
    page_counts  int32 [max_rows + 1], places in use, those before `first` included
    lengths      int32 [max_rows + 1], tokens that the row has reserved
    first        int32 [max_rows + 1], places before it have been given back
    reused       int32 [max_rows + 1], places before it belong to the prefix cache (or have been given back)
    device_pages the device's copy of `pages`, torch int32; left of `first` it may still name what stood there

    `slots`: the rows of another table, where several pools have a line each for every row.
    """

    def __init__(
        self, max_rows: int, max_pages: int, device: torch.device | str = "cpu", slots: RowSlots | None = None
    ) -> None:
        max_pages = whole("max_pages", max_pages)
        if max_pages < 1:
            raise InvalidArgument(f"a table of {max_rows} rows of {max_pages} pages; at least 1 each")
        self.slots = slots or RowSlots(max_rows)
        self.max_rows = self.slots.max_rows
        self.max_pages = max_pages
        self.pages = np.zeros((self.max_rows + 1, max_pages), np.int32)
        # The same in one row: numpy takes three times as long to index with a row and a place.
        self._lines = self.pages.reshape(-1)
        self.page_counts, self.lengths, self.first, self.reused = np.zeros((4, self.max_rows + 1), np.int32)
        device = device_of(device)
        if device.type == "cpu":
            self.device_pages = torch.from_numpy(self.pages)
        else:
            self.device_pages = torch.zeros(self.pages.shape, dtype=torch.int32, device=device)

    @property
    def pad_row(self) -> int:
        """The row that padding may name."""
        return self.max_rows

    @property
    def free_rows(self) -> int:
        """Rows that `open` could hand out now."""
        return self.slots.free

    @property
    def quarantined_rows(self) -> int:
        """Rows given back that wait for a step in flight."""
        return self.slots.quarantined

    @property
    def held_rows(self) -> int:
        """Rows in use."""
        return self.slots.held

    def open(self) -> int | None:
        """An empty row; None when all are taken."""
        return self.slots.open()

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

    def own_pages(self, rows: RowArray, keep: RowArray | None = None) -> tuple[PageArray, RowArray]:
        """Page ids that `rows` hold themselves, row after row, and whose each is: two int32 arrays of the same length.

        Those in the first `keep[i]` places of each row, if given, are left out.
        """
        counts = self.page_counts[rows]
        skip = np.maximum(self.first[rows], self.reused[rows])
        if keep is not None:
            skip = np.maximum(skip, keep)
        elif np.maximum.reduce(skip, initial=0) == 0 and (width := self._common_width(counts)) is not None:
            return self.pages[rows, :width].reshape(-1), np.repeat(rows, counts)
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

    def reuse(self, row: int, pages: PageArray, first: int, tokens: int) -> None:
        """An empty row begins with `pages` of the prefix cache, 0 in the places before `first`: `tokens` tokens."""
        self.pages[row, : len(pages)] = pages
        self.page_counts[row] = self.reused[row] = len(pages)
        self.first[row] = first
        self.lengths[row] = tokens

    def begin_at(self, row: int, first: int, tokens: int) -> None:
        """An empty row goes on behind `tokens` tokens, the pages of the first `first` places being gone already."""
        self.page_counts[row] = self.first[row] = first
        self.lengths[row] = tokens

    def drop_front(self, rows: RowArray, first: RowArray) -> None:
        """Forget the page ids in the places before `first[i]`, which is not less than it was."""
        self._lines[self._places(rows, self.first[rows], first - self.first[rows])] = 0
        self.first[rows] = first

    def empty(self, rows: RowArray) -> None:
        """Forget all that stands in `rows`."""
        counts = self.page_counts[rows]
        width = self._common_width(counts)
        if width is None:
            self.cut(rows, np.zeros_like(rows))
        else:
            self.pages[rows, :width] = 0
        for array in (self.page_counts, self.lengths, self.first, self.reused):
            array[rows] = 0

    def close(self, rows: RowArray, fence: int) -> None:
        """Give rows back, free once step `fence` is settled.

        Raises DoubleFree or InvalidArgument and changes nothing.
        """
        self.slots.close(rows, fence)
        self.empty(rows)

    def settle(self, step: int) -> None:
        """Step `step` is over: rows fenced up to it are free."""
        self.slots.settle(step)

    def slack_tokens(self, page_size: int) -> int:
        """Slots in held pages that no reserved token fills."""
        return int(self.page_counts.sum(dtype=np.int64)) * page_size - int(self.lengths.sum(dtype=np.int64))

    def check(self) -> None:
        """Raise BrokenInvariant unless rows are in one state each, and those that nobody holds are empty."""
        self.slots.check()
        held = np.zeros(self.max_rows + 1, np.bool_)
        held[self.slots.held_rows()] = True
        counts, before = self.page_counts, np.maximum(self.first, self.reused)  # the pad row too
        if counts[~held].any() or self.lengths[~held].any() or before[~held].any() or self.pages[self.pad_row].any():
            raise BrokenInvariant("a row that nobody holds has pages or tokens")
        if counts.min() < 0 or counts.max() > self.max_pages or self.first.min() < 0 or (before > counts).any():
            raise BrokenInvariant(
                f"a row has fewer than 0 or more than {self.max_pages} pages, or begins behind its end"
            )

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
