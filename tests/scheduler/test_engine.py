"""The engine as its users see it: open, generate, and every way to leave."""

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import FrozenInstanceError

import anyio
import pytest

from kvloom.scheduler import (
    Delta,
    DuplicateRequest,
    Engine,
    EngineState,
    FinishReason,
    InvalidConfig,
    InvalidRequest,
    NeverFits,
    QueueFull,
    SamplingParams,
    SchedulerError,
    TokenStream,
    TooLong,
)
from kvloom.scheduler.plan import Committed, Plan
from tests.scheduler.engines import Gate, ScriptedRunner, alone, final_of, read, until

EngineOf = Callable[..., Engine]
both_depths = pytest.mark.parametrize("depth", [1, 2])
ONCE = list(b"Once upon")
LONG = SamplingParams(max_new_tokens=2000)


def params(count: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=count)


def finished(engine: Engine) -> dict[str, int]:
    return dict(engine.statistics().scheduler.finished)


def live(engine: Engine) -> int:
    now = engine.statistics().scheduler
    return now.waiting + now.preempted + now.prefilling + now.decoding


@both_depths
async def test_generate(engine_of: EngineOf, depth: int) -> None:
    async with engine_of(steps_in_flight_max=depth) as engine:
        result = await engine.generate(ONCE, params(40))
    assert result.token_ids == await alone(ONCE, 40)
    assert result.reason is FinishReason.LENGTH
    assert (result.usage.prompt_tokens, result.usage.output_tokens) == (9, 40)
    assert 0 < (result.timings.first_token_seconds or 0) <= result.timings.total_seconds


@both_depths
async def test_a_stream(engine_of: EngineOf, depth: int) -> None:
    async with engine_of(steps_in_flight_max=depth) as engine:
        async with engine.open(ONCE, params(40)) as stream:
            assert stream.final is None
            deltas = [delta async for delta in stream]
        assert all(isinstance(delta, Delta) and delta.token_ids for delta in deltas)
        assert [token for delta in deltas for token in delta.token_ids] == await alone(ONCE, 40)
        assert final_of(stream).usage.output_tokens == 40
        assert final_of(stream).request_id == stream.request_id


@both_depths
async def test_many_at_once_say_what_each_says_alone(engine_of: EngineOf, depth: int) -> None:
    said: dict[int, list[int]] = {}
    settings = {"max_running": 5, "max_waiting": 3, "pages": 12, "page_size": 4, "prefill_chunk": 7}
    async with engine_of(steps_in_flight_max=depth, **settings) as engine, anyio.create_task_group() as tasks:

        async def ask(number: int) -> None:
            said[number] = (await engine.generate(range(number, 2 * number + 2), params(12 + number % 9))).token_ids

        for number in range(25):
            tasks.start_soon(ask, number)
    for number in range(25):
        assert said[number] == await alone(range(number, 2 * number + 2), 12 + number % 9)
    assert engine.statistics().scheduler.preemptions > 0
    assert finished(engine) == {"length": 25}


async def use(engine: Engine, way: str, streams: list[TokenStream]) -> None:
    """Open a request and leave it in one of many ways."""
    async with engine.open([7] * 40, LONG) as stream:
        streams.append(stream)
        if way == "never read":
            return
        async for _ in stream:
            if way == "break":
                break
            if way == "raise":
                raise ZeroDivisionError
            if way == "return":
                return
            if way == "abort":
                engine.abort(stream.request_id)


async def deltas_of(engine: Engine, streams: list[TokenStream]) -> AsyncIterator[Delta]:
    async with engine.open([7] * 40, LONG) as stream:
        streams.append(stream)
        async for delta in stream:
            yield delta


@pytest.mark.parametrize("way", ["break", "raise", "return", "cancel", "timeout", "never read", "abort", "close"])
@both_depths
async def test_leaving_is_aborting(engine_of: EngineOf, way: str, depth: int) -> None:
    streams: list[TokenStream] = []
    async with engine_of(steps_in_flight_max=depth) as engine:
        if way == "raise":
            with pytest.raises(ZeroDivisionError):
                await use(engine, way, streams)
        elif way == "cancel":
            task = asyncio.create_task(use(engine, way, streams))
            await until(lambda: engine.statistics().scheduler.output_tokens > 2)
            task.cancel()
            await asyncio.wait([task])
        elif way == "timeout":
            with anyio.move_on_after(0.05) as scope:
                await use(engine, way, streams)
            assert scope.cancelled_caught
        elif way == "close":
            async for _ in (deltas := deltas_of(engine, streams)):
                break
            del deltas, _  # nobody closes it: Python does, when it finds it
            gc.collect()
            await until(lambda: streams[0].final)
        else:
            await use(engine, way, streams)
        assert final_of(streams[0]).reason is FinishReason.ABORT
        assert live(engine) == 0
        said = final_of(streams[0]).usage.output_tokens
        await until(lambda: not engine.statistics().scheduler.steps_in_flight)
        assert engine.statistics().memory.pools["full"].held == 0
        assert final_of(streams[0]).usage.output_tokens == said
        assert (await engine.generate([7], params(2))).usage.output_tokens == 2
    assert finished(engine) == {"abort": 1, "length": 1}


async def test_what_was_said_before_the_abort_can_be_read_after_it(engine_of: EngineOf) -> None:
    async with engine_of() as engine, engine.open([7], LONG) as stream:
        await until(lambda: engine.statistics().scheduler.output_tokens >= 5)
        engine.abort(stream.request_id)
        assert len(await read(stream)) == final_of(stream).usage.output_tokens >= 5
        engine.abort(stream.request_id)
        engine.abort("nobody")
    assert finished(engine) == {"abort": 1}


async def test_refusals_reach_their_caller_only(engine_of: EngineOf) -> None:
    async with engine_of(pages=4, page_size=16, max_waiting=5) as engine:
        async with engine.open([7], LONG, request_id="here") as stream:
            for prompt, error in (([], InvalidRequest), ([256], InvalidRequest), ([1.5], InvalidRequest),
                                  ([1] * 65, NeverFits), ([1] * 4096, TooLong)):  # fmt: skip
                with pytest.raises(error):
                    await engine.generate(prompt, params(1))  # type: ignore[arg-type]
            with pytest.raises(DuplicateRequest):
                await engine.generate([1], params(1), request_id="here")
            assert stream.final is None
            engine.abort("here")
        assert dict(engine.statistics().scheduler.rejected) == {"invalid": 4, "never_fits": 1, "too_long": 1}
        assert (await engine.generate([1], params(1), request_id="here")).token_ids


async def test_no_wish_of_one_request_can_stop_the_engine(engine_of: EngineOf) -> None:
    async with engine_of(seed=2**63 - 1, pages=8) as engine:
        for wish in (
            SamplingParams(min_new_tokens=2**31 - 1),
            SamplingParams(max_new_tokens=3, temperature=1e-300, top_p=1e-300, min_p=1.0, top_k=2**31 - 1),
            SamplingParams(max_new_tokens=3, repetition_penalty=0.01, presence_penalty=-100.0),
            SamplingParams(max_new_tokens=3, seed=-(2**63), temperature=100.0),
            SamplingParams(max_new_tokens=3, stop_token_ids=tuple(range(100, 164)), min_new_tokens=3),
        ):
            assert (await engine.generate([1, 2, 3], wish)).reason in (FinishReason.LENGTH, FinishReason.STOP)
        for deadline in (-1.0, 0.0):
            assert (await engine.generate([1], params(3), deadline=deadline)).reason is FinishReason.DEADLINE
        with pytest.raises(InvalidRequest, match="deadline"):
            await engine.generate([1], params(3), deadline=float("nan"))
        assert (await engine.generate([1], params(3), deadline=float("inf"))).reason is FinishReason.LENGTH
        assert engine.state is EngineState.RUNNING


async def test_results_are_final(engine_of: EngineOf) -> None:
    async with engine_of() as engine:
        result = await engine.generate([1], params(1))
    with pytest.raises(FrozenInstanceError):
        result.reason = FinishReason.STOP  # type: ignore[misc]


@both_depths
async def test_deadlines(engine_of: EngineOf, depth: int) -> None:
    async with engine_of(ScriptedRunner(step_seconds=0.005), steps_in_flight_max=depth) as engine:
        result = await engine.generate([1], LONG, deadline=0.1)
        assert result.reason is FinishReason.DEADLINE
        assert result.usage.output_tokens == len(result.token_ids) > 0
        assert 0.1 <= result.timings.total_seconds < 2


async def test_a_deadline_in_a_step_that_hangs(engine_of: EngineOf) -> None:
    gate = Gate(first=1)
    async with engine_of(ScriptedRunner(gate)) as engine:
        async with engine.open([1], LONG, deadline=0.1) as stream:
            assert len(await read(stream)) == 1
            assert final_of(stream).reason is FinishReason.DEADLINE
            assert engine.statistics().scheduler.steps_in_flight == 1
        gate.open()
        assert (await engine.generate([1], params(1))).token_ids


@asynccontextmanager
async def full(engine_of: EngineOf) -> AsyncIterator[tuple[Engine, Gate]]:
    """An engine whose one row and one place are taken, until the gate is opened."""
    gate = Gate()
    async with (
        engine_of(ScriptedRunner(gate), max_running=1, max_waiting=1) as engine,
        engine.open([1], params(3)) as runs,
        engine.open([2], params(3)) as waits,
    ):
        await gate.entered()
        yield engine, gate
        gate.open()
        assert [len(await read(stream)) for stream in (runs, waits)] == [3, 3]


async def test_the_deadline_counts_from_the_call(engine_of: EngineOf) -> None:
    """Waiting for a place in the queue is waiting."""
    async with full(engine_of) as (engine, gate):
        late = asyncio.create_task(engine.generate([3], LONG, deadline=0.3))
        await asyncio.sleep(0.2)
        gate.open()
        result = await late
        assert result.reason is FinishReason.DEADLINE
        assert result.timings.total_seconds < 0.25


async def test_the_deadline_passes_before_there_is_a_place(engine_of: EngineOf) -> None:
    async with full(engine_of) as (engine, _):
        with pytest.raises(QueueFull), anyio.fail_after(5):
            await engine.generate([3], params(3), deadline=0.05)


async def test_what_makes_no_sense_need_not_wait_for_a_place(engine_of: EngineOf) -> None:
    async with full(engine_of) as (engine, _):
        with pytest.raises(InvalidRequest), anyio.fail_after(5):
            await engine.generate([-1], params(3))


async def test_queue_full(engine_of: EngineOf) -> None:
    async with full(engine_of) as (engine, _):
        with pytest.raises(QueueFull) as caught:
            await engine.generate([3], params(1), wait=False)
        assert caught.value.retry_after > 0
        assert caught.value.status_hint == 429
    assert dict(engine.statistics().scheduler.rejected) == {"queue_full": 1}


class Watcher:
    """Notes everything, on the thread it is told on."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ends: list[FinishReason] = []
        self.steps: list[tuple[str, float]] = []
        self.threads: set[int] = set()

    def on_step(self, plan: Plan, committed: Committed, seconds: float) -> None:
        self.steps.append((plan.kind, seconds))
        self.tokens += committed.tokens
        self.threads.add(threading.get_ident())

    def on_finished(self, committed: Committed, now: float) -> None:
        self.ends += [finished.reason for _, finished in committed.finished]


class Raises(Watcher):
    def on_step(self, plan: Plan, committed: Committed, seconds: float) -> None:
        raise RuntimeError("on_step")

    def on_finished(self, committed: Committed, now: float) -> None:
        raise RuntimeError("on_finished")


async def test_observers_are_told_of_everything_once(engine_of: EngineOf) -> None:
    watcher = Watcher()
    async with engine_of() as engine:
        engine.add_observer(Raises())
        engine.add_observer(watcher)
        result = await engine.generate([1] * 3, params(4))
        async with engine.open([1], LONG):
            pass
    assert watcher.tokens[:4] == result.token_ids
    assert [kind for kind, _ in watcher.steps[:4]] == ["prefill", "decode", "decode", "decode"]
    assert all(seconds > 0 for _, seconds in watcher.steps)
    assert watcher.ends == [FinishReason.LENGTH, FinishReason.ABORT]
    assert watcher.threads == {threading.get_ident()}
    assert engine.statistics().errors["hook"] >= 5


async def test_an_observer_may_end_requests(engine_of: EngineOf) -> None:
    class Ends(Watcher):
        def on_step(self, plan: Plan, committed: Committed, seconds: float) -> None:
            super().on_step(plan, committed, seconds)
            if len(self.tokens) == 3:
                engine.abort("r")

    watcher = Ends()
    async with engine_of() as engine:
        engine.add_observer(watcher)
        result = await engine.generate([1], LONG, request_id="r")
    assert (result.reason, len(result.token_ids)) == (FinishReason.ABORT, 3)
    assert watcher.ends == [FinishReason.ABORT]


async def test_statistics_from_another_thread(engine_of: EngineOf) -> None:
    async with engine_of(ScriptedRunner(step_seconds=0.001)) as engine:
        pictures = []

        def look() -> None:
            for _ in range(200):
                pictures.append(engine.statistics())

        async with engine.open([1], LONG):
            await anyio.to_thread.run_sync(look)
        await until(lambda: not engine.statistics().scheduler.steps_in_flight)
        elsewhere = await anyio.to_thread.run_sync(engine.statistics)
        assert elsewhere.scheduler.finished == {"abort": 1}
        assert elsewhere.memory.pools["full"].capacity == 256
    for picture in pictures:
        now, pool = picture.scheduler, picture.memory.pools["full"]
        in_flight = now.waiting + now.preempted + now.prefilling + now.decoding
        assert now.received == sum(now.rejected.values()) + sum(now.finished.values()) + in_flight
        assert pool.free + pool.held + pool.cached + pool.quarantined == pool.capacity
    after = await anyio.to_thread.run_sync(engine.statistics)
    assert after.state is EngineState.STOPPED


async def test_two_readers_are_refused(engine_of: EngineOf) -> None:
    gate = Gate()
    async with engine_of(ScriptedRunner(gate)) as engine, engine.open([1], params(3)) as stream:
        first = asyncio.create_task(read(stream))
        await gate.entered()
        with pytest.raises(SchedulerError, match="two tasks read"):
            await anext(stream)
        gate.open()
        assert len(await first) == 3


def test_a_runner_that_does_not_fit(engine_of: EngineOf) -> None:
    with pytest.raises(InvalidConfig, match="max_running=65"):
        engine_of(max_running=65)
