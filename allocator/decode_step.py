"""The decode step in buffers that stay where they are, so that it can be replayed instead of launched.

    step = DecodeStep(rows.host, max_rows=256)

Alone, one replay of a small CUDA graph (upload and kernel), a fifth of what launching the two costs:

    while serving:
        step.run(rows_of_this_step)        # host: pages from the ledger; then step.out_loc, step.seq_lens, ...

Or with the kernel inside the model's own graph:

    with torch.cuda.graph(graph):
        step.launch()                      # last slots, new pages, table entries
        model(step.row_slot, step.seq_lens, step.out_loc, ...)
    while serving:
        step.plan(rows_of_this_step)       # host, and the upload
        graph.replay()

A graph is captured for one number of rows; behind those of a step stands padding: the table's pad row, with one token,
in slot 0 of the dump page.
"""

from collections.abc import Callable

import numpy as np
import torch

from kvloom.allocator.errors import InvalidArgument
from kvloom.allocator.indices import Ints, int32s, whole
from kvloom.allocator.kernels import kernels_for, warm_up
from kvloom.allocator.reports import Shortfall
from kvloom.allocator.rows import RowAllocator
from kvloom.allocator.sending import sender_for


class DecodeStep:
    """One token for each of up to `max_rows` rows.  One thread and one stream use it.

    On the device, all of `max_rows` entries and always the same memory:
    row_slot   int32, the rows
    seq_lens   int32, their tokens, the new one included; 1 for padding
    new_pages  int32, the page that a row enters with this token, else 0
    out_loc    int64, slots of the new tokens, after `run` or `launch`

    Raises InvalidArgument for less than one row, or a device that is neither the CPU nor CUDA.
    """

    def __init__(self, rows: RowAllocator, max_rows: int) -> None:
        max_rows = whole("max_rows", max_rows)
        if max_rows < 1:
            raise InvalidArgument(f"max_rows={max_rows} must be at least 1")
        if rows.table.device_pages.device.type not in ("cpu", "cuda"):
            raise InvalidArgument(f"a DecodeStep is for the CPU and CUDA, not for {rows.table.device_pages.device}")
        self.max_rows = max_rows
        self._rows = rows
        self._table = rows.table.device_pages
        device = self._table.device
        self._kernels = kernels_for(device)
        warm_up(device)
        self._block = torch.zeros(3 * max_rows, dtype=torch.int32, device=device)
        self.row_slot, self.seq_lens, self.new_pages = torch.split_with_sizes(self._block, [max_rows] * 3)
        self.out_loc = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.row_slot.fill_(rows.table.pad_row)
        self.seq_lens.fill_(1)
        self._sender = sender_for(self._block, [max_rows] * 3, self.launch)

    def plan(self, rows: Ints) -> Shortfall | None:
        """Reserve one more token for each of the distinct `rows` (int32) and send what `launch` needs; None when done.

        Short of pages nothing has changed.  Raises InvalidArgument or DoubleFree and changes nothing.
        """
        return self._sent(rows, self._sender.send)

    def run(self, rows: Ints) -> Shortfall | None:
        """`plan` and `launch` in one go; `out_loc` is valid until the next step.  Raises like `plan`."""
        return self._sent(rows, lambda: self._sender.send_and(self.launch))

    def launch(self) -> None:
        """Fill `out_loc` and enter new pages in the device's table.  One kernel; may be captured."""
        self._kernels.decode_rows(
            self._table, self.row_slot, self.seq_lens, self.new_pages, self.out_loc, self._rows.page_size
        )

    def _sent(self, given: Ints, send: Callable[[], None]) -> Shortfall | None:
        rows = int32s("rows", given)
        used = len(rows)
        if used > self.max_rows:
            raise InvalidArgument(f"{used} rows in a step of at most {self.max_rows}")
        grown = self._rows.grow_by_one(rows)
        if isinstance(grown, Shortfall):
            return grown
        row_slot, seq_lens, new_pages = self._sender.next_fields()
        row_slot[:used], seq_lens[:used] = rows, grown.lengths
        if used < self.max_rows:
            row_slot[used:], seq_lens[used:] = self._rows.table.pad_row, 1
        new_pages.fill(0)
        new_pages[grown.takers] = grown.pages
        try:
            send()
        except BaseException:
            self._rows.undo(rows, grown.lengths - np.int32(1))
            raise
        return None
