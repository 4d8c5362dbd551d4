"""The loop's working part: commit what has come back, plan and launch what comes next, hand over what was gained."""

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import anyio
import structlog
import torch

from kvloom.scheduler.config import SchedulerConfig
from kvloom.scheduler.core import SchedulerCore
from kvloom.scheduler.errors import BadStepResult, BrokenInvariant, EngineFailed, FatalRunnerError
from kvloom.scheduler.launch import Outcome
from kvloom.scheduler.plan import Committed, Plan, StepResult
from kvloom.scheduler.ports import Clock, Memory, Observer
from kvloom.scheduler.request import Finished, FinishReason, Request, Sequence, Timings, Usage
from kvloom.scheduler.streams import TokenStream

_WATCH_SECONDS = 0.05  # how often deadlines and stalls are looked at while a step is out


class LoopSpec(Protocol):
    """The part of a runner's spec that the loop reads."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_seq(self) -> int: ...
    @property
    def eos_ids(self) -> tuple[int, ...]: ...
    @property
    def device(self) -> torch.device: ...


class Runner(Protocol):
    """A `kvloom.scheduler.runners.ModelRunner`, without its types for batch and storage."""

    @property
    def spec(self) -> LoopSpec: ...
    @property
    def attach(self) -> Callable[[Any], None]: ...
    @property
    def warmup(self) -> Callable[[int, int], None]: ...
    @property
    def forward(self) -> Callable[[Any], Any]: ...
    @property
    def close(self) -> Callable[[], None]: ...


class EngineMemory(Memory, Protocol):
    """What the loop needs of memory beside the core's verbs; `kvloom.allocator.KVMemory` is one."""

    @property
    def pools(self) -> Mapping[str, Any]: ...
    def require(self, spec: Any) -> None:
        """Raise unless a runner of this spec can work with this memory."""

    def claim(self, runner: object) -> None:
        """Belong to one engine.  Raises when another has it."""

    def unclaim(self) -> None:
        """Be free for the next."""

    def bind(self, plan: Plan) -> Any:
        """The batch of a plan."""

    def statistics(self) -> Any:
        """An immutable report."""


class StepLoop:
    """Turns of the loop over one core.  `after_turn` is called at the end of each, when the state is whole again.

    failure       why the loop has stopped for good, or None
    errors        contained failures, by place
    last_step_at  wall clock of the last commit, seconds since the epoch
    """

    def __init__(
        self,
        core: SchedulerCore,
        memory: EngineMemory,
        config: SchedulerConfig,
        clock: Clock,
        after_turn: Callable[[], None],
    ) -> None:
        self.core = core
        self.observers: list[Observer] = []
        self.errors: Counter[str] = Counter()
        self.failure: EngineFailed | None = None
        self.last_step_at = 0.0
        self.stopping = False  # the engine is being left: to be cancelled is no failure
        self._memory = memory
        self._config = config
        self._clock = clock
        self._after_turn = after_turn
        self._woken = anyio.Event()
        self._work = anyio.Event()
        self._out: deque[tuple[Plan, float]] = deque()  # plans launched, with the time of planning
        self._outcomes: deque[tuple[int, Outcome]] = deque()
        self._gained: deque[tuple[Plan | None, Committed, float]] = deque()  # to be handed over, with seconds
        self._owed: set[Sequence] = set()  # those whose end has not been handed over
        self._failures_in_a_row = 0
        self._last_error: Exception | None = None
        self._log = structlog.get_logger("kvloom.engine")

    @property
    def stalled_seconds(self) -> float:
        """How long the oldest step out is over its time; 0 when none is."""
        if not self._out:
            return 0.0
        return max(0.0, self._clock() - self._out[0][1] - self._config.step_timeout)

    def launch_with(self, submit: Callable[[Any], None], close: Callable[[], None]) -> None:
        """Where batches go; the outcome of each is to be told to `report`, in order.  `close`: no more will come."""
        self._submit = submit
        self._close = close

    def add(self, request: Request, now: float, stream: TokenStream) -> None:
        """Queue a request whose tokens and end go to `stream`.  Raises as `SchedulerCore.add`."""
        self._owed.add(self.core.add(request, now, stream))
        self._work.set()
        self.wake()

    def wake(self) -> None:
        """Something has changed: take a turn."""
        self._woken.set()

    async def run(self) -> None:
        """Take turns until cancelled or failed; never raises for a failure, which is in `failure` then."""
        try:
            while self.failure is None:
                self.turn()
                await self._woken.wait()
                self._woken = anyio.Event()
        finally:  # also when an event loop ends whose engine nobody left, or somebody cancels this task
            self._close()
            if not self.stopping and self.failure is None:
                self.fail(RuntimeError("the engine's task was cancelled from outside"))

    async def watch(self) -> None:
        """Deadlines and stalls, while a step is out and the loop has no turn; asleep when there is no work."""
        reported = False
        while True:
            if not self.core.has_work:
                self._work = anyio.Event()
                await self._work.wait()
            await anyio.sleep(_WATCH_SECONDS)
            self.end(self.core.expire)
            stalled = self.stalled_seconds > 0
            if stalled != reported:
                reported = stalled
                event = "step_stalled" if stalled else "step_came_back"
                self._log.error(event, step_timeout=self._config.step_timeout)
                self._after_turn()

    def end(self, ending: Callable[[float], Committed]) -> None:
        """Carry out what ends requests between steps (an abort, deadlines) and deliver it; takes a turn after it."""
        try:
            committed = ending(self._clock())
        except Exception as error:  # a defect of ours: all who wait are told
            self.fail(error)
            return
        if committed.finished:
            self._gained.append((None, committed, 0.0))
            self._deliver()
            self.wake()

    def fail(self, cause: Exception) -> None:
        """Stop for good: every request that has not ended ends with the cause, and every plan out is given up."""
        if self.failure is not None:
            self._log.error("core_broken", cause=repr(cause))
            return
        self.failure = EngineFailed(f"the engine has failed: {type(cause).__name__}: {cause}")
        self.failure.__cause__ = cause
        self._log.error("engine_failed", cause=repr(cause))
        self.end(lambda now: self.core.end_all(FinishReason.ERROR, now, self.failure))
        self.give_up()
        self._end_lost()
        self._after_turn()

    def give_up(self) -> None:
        """Abandon the plans out, whose requests have all ended: their results will not be waited for."""
        self._outcomes.clear()
        while self._out:
            plan, planned_at = self._out.popleft()
            now = self._clock()
            try:
                self._gained.append((plan, self.core.abandon(plan.step, self.failure, now), now - planned_at))
            except Exception as defect:
                self.fail(defect)
        self._deliver()

    def _end_lost(self) -> None:
        """A core that broke in the middle of something may have lost the ends of some: they must not wait for ever."""
        now, ended = self._clock(), []
        for sequence in self._owed:
            usage = Usage(len(sequence.request.prompt), 0, sequence.cached_tokens, sequence.preemptions)
            timings = Timings(arrived_at=sequence.arrived_at, finished_at=now, admitted_at=sequence.admitted_at)
            request = sequence.request
            final = Finished(request.id, FinishReason.ERROR, usage, timings, self.failure, request.metadata)
            ended.append((sequence, final))
        self._gained.append((None, Committed(finished=ended), 0.0))
        self._deliver()

    @property
    def idle(self) -> bool:
        """Whether no step is out."""
        return not self._out

    def turn(self) -> None:
        """Settle what has come back, launch what can be, deliver what was gained."""
        try:
            now = self._clock()
            while self._outcomes and self.failure is None:
                self._settle(*self._outcomes.popleft(), now)
            self._gained.append((None, self.core.expire(now), 0.0))
            # The runner gets its next step before the streams get their tokens: it must not wait for them.
            while self.failure is None and (plan := self.core.plan(now)) is not None:
                self._out.append((plan, now))
                self._submit(self._memory.bind(plan))
        except Exception as error:  # a defect of ours or a lost device: all who wait are told
            self.fail(error)
        self._deliver()
        self._after_turn()

    def report(self, step: int, outcome: Outcome) -> None:
        """The outcome of the oldest step launched; called on the event loop.  Nothing, for one that was given up."""
        if any(plan.step == step for plan, _ in self._out):
            self._outcomes.append((step, outcome))
            self.wake()

    def _settle(self, step: int, outcome: Outcome, now: float) -> None:
        """Commit or abandon the oldest plan out."""
        plan, planned_at = self._out[0]
        if isinstance(outcome, FatalRunnerError | BrokenInvariant):
            raise outcome
        committed = (
            self._abandon(step, outcome, now) if isinstance(outcome, Exception) else self._commit(step, outcome, now)
        )
        self._out.popleft()
        self.last_step_at = time.time()
        self._gained.append((plan, committed, now - planned_at))
        if self._last_error is not None and self._failures_in_a_row >= self._config.runner_failures_max:
            self.fail(self._last_error)

    def _commit(self, step: int, result: StepResult, now: float) -> Committed:
        try:
            committed = self.core.commit(step, result, now)
        except BadStepResult as error:
            return self._abandon(step, error, now)
        self._failures_in_a_row = 0
        self.errors["runner"] += len(result.row_errors)
        return committed

    def _abandon(self, step: int, error: Exception, now: float) -> Committed:
        self._failures_in_a_row += 1
        self._last_error = error
        self.errors["runner"] += 1
        self._log.warning("step_failed", step=step, cause=repr(error), in_a_row=self._failures_in_a_row)
        return self.core.abandon(step, error, now)

    def _deliver(self) -> None:
        """Tokens first, then final events, then observers; in the order in which steps were committed."""
        while self._gained:
            plan, committed, seconds = self._gained.popleft()
            for sequence, token in zip(committed.sequences, committed.tokens, strict=True):
                sequence.sink.push(token)
            for sequence, finished in committed.finished:
                self._owed.discard(sequence)
                sequence.sink.finish(finished)
            for observer in self.observers:
                self._observe(observer, plan, committed, seconds)

    def _observe(self, observer: Observer, plan: Plan | None, committed: Committed, seconds: float) -> None:
        try:
            if plan is not None:
                observer.on_step(plan, committed, seconds)
            if committed.finished:
                observer.on_finished(committed, self._clock())
        except Exception as error:  # an observer cannot hurt the loop
            self.errors["hook"] += 1
            if self.errors["hook"] == 1:
                self._log.error("observer_failed", observer=type(observer).__name__, cause=repr(error))
