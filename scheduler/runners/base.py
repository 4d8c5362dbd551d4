"""The one thing a user writes: a runner that turns a batch into tokens.

The engine calls `attach` and `warmup` once, then `forward` in its own launch thread, one call at a time, in plan
order.  `forward` only needs to enqueue work: it may return device tensors that are not ready yet.  Before it calls
`forward` the engine has filled the tokens that were in flight when the step was planned into `batch.token_ids`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from kvloom.allocator import Batch, KVCache, PoolSpec
from kvloom.scheduler.errors import InvalidConfig


@dataclass(frozen=True, slots=True)
class RunnerSpec:
    """What a runner can do and needs; an engine refuses memory that was made for another.

    vocab_size    token ids run from 0 to vocab_size - 1; a result outside fails its step
    max_seq       longest sequence (prompt and output together) in tokens
    eos_ids       token ids that end a sequence unless a request ignores them
    pools         the KV storage that `KVMemory.for_runner` creates and `attach` hands over
    device        where the batch's tensors live
    needs         optional batch fields to build: "page_table"

    Raises InvalidConfig that names the field.
    """

    vocab_size: int
    max_seq: int
    eos_ids: tuple[int, ...] = ()
    pools: tuple[PoolSpec, ...] = (PoolSpec(),)
    device: torch.device = torch.device("cpu")
    needs: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for name in ("vocab_size", "max_seq"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidConfig(f"{name}={value!r} must be a whole number from 1 up")
        if not isinstance(self.eos_ids, tuple) or any(not 0 <= token < self.vocab_size for token in self.eos_ids):
            raise InvalidConfig(f"eos_ids={self.eos_ids!r} must be a tuple of ids below vocab_size={self.vocab_size}")
        if not isinstance(self.device, torch.device):
            raise InvalidConfig(f"device={self.device!r} must be a torch.device")
        if not self.needs <= {"page_table"}:
            raise InvalidConfig(f"needs={set(self.needs)!r}; a batch can have a page_table, and nothing else")


@dataclass(slots=True)
class StepOutput:
    """The result of one step: give `next_tokens`, or `logits` and the engine samples.

    next_tokens   int [S], one token per sampled row, host or device
    logits        float [S, V]
    row_errors    index into `sample_rows` -> what went wrong: only that request fails
    """

    next_tokens: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    row_errors: Mapping[int, Exception] = field(default_factory=dict)


class ModelRunner(Protocol):
    """What the engine asks of a runner (attach, warmup, forward, close)."""

    @property
    def spec(self) -> RunnerSpec:
        """Constant; read before `attach`."""

    def attach(self, pools: Mapping[str, KVCache]) -> None:
        """Take the KV storage, once, before `warmup`.  One that raises has taken nothing, and is not closed for it."""

    def warmup(self, max_rows: int, max_tokens: int) -> None:
        """Compile and capture for steps of up to `max_rows` rows and `max_tokens` tokens; the engine waits."""

    def forward(self, batch: Batch) -> StepOutput:
        """Run one step; may return before the device is done.  Raising fails the requests of this step only."""

    def close(self) -> None:
        """Give back what `attach` and `warmup` took; called once, on the launch thread, after the last `forward`."""
