"""From rows and lengths to slots: what `KVMemory.bind` does on the host, or sends to the device.

Two ways to the same slots.  Where the request table lives in host memory, three numpy operations on it are all there is
to do.  Where it lives on a device, everything a step needs travels in one upload and the kernels do the rest: at most
one decode launch and one extend launch.
"""

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvloom.allocator.batch import HostArrays
from kvloom.allocator.indices import page_count, starts
from kvloom.allocator.kernels import Kernels, host_kernels, kernels_for, warm_up
from kvloom.allocator.ring import NO_PAGES, PageArray
from kvloom.allocator.staging import Staging, shared
from kvloom.allocator.table import RequestTable, RowArray

Tensors = dict[str, torch.Tensor]
IntArray = NDArray[np.int32]


class Binding(Protocol):
    """How slots come about.  The rows' pages are reserved already; the first `decode_rows` rows get one token each."""

    def slots(self, host: HostArrays, decode_rows: int) -> tuple[torch.Tensor, Tensors]:
        """Slots of a step's tokens (int64 [T]), and the tensors that are on the device by now."""

    def extend(self, rows: RowArray, prefix_lens: IntArray, seq_lens: IntArray, taken: PageArray) -> torch.Tensor:
        """Slots of the tokens by which rows grow, packed row after row (int64 [T]); `taken` are pages just taken."""

    def decode(self, rows: RowArray, seq_lens: IntArray, new_pages: IntArray) -> torch.Tensor:
        """The slot of each row's newest token (int64 [R]); `new_pages[i]` is the page it enters with that, else 0."""

    def page_table(self, rows: RowArray, sent: Tensors, width: int) -> torch.Tensor:
        """The first `width` page ids of each row, int32 [R, width]; what stands behind a row's last page is no page."""


def extension(
    table: RequestTable,
    page_size: int,
    rows: RowArray,
    prefix_lens: IntArray,
    seq_lens: IntArray,
    taken: PageArray = NO_PAGES,
) -> dict[str, IntArray]:
    """What `Kernels.extend_rows` wants to know of rows that grow, by the names of its arguments.

    The rows' new pages are `taken`, unless some were theirs before; then the table knows.
    """
    first = page_count(prefix_lens, page_size)
    counts = page_count(seq_lens, page_size) - first
    page_start = starts(counts)
    if page_start[-1] != len(taken):
        taken = table.pages_at(rows, first, counts)
    return {
        "rows": rows,
        "prefix_lens": prefix_lens,
        "seq_lens": seq_lens,
        "new_pages": taken,
        "page_start": page_start,
        "token_start": starts(seq_lens - prefix_lens),
    }


class HostBinding:
    """The table in host memory is the table."""

    def __init__(self, table: RequestTable, page_size: int) -> None:
        self._table = table
        self._page_size = page_size

    def slots(self, host: HostArrays, decode_rows: int) -> tuple[torch.Tensor, Tensors]:
        """See `Binding`."""
        rows = host.row_slot
        if decode_rows < len(rows):
            rows = np.repeat(rows, host.q_lens)
        return self._slots_at(rows, host.positions), {}

    def decode(self, rows: RowArray, seq_lens: IntArray, new_pages: IntArray) -> torch.Tensor:
        """See `Binding`."""
        return self._slots_at(rows, seq_lens - np.int32(1))

    def extend(self, rows: RowArray, prefix_lens: IntArray, seq_lens: IntArray, taken: PageArray) -> torch.Tensor:
        """See `Binding`."""
        arrays = extension(self._table, self._page_size, rows, prefix_lens, seq_lens, taken)
        out = torch.empty(int(arrays["token_start"][-1]), dtype=torch.int64)
        tensors = {name: shared(array) for name, array in arrays.items()}
        host_kernels.extend_rows(self._table.device_pages, **tensors, out=out, page_size=self._page_size)
        return out

    def page_table(self, rows: RowArray, sent: Tensors, width: int) -> torch.Tensor:
        """See `Binding`.  A copy: the table may move on while the runner reads it."""
        return torch.from_numpy(self._table.pages[rows, :width])

    def _slots_at(self, rows: RowArray, position: NDArray[np.integer]) -> torch.Tensor:
        index = position // self._page_size
        page = self._table.pages[rows, index]
        # page * page_size + position % page_size, in 64 bits
        slots = np.multiply(page - index, self._page_size, dtype=np.int64)
        slots += position
        return torch.from_numpy(slots)


class DeviceBinding:
    """One upload, at most two launches.  Each verb mutates the device's table."""

    def __init__(self, table: RequestTable, page_size: int, kernels: Kernels, device: torch.device) -> None:
        self._table = table
        self._page_size = page_size
        self._kernels = kernels
        self._device = device
        self._staging = Staging(device)
        warm_up(device)  # nothing compiles while serving

    def slots(self, host: HostArrays, decode_rows: int) -> tuple[torch.Tensor, Tensors]:
        """See `Binding`."""
        growth = self._growth(host.row_slot, host.prefix_lens, host.seq_lens, decode_rows)
        return self._launch(
            growth
            | {
                "q_lens": host.q_lens,
                "token_ids": host.token_ids,
                "token_src": host.token_src,
                "positions": host.positions,
                "q_start": host.q_start,
                "sample_rows": host.sample_rows,
                "logits_idx": host.logits_idx,
            },
            decode_rows,
            len(host.token_ids),
        )

    def extend(self, rows: RowArray, prefix_lens: IntArray, seq_lens: IntArray, taken: PageArray) -> torch.Tensor:
        """See `Binding`."""
        arrays = extension(self._table, self._page_size, rows, prefix_lens, seq_lens, taken)
        out = torch.empty(int(arrays["token_start"][-1]), dtype=torch.int64, device=self._device)
        sent = self._staging.upload(arrays)
        self._kernels.extend_rows(self._table.device_pages, **sent, out=out, page_size=self._page_size)
        return out

    def decode(self, rows: RowArray, seq_lens: IntArray, new_pages: IntArray) -> torch.Tensor:
        """See `Binding`."""
        sent = self._staging.upload({"rows": rows, "seq_lens": seq_lens, "new_pages": new_pages})
        out = torch.empty(len(rows), dtype=torch.int64, device=self._device)
        self._kernels.decode_rows(self._table.device_pages, **sent, out=out, page_size=self._page_size)
        return out

    def page_table(self, rows: RowArray, sent: Tensors, width: int) -> torch.Tensor:
        """See `Binding`."""
        return self._table.device_pages[:, :width].index_select(0, sent["row_slot"])

    def _growth(
        self, rows: RowArray, prefix_lens: IntArray, seq_lens: IntArray, decode_rows: int
    ) -> dict[str, IntArray]:
        """What the kernels need to know."""
        arrays = {"row_slot": rows, "prefix_lens": prefix_lens, "seq_lens": seq_lens}
        if decode_rows:
            arrays["decode_pages"] = self._decode_pages(rows[:decode_rows], prefix_lens[:decode_rows])
        if decode_rows < len(rows):
            some = slice(decode_rows, None)
            found = extension(self._table, self._page_size, rows[some], prefix_lens[some], seq_lens[some])
            arrays |= {f"extend_{name}": found[name] for name in ("new_pages", "page_start", "token_start")}
        return arrays

    def _decode_pages(self, rows: RowArray, position: IntArray) -> IntArray:
        """The page that each row enters with this token, or 0."""
        index = position // self._page_size
        page = self._table.pages[rows, index]
        page[position != index * self._page_size] = 0
        return page

    def _launch(self, arrays: dict[str, IntArray], decode_rows: int, tokens: int) -> tuple[torch.Tensor, Tensors]:
        sent = self._staging.upload(arrays)
        out = torch.empty(tokens, dtype=torch.int64, device=self._device)
        table, size = self._table.device_pages, self._page_size
        rows, prefix, seq = sent["row_slot"], sent["prefix_lens"], sent["seq_lens"]
        if decode_rows:
            self._kernels.decode_rows(
                table, rows[:decode_rows], seq[:decode_rows], sent["decode_pages"], out[:decode_rows], size
            )
        if decode_rows < len(rows):
            self._kernels.extend_rows(
                table,
                rows[decode_rows:],
                prefix[decode_rows:],
                seq[decode_rows:],
                sent["extend_new_pages"],
                sent["extend_page_start"],
                sent["extend_token_start"],
                out[decode_rows:],
                size,
            )
        return out, sent


def binding_for(table: RequestTable, page_size: int, device: torch.device) -> Binding:
    """The binding for where the table lives."""
    if device.type == "cpu":
        return HostBinding(table, page_size)
    return DeviceBinding(table, page_size, kernels_for(device), device)
