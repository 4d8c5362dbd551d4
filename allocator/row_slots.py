"""RowSlots: which rows of a request table are in use.  The tables of all pools of a memory share one."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvloom.allocator.errors import BrokenInvariant, DoubleFree, InvalidArgument
from kvloom.allocator.indices import whole

RowArray = NDArray[np.int32]


class RowSlots:
    """Rows 0 .. max_rows - 1, each free, held, or waiting for the last step that names it.

    Raises InvalidArgument for less than one row.
    """

    def __init__(self, max_rows: int) -> None:
        self.max_rows = whole("max_rows", max_rows)
        if self.max_rows < 1:
            raise InvalidArgument(f"a table of {max_rows} rows; at least 1")
        self._held = np.zeros(self.max_rows + 1, np.bool_)
        self._mark = np.zeros(self.max_rows + 1, np.int32)  # scratch: finds rows named twice
        self._free = list(range(self.max_rows - 1, -1, -1))  # a stack: low rows first
        self._waiting: list[tuple[int, list[int]]] = []  # (fence, rows)
        self._order = np.arange(self.max_rows, dtype=np.int32)
        self._rows_limit = np.array(self.max_rows, np.uintp)
        self._checked = b""  # rows that are known to be held, and distinct
        self._checked_index = np.empty(0, np.intp)
        self._settled = -1
        self.quarantined = 0  # rows given back that wait for a step in flight

    @property
    def free(self) -> int:
        """Rows that `open` could hand out now."""
        return len(self._free)

    @property
    def held(self) -> int:
        """Rows in use."""
        return self.max_rows - len(self._free) - self.quarantined

    def held_rows(self) -> RowArray:
        """Which rows are in use, int32."""
        return np.flatnonzero(self._held).astype(np.int32)

    def open(self) -> int | None:
        """A row; None when all are taken."""
        if not self._free:
            return None
        row = self._free.pop()
        self._held[row] = True
        return row

    def close(self, rows: RowArray, fence: int) -> None:
        """Give rows back, free once step `fence` is settled.

        Raises DoubleFree or InvalidArgument and changes nothing.
        """
        self.require_held(rows)
        fence = whole("fence", fence)
        self._held[rows] = False
        self._checked, self._checked_index = b"", self._checked_index[:0]
        if fence <= self._settled:
            self._free += rows.tolist()
        else:
            self._waiting.append((fence, rows.tolist()))
            self.quarantined += len(rows)

    def settle(self, step: int) -> None:
        """Step `step` is over: rows fenced up to it are free."""
        self._settled = max(self._settled, step)
        for _ in range(len(self._waiting)):
            fence, rows = self._waiting.pop(0)
            if fence <= self._settled:
                self._free += rows
                self.quarantined -= len(rows)
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
        if len(rows) == len(self._checked_index) and rows.tobytes() == self._checked:
            return self._checked_index
        at = rows.astype(np.intp)
        if self._distinct_held(at):
            at.setflags(write=False)
            self._checked, self._checked_index = rows.tobytes(), at
            return at
        if len(rows) and (rows.min() < 0 or rows.max() >= self.max_rows):
            raise InvalidArgument(f"rows run from 0 to {self.max_rows - 1}; got {rows.tolist()[:8]}")
        raise DoubleFree(f"rows {rows.tolist()[:8]} are not all in use, or one is named twice")

    def _distinct_held(self, at: NDArray[np.intp]) -> bool:
        count = len(at)
        if count == 1:
            return 0 <= at[0] < self.max_rows and bool(self._held[at[0]])
        # Below 0 is huge without a sign. `count_nonzero`, because `all` takes ten times as long for a few.
        if not np.count_nonzero(at.view(np.uintp) < self._rows_limit) == count <= self.max_rows:
            return False
        order = self._order[:count]
        self._mark[at] = order
        return bool(np.count_nonzero(self._held[at]) == count == np.count_nonzero(self._mark[at] == order))

    def by_fence(self, rows: RowArray, fences: Sequence[int]) -> list[tuple[int, slice | NDArray[np.bool_]]]:
        """Which of the rows have which fence; in most steps all have the same.

        Raises DoubleFree or InvalidArgument unless all are held, and each has a fence.
        """
        self.require_held(rows)
        if len(fences) != len(rows):
            raise InvalidArgument(f"{len(fences)} fences for {len(rows)} rows")
        # One look at their types for all: 256 rows may leave at once.
        plain = set(map(type, fences)) <= {int}
        different = sorted(set(fences) if plain else {whole("fence", fence) for fence in fences})
        if len(different) == 1:
            return [(different[0], slice(None))]
        by_row = np.asarray(fences, np.int64)
        return [(fence, by_row == fence) for fence in different]

    def check(self) -> None:
        """Raise BrokenInvariant unless each row is in exactly one state; O(rows)."""
        held = np.flatnonzero(self._held).tolist()
        everyone = [*self._free, *(row for _, rows in self._waiting for row in rows), *held]
        if sorted(everyone) != list(range(self.max_rows)):
            raise BrokenInvariant(f"{self.max_rows} rows, but free, waiting and held ones are {sorted(everyone)}")
