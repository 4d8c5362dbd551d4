"""Engine: the async continuous-batching loop, a thin skin around `SchedulerCore`.

    plan -> bind -> launch -> (the runner works) -> commit -> deliver

One task does all of it, on the caller's event loop (asyncio); the runner's work is done in the launch thread.  With two
steps in flight the next one is planned and launched while one runs.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from types import TracebackType
from typing import Self

import anyio

from kvloom.scheduler.board import Board
from kvloom.scheduler.config import ModelLimits, SchedulerConfig
from kvloom.scheduler.core import SchedulerCore
from kvloom.scheduler.errors import Draining, EngineFailed, InvalidRequest, Misuse, QueueFull, Rejected, SchedulerError
from kvloom.scheduler.intake import Intake, Prompt
from kvloom.scheduler.launch import Launcher, close_after
from kvloom.scheduler.places import QueuePlaces
from kvloom.scheduler.ports import Clock, Observer
from kvloom.scheduler.request import FinishReason, Request
from kvloom.scheduler.sampling_params import SamplingParams
from kvloom.scheduler.status import EngineState, EngineStatistics
from kvloom.scheduler.step_loop import EngineMemory, Runner, StepLoop
from kvloom.scheduler.streams import Result, TokenStream

_LEAVE_SECONDS = 1.0  # how long leaving waits for steps that are still out, and then for the runner to close


class Engine:
    """Continuous batching over a runner and the memory that was made for it.

        async with Engine(runner, memory, SchedulerConfig(max_running=64)) as engine:
            async with engine.open(prompt_ids, SamplingParams(max_new_tokens=64)) as stream:
                async for delta in stream: ...

    Used on the event loop it was entered on.  Leaving the `async with` ends what is still live with
    `FinishReason.SHUTDOWN`; call `drain` first to let it finish.
    """

    def __init__(
        self,
        runner: Runner,
        memory: EngineMemory,
        config: SchedulerConfig | None = None,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        self._runner = runner
        self._memory = memory
        self._config = config or SchedulerConfig()
        self._clock = clock
        memory.require(spec := runner.spec)
        self._core = SchedulerCore(memory, self._config, ModelLimits(spec.vocab_size, spec.max_seq, spec.eos_ids))
        self._loop = StepLoop(self._core, memory, self._config, clock, self._after_turn)
        self._state = EngineState.STARTING
        self._entered = False
        self._tasks: list[asyncio.Task[None]] = []
        self._idle = anyio.Event()
        self._places = QueuePlaces(lambda: self._core.queue_is_full and self._state is EngineState.RUNNING)
        self._intake = Intake(secrets.randbits(62) if self._config.seed is None else self._config.seed)
        self._board = Board(self._take_picture, clock)

    async def __aenter__(self) -> Self:
        """Attach the pools, warm the runner up (in a thread), start the loop.  Raises Misuse the second time."""
        if self._entered:
            raise Misuse("an engine is entered once; make a new one, with a runner of its own")
        self._memory.claim(self._runner)
        self._entered = True
        self._board = Board(self._take_picture, self._clock)  # this thread's from here on
        runner, config = self._runner, self._config
        with ExitStack() as undo:  # last first, when the start fails
            undo.callback(setattr, self, "_state", EngineState.STOPPED)
            undo.callback(self._memory.unclaim)
            runner.attach(self._memory.pools)  # if it raises, it has taken nothing: perhaps another has it
            undo.push(lambda _, error, __: close_after(runner, error))
            await anyio.to_thread.run_sync(runner.warmup, config.max_running, config.max_batch_tokens)
            overlap = config.steps_in_flight_max > 1
            self._launcher = Launcher(
                runner, self._loop.report, self._memory.unclaim, max_rows=self._memory.max_rows, overlap=overlap
            )
            undo.pop_all()
        self._loop.launch_with(self._launcher.submit, self._launcher.close)
        # In no scope of the host's: where that is cancelled, it leaves before its requests lose their loop; engines may
        # be left in any order, and in another task than they were entered in.
        works = (self._loop.run, self._loop.watch)
        self._tasks = [asyncio.create_task(work(), name=f"kvloom {work.__name__}") for work in works]
        self._state = EngineState.RUNNING
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._tasks:
            raise Misuse("the engine was not entered")
        try:  # the host may be cancelled here, and more than once
            await self._stop()
        finally:
            self._loop.stopping = True
            for task in self._tasks:
                task.cancel()
            self._launcher.close()
            with anyio.CancelScope(shield=True):
                await asyncio.wait(self._tasks)
                own = anyio.CapacityLimiter(1)  # the host's threads may all be busy
                await anyio.to_thread.run_sync(self._launcher.join, _LEAVE_SECONDS, limiter=own)
        if error is None and self._launcher.close_error is not None:
            raise self._launcher.close_error

    async def drain(self, timeout: float | None = None) -> None:
        """Take no new requests, let the live ones finish, then stop; those left after `timeout` seconds end.

        They end with `FinishReason.SHUTDOWN`.  Called again, the first timeout that passes counts for all.
        Raises Misuse for a timeout that is no number of seconds; nothing has changed then.
        """
        if timeout is not None and not (isinstance(timeout, int | float) and timeout >= 0):
            raise Misuse(f"timeout={timeout!r} is no number of seconds from 0 up")
        if not self._tasks:
            raise Misuse("the engine was not entered")
        if self._state is EngineState.RUNNING:
            self._state = EngineState.DRAINING
            self._places.grant(len(self._places))
        with anyio.move_on_after(timeout):
            while self._core.has_work and self._loop.failure is None:
                await self._idle.wait()
        await self._stop()

    async def _stop(self) -> None:
        """End what is live and wait, not for long, until no step is out, so that all pages are back."""
        self._state = EngineState.STOPPED
        self._places.grant(len(self._places))
        self._loop.end(lambda now: self._core.end_all(FinishReason.SHUTDOWN, now))
        try:
            with anyio.CancelScope(shield=True), anyio.move_on_after(_LEAVE_SECONDS):
                while not self._loop.idle and self._loop.failure is None:
                    await self._idle.wait()
        finally:
            self._loop.give_up()
            self._after_turn()

    @asynccontextmanager
    async def open(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        deadline: float | None = None,
        wait: bool = True,
        cache_namespace: str = "",
        metadata: Mapping[str, object] | None = None,
    ) -> AsyncIterator[TokenStream]:
        """A request, as a stream of its tokens; leaving the block aborts it if it has not ended.

        deadline  seconds from now after which it ends with `FinishReason.DEADLINE`
        wait      wait for a place in the queue, at most until the deadline; False: raise QueueFull
        cache_namespace  reuse prefixes only of requests that say the same; see `kvloom.scheduler.cache_namespace`

        Raises a `Rejected` (InvalidRequest, DuplicateRequest, TooLong, NeverFits, QueueFull, Draining) or
        EngineFailed; nothing has been queued then.
        """
        try:
            request = self._intake.request(
                prompt,
                params,
                request_id=request_id,
                deadline=deadline,
                now=self._clock(),
                cache_namespace=cache_namespace,
                metadata=metadata,
            )
            await self._place(request, wait)
            stream = TokenStream(request.id)
            self._loop.add(request, self._clock(), stream)
        except SchedulerError as error:
            self._refused(error)
            raise
        try:
            yield stream
        finally:
            if stream.final is None:
                self.abort(stream.request_id)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        deadline: float | None = None,
        wait: bool = True,
        cache_namespace: str = "",
    ) -> Result:
        """The whole answer.  Raises as `open` does, and what went wrong when the request ended with an error."""
        tokens: list[int] = []
        async with self.open(
            prompt, params, request_id=request_id, deadline=deadline, wait=wait, cache_namespace=cache_namespace
        ) as stream:
            async for delta in stream:
                tokens += delta.token_ids
        final = stream.final
        assert final is not None
        if final.error is not None:
            raise final.error
        return Result(tokens, final.reason, final.usage, final.timings)

    def abort(self, request_id: str) -> None:
        """End a request now; nothing happens when no such request is live.  Raises InvalidRequest for what is no id."""
        if not isinstance(request_id, str):
            raise InvalidRequest("request_id", f"{request_id!r} is no string")
        self._loop.end(lambda now: self._core.abort(request_id, now))

    def _refused(self, error: SchedulerError) -> None:
        """Count a refusal; the loop may be asleep, it shows all the same."""
        if isinstance(error, EngineFailed):
            error = Draining(str(error))
        if isinstance(error, Rejected):
            self._core.refuse(error)
        self._board.refresh()

    async def _place(self, request: Request, wait: bool) -> None:
        """Be allowed in: the engine is open and, if the caller waits, there is a place in the queue."""
        self._require_open()
        self._core.check(request)  # what can never run need not wait to hear it
        if wait:
            seconds = None if request.deadline is None else request.deadline - self._clock()
            try:
                with anyio.move_on_after(seconds):
                    await self._places.wait()
            except BaseException:
                self._refused(QueueFull("gave up waiting for a place", 0.0))
                raise
            self._require_open()

    def _require_open(self) -> None:
        if self._loop.failure is not None:
            raise EngineFailed(str(self._loop.failure)) from self._loop.failure.__cause__
        if self._state is not EngineState.RUNNING:
            raise Draining(f"the engine is {self._state}; it takes requests inside `async with engine`")

    @property
    def state(self) -> EngineState:
        """Where the engine is in its life."""
        return EngineState.FAILED if self._loop.failure is not None else self._state

    @property
    def failure(self) -> EngineFailed | None:
        """Why the engine has failed, with the original cause chained."""
        return self._loop.failure

    @property
    def stalled(self) -> bool:
        """Whether a step has been out for longer than `step_timeout`."""
        return self._loop.stalled_seconds > 0

    @property
    def max_seq(self) -> int:
        """Longest sequence, prompt and output together, in tokens."""
        return self._runner.spec.max_seq

    def add_observer(self, observer: Observer) -> None:
        """Tell `observer` of every step and every end from now on."""
        self._loop.observers.append(observer)

    def statistics(self) -> EngineStatistics:
        """One immutable picture, from any thread: of this moment on the engine's own, see `Board` on others."""
        return self._board.read()

    def _take_picture(self) -> EngineStatistics:
        scheduler = self._core.statistics()
        head_at = scheduler.oldest_waiting_at
        return EngineStatistics(
            state=self.state,
            stalled=self.stalled,
            scheduler=scheduler,
            memory=self._memory.statistics(),
            last_step_at=self._loop.last_step_at,
            oldest_waiting_at=None if head_at is None else time.time() - (self._clock() - head_at),
            errors=dict(self._loop.errors),
        )

    def _after_turn(self) -> None:
        if self._loop.idle:
            self._board.refresh()
            self._idle.set()
            self._idle = anyio.Event()
        else:
            self._board.refresh_if_due()
        if len(self._places):
            self._places.grant(self._core.free_places)
