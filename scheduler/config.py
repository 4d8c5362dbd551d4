"""The scheduler's settings, and the one place that checks how they fit together."""

from dataclasses import dataclass
from numbers import Integral, Real

from kvloom.scheduler.errors import InvalidConfig
from kvloom.scheduler.sampling_params import SEED_MAX


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the core must know of the model: ids run from 0 to vocab_size - 1, sequences up to max_seq tokens."""

    vocab_size: int
    max_seq: int
    eos_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of the continuous-batching loop; all counts are whole numbers from 1 up.

    max_running          sequences that hold a row at once
    max_batch_tokens     tokens in one step, decode rows first; at least `max_running`
    prefill_chunk        most tokens of one prompt in one step; need not be a multiple of the page size
    max_waiting          requests in the queue; one that was preempted keeps its place and does not count
    steps_in_flight_max  1: plan, run, commit; 2: the next step is planned and launched while one runs
    step_timeout         seconds after which a step that has not come back counts as stalled
    runner_failures_max  failed steps in a row after which the engine has failed
    seed                 what requests without a seed of their own draw from; None: another one each time

    Raises `InvalidConfig` that names the numbers.
    """

    max_running: int = 256
    max_batch_tokens: int = 2048
    prefill_chunk: int = 512
    max_waiting: int = 1024
    steps_in_flight_max: int = 1
    step_timeout: float = 60.0
    runner_failures_max: int = 8
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_running", "max_batch_tokens", "prefill_chunk", "max_waiting", "runner_failures_max"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
                raise InvalidConfig(f"{name}={value!r} must be a whole number from 1 up")
        if isinstance(self.steps_in_flight_max, bool) or self.steps_in_flight_max not in (1, 2):
            raise InvalidConfig(f"steps_in_flight_max={self.steps_in_flight_max!r} must be 1 or 2")
        whole = isinstance(self.seed, int) and not isinstance(self.seed, bool)
        if self.seed is not None and not (whole and -SEED_MAX - 1 <= self.seed <= SEED_MAX):
            raise InvalidConfig(f"seed={self.seed!r} must be None or a whole number of 64 bits")
        if not isinstance(self.step_timeout, Real) or not self.step_timeout > 0:
            raise InvalidConfig(f"step_timeout={self.step_timeout!r} must be above 0 seconds")
        if self.max_batch_tokens < self.max_running:
            raise InvalidConfig(
                f"max_batch_tokens={self.max_batch_tokens} is below max_running={self.max_running}: "
                "a step could not hold one token of each running sequence"
            )
        if self.prefill_chunk > self.max_batch_tokens:
            raise InvalidConfig(
                f"prefill_chunk={self.prefill_chunk} is above max_batch_tokens={self.max_batch_tokens}: "
                "no step could hold a whole chunk"
            )
