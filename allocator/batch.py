"""What one step hands to a runner: one flat, packed batch.

Layout is packed varlen: the rows of a step follow each other without padding, decode rows first.  `R` rows, `T`
tokens, `S` rows that want a token.  Everything is complete in each step; nothing is a difference to the last one.
Host arrays (numpy) are under `batch.host`; the same names on `batch` itself are torch tensors on the runner's device,
made when first asked for, so that a step pays only for what its runner reads.  Nothing here forces a synchronisation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
BatchKind = Literal["decode", "prefill", "mixed"]


class NamesRequests(Protocol):
    """Whoever knows the ids of the rows; asked only when somebody wants them."""

    @property
    def request_ids(self) -> Sequence[str]: ...


@dataclass(slots=True)
class HostArrays:
    """The batch on the host, numpy, int32 unless said otherwise.

    token_ids [T]     0 where the token is still on the device (`token_src >= 0`)
    token_src [T]     row slot whose last sampled token goes here, or -1
    positions [T]     place of each token in its sequence, from 0
    row_slot [R]      stable small integer of the request while it runs, below `max_rows`
    prefix_lens [R]   tokens whose KV is already valid
    q_lens [R]        tokens of this step; `seq_lens = prefix_lens + q_lens`
    q_start [R + 1]   cumulative `q_lens`
    sample_rows [S]   rows (indices into R) that want a token
    logits_idx [S]    their last token (indices into T)
    """

    token_ids: IntArray
    token_src: IntArray
    positions: IntArray
    row_slot: IntArray
    prefix_lens: IntArray
    q_lens: IntArray
    seq_lens: IntArray
    q_start: IntArray
    sample_rows: IntArray
    logits_idx: IntArray


class Batch:
    """One step for a runner.  Valid until the step's result is in; a runner keeps no reference beyond that."""

    __slots__ = ("_names", "_tensors", "decode_rows", "device", "has_token_src", "host", "out_loc", "pad_slot",
                 "page_table", "sampling", "step")  # fmt: skip

    def __init__(
        self,
        *,
        step: int,
        decode_rows: int,
        host: HostArrays,
        device: torch.device,
        pad_slot: int,
        out_loc: Mapping[str, torch.Tensor],
        page_table: Mapping[str, torch.Tensor] | None = None,
        has_token_src: bool = False,
        sampling: Any = None,
        names: NamesRequests,
        tensors: dict[str, torch.Tensor] | None = None,
    ) -> None:
        self.step = step
        self.decode_rows = decode_rows  # the first rows, one token each
        self.host = host
        self.device = device
        self.pad_slot = pad_slot  # the row slot that padding may use; belongs to no request
        self.out_loc = out_loc  # per pool int64 [T]: slot where each new token's KV goes
        # Per pool int32 [R, P >= pages of max_seq], page ids in order; behind a row's last page stands anything.
        self.page_table: Mapping[str, torch.Tensor] = page_table or {}
        self.has_token_src = has_token_src  # False: every token id is known on the host
        # How the sampled rows choose (`kvloom.scheduler.plan.Sampling`, passed through); None: all are greedy.
        self.sampling = sampling
        self._names = names
        self._tensors = tensors if tensors is not None else {}  # what was uploaded with the step

    @property
    def max_q(self) -> int:
        """Most tokens of a row in this step."""
        return int(self.host.q_lens.max(initial=0))

    @property
    def max_seq(self) -> int:
        """Most tokens of a row, this step's included."""
        return int(self.host.seq_lens.max(initial=0))

    @property
    def request_ids(self) -> Sequence[str]:
        """Ids in the order of the rows; for logs and hooks, not for the hot path."""
        return self._names.request_ids

    @property
    def rows(self) -> int:
        """R."""
        return len(self.host.row_slot)

    @property
    def tokens(self) -> int:
        """T."""
        return len(self.host.token_ids)

    @property
    def kind(self) -> BatchKind:
        """What the step holds: a runner picks a captured graph by it."""
        if self.decode_rows == self.rows:
            return "decode"
        return "mixed" if self.decode_rows else "prefill"

    def tensor(self, name: str) -> torch.Tensor:
        """The host array `name` as a tensor on the runner's device (on the CPU it shares the host's memory)."""
        found = self._tensors.get(name)
        if found is None:
            array: NDArray[Any] = getattr(self.host, name)
            if not array.flags.writeable:  # shared between steps; torch would hand out a way to write it
                array = array.copy()
            # This waits for a device, but only in a batch made by hand: with one from `bind` all arrays were uploaded.
            found = self._tensors[name] = torch.from_numpy(array).to(self.device)
        return found

    def replace_token_ids(self, token_ids: torch.Tensor) -> None:
        """Put the token ids of rows in flight in place (int32 [T]); the engine does this before `forward`."""
        self._tensors["token_ids"] = token_ids

    @property
    def token_ids(self) -> torch.Tensor:
        """int32 [T], complete: tokens still in flight when the step was planned have been filled in."""
        return self.tensor("token_ids")

    @property
    def token_src(self) -> torch.Tensor:
        """int32 [T]."""
        return self.tensor("token_src")

    @property
    def positions(self) -> torch.Tensor:
        """int32 [T]."""
        return self.tensor("positions")

    @property
    def row_slot(self) -> torch.Tensor:
        """int32 [R]."""
        return self.tensor("row_slot")

    @property
    def prefix_lens(self) -> torch.Tensor:
        """int32 [R]."""
        return self.tensor("prefix_lens")

    @property
    def q_lens(self) -> torch.Tensor:
        """int32 [R]."""
        return self.tensor("q_lens")

    @property
    def seq_lens(self) -> torch.Tensor:
        """int32 [R]."""
        return self.tensor("seq_lens")

    @property
    def q_start(self) -> torch.Tensor:
        """int32 [R + 1]."""
        return self.tensor("q_start")

    @property
    def sample_rows(self) -> torch.Tensor:
        """int32 [S]."""
        return self.tensor("sample_rows")

    @property
    def logits_idx(self) -> torch.Tensor:
        """int32 [S]."""
        return self.tensor("logits_idx")
