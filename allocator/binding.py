"""From rows and lengths to slots: what `KVMemory.bind` does on the host, or sends to the device.

Two ways to the same slots.  Where the request table lives in host memory, three numpy operations on it are all there is
to do.  Where it lives on a device, everything a step needs travels in one upload and the kernels do the rest: at most
one decode launch and one extend launch.
"""

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvloom.allocator.batch import HostArrays
from kvloom.allocator.indices import page_count, spans, starts
from kvloom.allocator.kernels import Kernels, kernels_for, warm_up
from kvloom.allocator.staging import Staging
from kvloom.allocator.table import RequestTable

Tensors = dict[str, torch.Tensor]


class Binding(Protocol):
    """How slots come about."""

    def slots(self, host: HostArrays, decode_rows: int) -> tuple[torch.Tensor, Tensors]:
        """Slots of a step's tokens (int64 [T]), and the tensors that are on the device by now."""

    def page_table(self, rows: NDArray[np.int32], sent: Tensors, width: int) -> torch.Tensor:
        """The first `width` page ids of each row, int32 [R, width]; what stands behind a row's last page is no page."""


class HostBinding:
    """The table in host memory is the table."""

    def __init__(self, table: RequestTable, page_size: int) -> None:
        self._table = table
        self._page_size = page_size

    def slots(self, host: HostArrays, decode_rows: int) -> tuple[torch.Tensor, Tensors]:
        """See `Binding`."""
        rows, position = host.row_slot, host.positions
        if decode_rows < len(rows):
            rows = np.repeat(rows, host.q_lens)
        index = position // self._page_size
        page = self._table.pages[rows, index]
        # page * page_size + position % page_size, in 64 bits
        slots = np.multiply(page - index, self._page_size, dtype=np.int64)
        slots += position
        return torch.from_numpy(slots), {}

    def page_table(self, rows: NDArray[np.int32], sent: Tensors, width: int) -> torch.Tensor:
        """See `Binding`.  A copy: the table may move on while the runner reads it."""
        return torch.from_numpy(self._table.pages[rows, :width])


class DeviceBinding:
    """One upload, at most two launches."""

    def __init__(self, table: RequestTable, page_size: int, kernels: Kernels, device: torch.device) -> None:
        self._table = table
        self._page_size = page_size
        self._kernels = kernels
        self._device = device
        self._staging = Staging(device)
        warm_up(device)  # nothing compiles while serving

    def slots(self, host: HostArrays, decode_rows: int) -> tuple[torch.Tensor, Tensors]:
        """See `Binding`.  Mutates the device's table."""
        arrays: dict[str, NDArray[Any]] = {
            "row_slot": host.row_slot,
            "prefix_lens": host.prefix_lens,
            "q_lens": host.q_lens,
            "seq_lens": host.seq_lens,
            "token_ids": host.token_ids,
            "token_src": host.token_src,
            "positions": host.positions,
            "q_start": host.q_start,
            "sample_rows": host.sample_rows,
            "logits_idx": host.logits_idx,
        }
        if decode_rows:
            arrays["decode_pages"] = self._decode_pages(host.row_slot[:decode_rows], host.positions[:decode_rows])
        if decode_rows < len(host.row_slot):
            some = slice(decode_rows, None)
            arrays |= self._extend_arrays(host.row_slot[some], host.prefix_lens[some], host.seq_lens[some])
        sent = self._staging.upload(arrays)
        out = torch.empty(len(host.token_ids), dtype=torch.int64, device=self._device)
        self._launch(sent, decode_rows, out)
        return out, sent

    def page_table(self, rows: NDArray[np.int32], sent: Tensors, width: int) -> torch.Tensor:
        """See `Binding`."""
        return self._table.device_pages[:, :width].index_select(0, sent["row_slot"])

    def _decode_pages(self, rows: NDArray[np.int32], position: NDArray[np.int32]) -> NDArray[np.int32]:
        """The page that each row enters with this token, or 0."""
        page = self._table.pages[rows, position // self._page_size]
        page[position % self._page_size != 0] = 0
        return page

    def _extend_arrays(
        self, rows: NDArray[np.int32], prefix_lens: NDArray[np.int32], seq_lens: NDArray[np.int32]
    ) -> dict[str, NDArray[Any]]:
        """The pages that each row enters, where they begin, and where its tokens begin."""
        first = page_count(prefix_lens, self._page_size)
        counts = page_count(seq_lens, self._page_size) - first
        return {
            "extend_pages": self._table.pages[np.repeat(rows, counts), spans(first, counts)],
            "extend_page_start": starts(counts),
            "extend_token_start": starts(seq_lens - prefix_lens),
        }

    def _launch(self, sent: Tensors, decode_rows: int, out: torch.Tensor) -> None:
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
                sent["extend_pages"],
                sent["extend_page_start"],
                sent["extend_token_start"],
                out[decode_rows:],
                size,
            )


def binding_for(table: RequestTable, page_size: int, device: torch.device) -> Binding:
    """The binding for where the table lives."""
    if device.type == "cpu":
        return HostBinding(table, page_size)
    return DeviceBinding(table, page_size, kernels_for(device), device)
