"""The decode step in buffers that stay where they are, so that a model's own CUDA graph can hold its launch.

    step = DecodeStep(rows, max_rows=256)
    with torch.cuda.graph(graph):
        step.launch()                      # last slots, new pages, table entries
        model(step.row_slot, step.seq_lens, step.out_loc, ...)
    while serving:
        step.plan(rows_of_this_step)       # host: pages from the ledger, one upload
        graph.replay()

A graph is captured for one number of rows; behind those of a step stands padding: the table's pad row, with one token,
in slot 0 of the dump page.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from kvloom.allocator.errors import InvalidArgument
from kvloom.allocator.kernels import kernels_for, warm_up
from kvloom.allocator.reports import Shortfall
from kvloom.allocator.rows import RowAllocator
from kvloom.allocator.staging import PinnedRing
from kvloom.allocator.table import RowArray


class DecodeStep:
    """One token for each of up to `max_rows` rows.

    On the device, all of `max_rows` entries and always the same memory:
    row_slot   int32, the rows
    seq_lens   int32, their tokens, the new one included; 1 for padding
    new_pages  int32, the page that a row enters with this token, else 0
    out_loc    int64, slots of the new tokens, after `launch`
    """

    def __init__(self, rows: RowAllocator, max_rows: int) -> None:
        if max_rows < 1:
            raise InvalidArgument(f"max_rows={max_rows} must be at least 1")
        self.max_rows = max_rows
        self._rows = rows
        self._table = rows.table.device_pages
        device = self._table.device
        self._kernels = kernels_for(device)
        warm_up(device)
        self._block = torch.zeros(3 * max_rows, dtype=torch.int32, device=device)
        self.row_slot, self.seq_lens, self.new_pages = torch.split(self._block, max_rows)
        self.out_loc = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._ring = PinnedRing() if device.type != "cpu" else None
        host = self._next_host()
        host[0], host[1], host[2] = rows.table.pad_row, 1, 0
        self._send()

    def plan(self, rows: RowArray) -> Shortfall | None:
        """Reserve one more token for each of the distinct `rows` (int32) and send what `launch` needs; None when done.

        Short of pages nothing has changed.  Raises InvalidArgument or DoubleFree and changes nothing.
        """
        if len(rows) > self.max_rows:
            raise InvalidArgument(f"{len(rows)} rows in a step of at most {self.max_rows}")
        lengths = self._rows.table.lengths[rows] + np.int32(1)
        growth = self._rows.grow(rows, lengths)
        if isinstance(growth, Shortfall):
            return growth
        host, used = self._next_host(), len(rows)
        host[0, :used], host[0, used:] = rows, self._rows.table.pad_row
        host[1, :used], host[1, used:] = lengths, 1
        host[2] = 0
        host[2, growth.takers] = growth.pages
        self._send()
        return None

    def launch(self) -> None:
        """Fill `out_loc` and enter new pages in the device's table.  One kernel; may be captured."""
        self._kernels.decode_rows(
            self._table, self.row_slot, self.seq_lens, self.new_pages, self.out_loc, self._rows.page_size
        )

    def _next_host(self) -> NDArray[np.int32]:
        """Where to write the next step: rows, lengths, new pages; int32 [3, max_rows].  On the CPU it is the block."""
        if self._ring is None:
            return self._block.numpy().reshape(3, self.max_rows)
        self._pinned, array = self._ring.next(len(self._block))
        return array[: len(self._block)].reshape(3, self.max_rows)

    def _send(self) -> None:
        if self._ring is not None:
            self._block.copy_(self._pinned[: len(self._block)], non_blocking=True)
            self._ring.consumed_here()
