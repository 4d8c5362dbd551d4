"""The extend step in buffers that stay where they are, so that it can be replayed instead of launched.

    step = ExtendStep(rows.host, max_rows=256, max_tokens=32_768)

Alone, one replay of a small CUDA graph (upload and kernel):

    while serving:
        step.run(rows_of_this_step, seq_lens)      # then step.out_loc[: step.tokens], step.token_start, ...

Or with the kernel inside the model's own graph:

    with torch.cuda.graph(graph):
        step.launch()                              # new pages, table entries, slots
        model(step.row_slot, step.prefix_lens, step.seq_lens, step.token_start, step.out_loc, ...)
    while serving:
        step.plan(rows_of_this_step, seq_lens)     # host, and the upload
        graph.replay()

A graph is captured for one number of rows and tokens, and any step of no more fits.  Behind its rows stand rows that
grow by nothing: the table's pad row, with no token.  Behind its tokens stands slot 0, in the dump page.
"""

from collections.abc import Callable

import torch

from kvloom.allocator.errors import InvalidArgument
from kvloom.allocator.extending import Extended, Extending
from kvloom.allocator.indices import Ints, int32s, whole
from kvloom.allocator.kernels import kernels_for, warm_up
from kvloom.allocator.reports import Shortfall
from kvloom.allocator.rows import RowAllocator
from kvloom.allocator.sending import sender_for
from kvloom.allocator.table import RowArray


class ExtendStep:
    """Up to `max_tokens` new tokens for up to `max_rows` rows.  One thread and one stream use it.

    On the device, always the same memory (N = max_rows):
    row_slot     int32 [N], the rows
    prefix_lens  int32 [N], their tokens without the new ones; 0 for padding
    seq_lens     int32 [N], their tokens with the new ones; 0 for padding
    token_start  int32 [N + 1], where the new tokens of each row begin, row after row; for padding, where all end
    out_loc      int64 [max_tokens], slots of the new tokens, after `run` or `launch`

    On the host:
    tokens       how many new tokens the last step has

    Raises InvalidArgument for less than one row or token, or a device that is neither the CPU nor CUDA.
    """

    def __init__(self, rows: RowAllocator, max_rows: int, max_tokens: int) -> None:
        max_rows, max_tokens = whole("max_rows", max_rows), whole("max_tokens", max_tokens)
        if max_rows < 1 or not 1 <= max_tokens < 2**31:
            raise InvalidArgument(f"max_rows={max_rows} and max_tokens={max_tokens} must be at least 1")
        if rows.table.device_pages.device.type not in ("cpu", "cuda"):
            raise InvalidArgument(f"an ExtendStep is for the CPU and CUDA, not for {rows.table.device_pages.device}")
        self.max_rows = max_rows
        self.max_tokens = max_tokens
        self.tokens = 0
        self._rows = rows
        self._extending = Extending(rows.ledger, rows.table)
        self._table = rows.table.device_pages
        device = self._table.device
        self._kernels = kernels_for(device)
        warm_up(device)
        # Each row may enter a page with its first token.
        pages_max = min(max_tokens, max_tokens // rows.page_size + max_rows)
        lengths = [3, *[max_rows] * 3, *[max_rows + 1] * 2, pages_max]
        self._block = torch.zeros(sum(lengths), dtype=torch.int32, device=device)
        (
            self._sizes,
            self.row_slot,
            self.prefix_lens,
            self.seq_lens,
            self.token_start,
            self._page_start,
            self._new_pages,
        ) = torch.split_with_sizes(self._block, lengths)
        self.out_loc = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self.row_slot.fill_(rows.table.pad_row)
        self._sender = sender_for(self._block, lengths, self.launch)

    def plan(self, rows: Ints, seq_lens: Ints) -> Shortfall | None:
        """Let the distinct `rows` grow to `seq_lens[i]` tokens and send what `launch` needs; None when done.

        Short of pages nothing has changed.  Raises InvalidArgument (a row that would shrink or outgrow the table, more
        rows or tokens than this step holds) or DoubleFree and changes nothing.
        """
        return self._planned(rows, seq_lens, self._sender.send)

    def run(self, rows: Ints, seq_lens: Ints) -> Shortfall | None:
        """`plan` and `launch` in one go; `out_loc` is valid until the next step.  Raises like `plan`."""
        return self._planned(rows, seq_lens, lambda: self._sender.send_and(self.launch))

    def launch(self) -> None:
        """Fill `out_loc` and enter new pages in the device's table.  One kernel; may be captured."""
        self._kernels.extend_step(
            self._table,
            self._sizes,
            self.row_slot,
            self.prefix_lens,
            self.seq_lens,
            self._new_pages,
            self._page_start,
            self.token_start,
            self.out_loc,
            self._rows.page_size,
        )

    def _planned(self, given: Ints, lengths: Ints, send: Callable[[], None]) -> Shortfall | None:
        rows, seq_lens = int32s("rows", given), int32s("seq_lens", lengths)
        if len(rows) > self.max_rows:
            raise InvalidArgument(f"{len(rows)} rows in a step of at most {self.max_rows}")
        extended = self._extending.extend(rows, seq_lens, self.max_tokens)
        if isinstance(extended, Shortfall):
            return extended
        tokens = int(extended.token_start[-1])
        self._write(rows, seq_lens, extended, tokens)
        try:
            send()
        except BaseException:
            self._rows.undo(rows, extended.prefix_lens)
            raise
        self.tokens = tokens
        return None

    def _write(self, rows: RowArray, lengths: RowArray, extended: Extended, tokens: int) -> None:
        """Into the block that is sent."""
        sizes, row_slot, prefix_lens, seq_lens, token_start, page_start, new_pages = self._sender.next_fields()
        used, stale = len(rows), int(sizes[0])
        sizes[0], sizes[1], sizes[2] = used, (used - 1).bit_length(), tokens
        row_slot[:used], prefix_lens[:used], seq_lens[:used] = rows, extended.prefix_lens, lengths
        token_start[: used + 1], page_start[: used + 1] = extended.token_start, extended.page_start
        new_pages[: len(extended.pages)] = extended.pages
        token_start[used + 1 :] = tokens
        if used < stale:  # behind that it is padding already
            row_slot[used:stale] = self._rows.table.pad_row
            prefix_lens[used:stale] = seq_lens[used:stale] = 0
