"""From a step's rows and lengths to slots, for every pool: what `KVMemory.bind` does on the host, or sends.

As in `binding.py` there are two ways to the same slots.  On a device everything a step needs travels in one upload,
whatever the number of pools, and each pool has at most one decode launch and one extend launch.
"""

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvloom.allocator.batch import HostArrays
from kvloom.allocator.binding import extension, slots_at
from kvloom.allocator.kernels import Kernels, kernels_for, warm_up
from kvloom.allocator.staging import Staging
from kvloom.allocator.table import RequestTable, RowArray

Tensors = dict[str, torch.Tensor]
Tables = Mapping[str, RequestTable]  # by pool
IntArray = NDArray[np.int32]


class StepBinding(Protocol):
    """How a step's slots come about.  All pages are reserved already; `decode_rows` rows get one token each."""

    def slots(self, host: HostArrays, decode_rows: int) -> tuple[Tensors, Tensors]:
        """Slots of a step's tokens by pool (int64 [T]), and the tensors that are on the device by now."""

    def page_table(self, pool: str, rows: RowArray, sent: Tensors, width: int) -> torch.Tensor:
        """The first `width` page ids of each row, int32 [R, width]; what stands behind a row's last page is no page."""

    def changed(self, pool: str, row: int, places: slice) -> None:
        """The host has put other pages into these places of a row's line; the next step must see them."""


class HostStepBinding:
    """The tables in host memory are the tables."""

    def __init__(self, tables: Tables, page_size: int) -> None:
        self._tables = tables
        self._page_size = page_size

    def slots(self, host: HostArrays, decode_rows: int) -> tuple[Tensors, Tensors]:
        """See `StepBinding`."""
        rows = host.row_slot
        if decode_rows < len(rows):
            rows = np.repeat(rows, host.q_lens)
        return {
            pool: slots_at(table, self._page_size, rows, host.positions) for pool, table in self._tables.items()
        }, {}

    def page_table(self, pool: str, rows: RowArray, sent: Tensors, width: int) -> torch.Tensor:
        """See `StepBinding`.  A copy: the table may move on while the runner reads it."""
        return torch.from_numpy(self._tables[pool].pages[rows, :width])

    def changed(self, pool: str, row: int, places: slice) -> None:
        """Nothing has to travel."""


class DeviceStepBinding:
    """One upload; each pool's launches mutate its table on the device."""

    def __init__(self, tables: Tables, page_size: int, kernels: Kernels, device: torch.device) -> None:
        self._tables = tables
        self._page_size = page_size
        self._kernels = kernels
        self._device = device
        self._staging = Staging(device)
        self._changes: dict[str, list[tuple[int, slice]]] = {pool: [] for pool in tables}
        warm_up(device)  # nothing compiles while serving

    def slots(self, host: HostArrays, decode_rows: int) -> tuple[Tensors, Tensors]:
        """See `StepBinding`."""
        arrays = {
            name: getattr(host, name)
            for name in ("row_slot", "prefix_lens", "seq_lens", "q_lens", "token_ids", "token_src", "positions",
                         "q_start", "sample_rows", "logits_idx")
        }  # fmt: skip
        for pool, table in self._tables.items():
            growth = self._changed_places(pool) | self._growth(table, host, decode_rows)
            arrays |= {f"{pool}.{name}": array for name, array in growth.items()}
        sent = self._staging.upload(arrays)
        return {pool: self._launch(pool, sent, decode_rows, len(host.token_ids)) for pool in self._tables}, sent

    def page_table(self, pool: str, rows: RowArray, sent: Tensors, width: int) -> torch.Tensor:
        """See `StepBinding`."""
        return self._tables[pool].device_pages[:, :width].index_select(0, sent["row_slot"])

    def changed(self, pool: str, row: int, places: slice) -> None:
        """See `StepBinding`."""
        self._changes[pool].append((row, places))

    def _changed_places(self, pool: str) -> dict[str, IntArray]:
        changes, table = self._changes[pool], self._tables[pool]
        if not changes:
            return {}
        self._changes[pool] = []
        rows = [np.full(places.stop - places.start, row, np.int32) for row, places in changes]
        places = [np.arange(places.start, places.stop, dtype=np.int32) for _, places in changes]
        changed = {"changed_rows": np.concatenate(rows), "changed_places": np.concatenate(places)}
        # As they are now: a place may have changed twice.
        return changed | {"changed_pages": table.pages[changed["changed_rows"], changed["changed_places"]]}

    def _growth(self, table: RequestTable, host: HostArrays, decode_rows: int) -> dict[str, IntArray]:
        """What the kernels need to know of a pool."""
        rows, prefix_lens, seq_lens = host.row_slot, host.prefix_lens, host.seq_lens
        arrays: dict[str, IntArray] = {}
        if decode_rows:
            arrays["decode_pages"] = self._decode_pages(table, rows[:decode_rows], prefix_lens[:decode_rows])
        if decode_rows < len(rows):
            some = slice(decode_rows, None)
            found = extension(table, self._page_size, rows[some], prefix_lens[some], seq_lens[some])
            arrays |= {f"extend_{name}": found[name] for name in ("new_pages", "page_start", "token_start")}
        return arrays

    def _decode_pages(self, table: RequestTable, rows: RowArray, position: IntArray) -> IntArray:
        """The page that each row enters with this token, or 0."""
        index = position // self._page_size
        page = table.pages[rows, index]
        page[position != index * self._page_size] = 0
        return page

    def _launch(self, pool: str, sent: Tensors, decode_rows: int, tokens: int) -> torch.Tensor:
        out = torch.empty(tokens, dtype=torch.int64, device=self._device)
        table, size = self._tables[pool].device_pages, self._page_size
        rows, prefix, seq = sent["row_slot"], sent["prefix_lens"], sent["seq_lens"]
        if f"{pool}.changed_rows" in sent:
            where = (sent[f"{pool}.changed_rows"].long(), sent[f"{pool}.changed_places"].long())
            table.index_put_(where, sent[f"{pool}.changed_pages"])
        if decode_rows:
            self._kernels.decode_rows(
                table, rows[:decode_rows], seq[:decode_rows], sent[f"{pool}.decode_pages"], out[:decode_rows], size
            )
        if decode_rows < len(rows):
            self._kernels.extend_rows(
                table,
                rows[decode_rows:],
                prefix[decode_rows:],
                seq[decode_rows:],
                sent[f"{pool}.extend_new_pages"],
                sent[f"{pool}.extend_page_start"],
                sent[f"{pool}.extend_token_start"],
                out[decode_rows:],
                size,
            )
        return out


def step_binding_for(tables: Tables, page_size: int, device: torch.device) -> StepBinding:
    """The binding for where the tables live."""
    if device.type == "cpu":
        return HostStepBinding(tables, page_size)
    return DeviceStepBinding(tables, page_size, kernels_for(device), device)
