"""From rows that grow to slots: what `PagedRows` does on the host, or sends to the device.

Two ways to the same slots.  Where the request table lives in host memory, a few numpy operations on it are all there is
to do.  Where it lives on a device, what the kernels need travels in one upload, and there is one launch.
"""

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvloom.allocator.indices import page_count, starts
from kvloom.allocator.kernels import Kernels, host_kernels, kernels_for, warm_up
from kvloom.allocator.ring import NO_PAGES, PageArray
from kvloom.allocator.staging import Staging, shared
from kvloom.allocator.table import RequestTable, RowArray

IntArray = NDArray[np.int32]


class Binding(Protocol):
    """How slots come about.  The rows' pages are reserved already.  On a device each verb mutates its table."""

    def extend(self, rows: RowArray, prefix_lens: IntArray, seq_lens: IntArray, taken: PageArray) -> torch.Tensor:
        """Slots of the tokens by which rows grow, packed row after row (int64 [T]); `taken` are pages just taken."""

    def decode(self, rows: RowArray, seq_lens: IntArray, new_pages: IntArray) -> torch.Tensor:
        """The slot of each row's newest token (int64 [R]); `new_pages[i]` is the page it enters with that, else 0."""


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


def slots_at(table: RequestTable, page_size: int, rows: RowArray, position: NDArray[np.integer]) -> torch.Tensor:
    """Slots of the tokens at `position` of `rows`, int64 [N], from the host's table."""
    index = position // page_size
    page = table.pages[rows, index]
    # page * page_size + position % page_size, in 64 bits
    slots = np.multiply(page - index, page_size, dtype=np.int64)
    slots += position
    return torch.from_numpy(slots)


class HostBinding:
    """The table in host memory is the table."""

    def __init__(self, table: RequestTable, page_size: int) -> None:
        self._table = table
        self._page_size = page_size

    def decode(self, rows: RowArray, seq_lens: IntArray, new_pages: IntArray) -> torch.Tensor:
        """See `Binding`."""
        return slots_at(self._table, self._page_size, rows, seq_lens - np.int32(1))

    def extend(self, rows: RowArray, prefix_lens: IntArray, seq_lens: IntArray, taken: PageArray) -> torch.Tensor:
        """See `Binding`."""
        arrays = extension(self._table, self._page_size, rows, prefix_lens, seq_lens, taken)
        out = torch.empty(int(arrays["token_start"][-1]), dtype=torch.int64)
        tensors = {name: shared(array) for name, array in arrays.items()}
        host_kernels.extend_rows(self._table.device_pages, **tensors, out=out, page_size=self._page_size)
        return out


class DeviceBinding:
    """One upload, one launch."""

    def __init__(self, table: RequestTable, page_size: int, kernels: Kernels, device: torch.device) -> None:
        self._table = table
        self._page_size = page_size
        self._kernels = kernels
        self._device = device
        self._staging = Staging(device)
        warm_up(device)  # nothing compiles while serving

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


def binding_for(table: RequestTable, page_size: int, device: torch.device) -> Binding:
    """The binding for where the table lives."""
    if device.type == "cpu":
        return HostBinding(table, page_size)
    return DeviceBinding(table, page_size, kernels_for(device), device)
