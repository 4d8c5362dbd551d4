"""Rows of one paged pool, host and device together: the row verbs for a loop of one's own.

    rows = PagedRows(allocator, RequestTable(max_rows=64, max_pages=128, device=allocator.device))
    mine = rows.open_rows(2)
    slots = rows.extend_rows(mine, seq_lens)       # a prompt each; then, in each step:
    slots = rows.decode_rows(mine)
    rows.release_rows(mine, fences=[step, step])   # free once that step is settled

What needs pages answers with a `Shortfall` when there are too few, and nothing has changed.  None of these verbs waits
for a CUDA device; extend and decode cost one upload and one launch, fork a few more.
"""

from collections.abc import Sequence

import numpy as np
import torch

from kvloom.allocator.binding import binding_for
from kvloom.allocator.errors import InvalidArgument
from kvloom.allocator.indices import Ints, int32s, whole
from kvloom.allocator.paged import PagedTokenToKVPoolAllocator
from kvloom.allocator.reports import Shortfall
from kvloom.allocator.rows import Fork, RowAllocator, SlotArray
from kvloom.allocator.staging import Staging
from kvloom.allocator.table import RequestTable, RowArray


class PagedRows:
    """Rows of `table` with pages of `allocator`.

    Rows and lengths may be arrays, lists or tensors of whole numbers (int32 arrays cost nothing); the rows of one call
    are distinct.

    `host` does the bookkeeping alone, for a `DecodeStep` or an `ExtendStep`: a device does not hear of what is grown
    there by other means.
    One thread uses it; an allocator has one table.
    """

    def __init__(self, allocator: PagedTokenToKVPoolAllocator, table: RequestTable) -> None:
        if type(allocator) is not PagedTokenToKVPoolAllocator:
            raise InvalidArgument(
                f"rows are for a PagedTokenToKVPoolAllocator itself, not for {type(allocator).__name__}"
            )
        if table.device_pages.device != allocator.device:
            raise InvalidArgument(f"the table is on {table.device_pages.device}, the pool on {allocator.device}")
        self.allocator = allocator
        self.table = table
        self.host = RowAllocator(allocator.ledger, table)
        self._binding = binding_for(table, allocator.page_size, allocator.device)
        self._staging = Staging(allocator.device)

    def open_rows(self, count: int) -> RowArray | Shortfall:
        """`count` empty rows, int32 [count].  Raises InvalidArgument below 0."""
        count = whole("count", count)
        if count < 0:
            raise InvalidArgument(f"cannot open {count} rows")
        free = self.table.free_rows
        if count > free:
            return Shortfall("rows", count, free, 0, free)
        return np.array([self.table.open() for _ in range(count)], np.int32)

    def extend_rows(self, rows: Ints, seq_lens: Ints) -> torch.Tensor | Shortfall:
        """Let rows grow to `seq_lens[i]` tokens; slots of the new ones, packed row after row, int64 [T].

        Raises InvalidArgument (a row that would shrink or outgrow the table) or DoubleFree and changes nothing.
        """
        rows, seq_lens = int32s("rows", rows), int32s("seq_lens", seq_lens)
        prefix_lens = self._lengths(rows)
        if len(seq_lens) != len(rows) or (seq_lens < prefix_lens).any():
            raise InvalidArgument(f"rows of {prefix_lens[:8].tolist()} tokens cannot grow to {seq_lens[:8].tolist()}")
        pages = self.host.grow(rows, seq_lens)
        if isinstance(pages, Shortfall):
            return pages
        try:
            return self._binding.extend(rows, prefix_lens, seq_lens, pages)
        except BaseException:
            self.host.undo(rows, prefix_lens)
            raise

    def decode_rows(self, rows: Ints, new_tokens: Ints | None = None) -> torch.Tensor | Shortfall:
        """One more token for each row, or `new_tokens[i]` of them (as when drafts are verified).

        Slots packed row after row, int64 [T].  Raises like `extend_rows`.
        """
        rows = int32s("rows", rows)
        if new_tokens is not None:
            new_tokens = int32s("new_tokens", new_tokens)
            if len(new_tokens) != len(rows):
                raise InvalidArgument(f"{len(new_tokens)} new_tokens for {len(rows)} rows")
            return self.extend_rows(rows, self._lengths(rows) + new_tokens)
        grown = self.host.grow_by_one(rows)
        if isinstance(grown, Shortfall):
            return grown
        new_pages = np.zeros(len(rows), np.int32)
        new_pages[grown.takers] = grown.pages
        try:
            return self._binding.decode(rows, grown.lengths, new_pages)
        except BaseException:
            self.host.undo(rows, grown.lengths - np.int32(1))
            raise

    def truncate_rows(self, rows: Ints, lengths: Ints, fences: Sequence[int]) -> None:
        """Cut rows to `lengths[i]` tokens; whole pages beyond are free once step `fences[i]` is settled (-1: now).

        Raises InvalidArgument or DoubleFree and changes nothing.
        """
        self.host.truncate(int32s("rows", rows), int32s("lengths", lengths), fences)

    def release_rows(self, rows: Ints, fences: Sequence[int], reason: str = "finish") -> None:
        """One free group: rows and their pages come back once step `fences[i]` is settled (-1: now).

        Raises DoubleFree or InvalidArgument and changes nothing.
        """
        self.host.release(int32s("rows", rows), fences, reason)

    def fork_row(self, row: int, count: int) -> RowArray | Shortfall:
        """`count` new rows with the tokens of `row`: whole pages are shared, a partly filled last one is copied.

        Copies KV where the pool has a storage.  Raises DoubleFree or InvalidArgument and changes nothing.
        """
        fork = self.host.fork(whole("row", row), whole("count", count))
        if isinstance(fork, Shortfall):
            return fork
        try:
            self._carry_out(fork)
        except BaseException:
            self.host.release(fork.rows, [-1] * count, "rollback")
            raise
        return fork.rows

    def _carry_out(self, fork: Fork) -> None:
        """On the device."""
        self._write_lines(fork)
        storage = self.allocator.get_kvcache()
        if fork.tokens and storage is not None:
            storage.copy_slots(*map(self._to_device, fork.slots(self.allocator.page_size)))

    def settle(self, step: int) -> None:
        """Step `step` is over: what waited for it is free."""
        self.allocator.ledger.settle(step)
        self.table.settle(step)

    def check(self) -> None:
        """Raise BrokenInvariant unless the books balance."""
        self.host.check()

    def _lengths(self, rows: RowArray) -> RowArray:
        self.table.slots.require_held(rows)
        return self.table.lengths[rows]

    def _write_lines(self, fork: Fork) -> None:
        """The device's lines of new rows; on the CPU they are the host's."""
        if self.allocator.device.type == "cpu":
            return
        width = int(self.table.page_counts[fork.rows[0]])
        sent = self._staging.upload(
            {"rows": fork.rows, "pages": np.ascontiguousarray(self.table.pages[fork.rows, :width]).reshape(-1)}
        )
        lines = sent["pages"].view(len(fork.rows), width)
        self.table.device_pages[:, :width].index_copy_(0, sent["rows"].long(), lines)

    def _to_device(self, slots: SlotArray) -> torch.Tensor:
        tensor = torch.from_numpy(slots)
        if self.allocator.device.type == "cuda":
            return tensor.pin_memory().to(self.allocator.device, non_blocking=True)
        return tensor.to(self.allocator.device)
