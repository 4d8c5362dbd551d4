"""What the memory reads of a scheduler's plan and of a runner: the shape of theirs, not their classes."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from kvloom.allocator.ring import PageArray
from kvloom.allocator.spec import PoolSpec
from kvloom.allocator.table import RowArray

TokenArray = PageArray  # int32 [N], like page ids


class StepPlan(Protocol):
    """What `bind` reads of a plan; `kvloom.scheduler.plan.Plan` is one."""

    @property
    def step(self) -> int: ...
    @property
    def rows(self) -> RowArray: ...
    @property
    def prefix_lens(self) -> RowArray: ...
    @property
    def q_lens(self) -> RowArray: ...
    @property
    def seq_lens(self) -> RowArray: ...
    @property
    def decode_rows(self) -> int: ...
    @property
    def token_ids(self) -> TokenArray: ...
    @property
    def token_src(self) -> RowArray | None: ...
    @property
    def sample_rows(self) -> RowArray: ...
    @property
    def sampling(self) -> Any: ...  # passed through to the batch
    @property
    def request_ids(self) -> Sequence[str]: ...


class RunnerNeeds(Protocol):
    """What `for_runner` reads of a runner's spec; `kvloom.scheduler.runners.RunnerSpec` is one."""

    @property
    def pools(self) -> tuple[PoolSpec, ...]: ...
    @property
    def max_seq(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def needs(self) -> frozenset[str]: ...


class HasSpec(Protocol):
    """A runner, as far as memory is concerned."""

    @property
    def spec(self) -> RunnerNeeds: ...
