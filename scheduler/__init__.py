"""kvloom.scheduler: who runs next, and the async loop that makes it so."""

from kvloom.scheduler.config import ModelLimits, SchedulerConfig
from kvloom.scheduler.core import SchedulerCore
from kvloom.scheduler.engine import Engine
from kvloom.scheduler.errors import (
    BadStepResult,
    BrokenInvariant,
    Draining,
    DuplicateRequest,
    EngineFailed,
    FatalRunnerError,
    InvalidConfig,
    InvalidRequest,
    Misuse,
    NeverFits,
    PlanMisuse,
    QueueFull,
    Rejected,
    RunnerFailed,
    SchedulerError,
    TooLong,
)
from kvloom.scheduler.namespaces import cache_namespace
from kvloom.scheduler.plan import Committed, Plan, SchedulerStatistics, StepResult
from kvloom.scheduler.request import Finished, FinishReason, Request, Timings, Usage
from kvloom.scheduler.sampler import Sampler
from kvloom.scheduler.sampling_params import SamplingParams
from kvloom.scheduler.status import EngineState, EngineStatistics
from kvloom.scheduler.streams import Delta, Result, TokenStream

__all__ = [
    "BadStepResult",
    "BrokenInvariant",
    "Committed",
    "Delta",
    "Draining",
    "DuplicateRequest",
    "Engine",
    "EngineFailed",
    "EngineState",
    "EngineStatistics",
    "FatalRunnerError",
    "FinishReason",
    "Finished",
    "InvalidConfig",
    "InvalidRequest",
    "Misuse",
    "ModelLimits",
    "NeverFits",
    "Plan",
    "PlanMisuse",
    "QueueFull",
    "Rejected",
    "Request",
    "Result",
    "RunnerFailed",
    "Sampler",
    "SamplingParams",
    "SchedulerConfig",
    "SchedulerCore",
    "SchedulerError",
    "SchedulerStatistics",
    "StepResult",
    "Timings",
    "TokenStream",
    "TooLong",
    "Usage",
    "cache_namespace",
]
