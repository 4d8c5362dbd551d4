"""Which engine has a memory, whether its runner fits, and whose KV is in it."""

from collections.abc import Callable
from weakref import ref

import torch

from kvloom.allocator.devices import device_of
from kvloom.allocator.errors import InvalidArgument
from kvloom.allocator.ports import RunnerNeeds
from kvloom.allocator.spec import PoolSpec


class Claim:
    """At most one engine at a time; the last runner is known weakly, so that its model can go."""

    def __init__(self) -> None:
        self._taken = False
        self._runner: Callable[[], object] = _nobody

    def take(self, runner: object) -> bool:
        """Belong to an engine with this `runner`; whether what is cached is the KV of another.

        Raises InvalidArgument when an engine has it.
        """
        if self._taken:
            raise InvalidArgument("this memory belongs to another engine, not left yet or with a step still out")
        self._taken = True
        strange = self._runner() is not runner
        try:
            self._runner = ref(runner)
        except TypeError:  # of a class that cannot be known weakly: it is a stranger each time
            self._runner = _nobody
        return strange

    def give_back(self) -> None:
        """Be free for the next engine."""
        self._taken = False


def require_fit(spec: RunnerNeeds, pools: tuple[PoolSpec, ...], device: torch.device, needs: frozenset[str]) -> None:
    """Raise InvalidArgument unless a runner of this `spec` can work with a memory of these pools and batch fields."""
    if spec.pools != pools:
        raise InvalidArgument(f"the runner wants the pools {spec.pools}; this memory has {pools}")
    if device_of(spec.device) != device:
        raise InvalidArgument(f"the runner is on {spec.device}; this memory is on {device}")
    if not spec.needs <= needs:
        missing = sorted(spec.needs - needs)
        raise InvalidArgument(f"the runner needs {missing}, which this memory was not made to build")


def _nobody() -> None:
    return None
