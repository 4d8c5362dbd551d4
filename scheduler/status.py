"""What the engine says about itself."""

import enum
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvloom.scheduler.plan import SchedulerStatistics


class EngineState(enum.StrEnum):
    """Life of an engine; the values are label values of `kvloom_engine_state`."""

    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


class EngineStatistics(NamedTuple):
    """One immutable picture of the engine, taken between steps: the numbers in it belong together.

    memory                the memory's own statistics (`kvloom.allocator.MemoryStatistics`)
    stalled               a step has been out for longer than `step_timeout`
    last_step_at          wall clock (seconds since the epoch) of the last commit; 0 before the first
    oldest_waiting_at     wall clock of the arrival of the queue's head; None when nothing waits
    errors                contained failures by place: runner, sampler, hook, emit, allocator
    """

    state: EngineState
    stalled: bool
    scheduler: SchedulerStatistics
    memory: Any
    last_step_at: float
    oldest_waiting_at: float | None
    errors: Mapping[str, int]
