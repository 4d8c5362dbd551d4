"""Coming up, draining, stopping, failing: an engine's life, and that nobody is left waiting at its end."""

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anyio
import pytest

from kvloom.allocator import KVCache
from kvloom.scheduler import (
    Draining,
    Engine,
    EngineState,
    FinishReason,
    Misuse,
    QueueFull,
    Result,
    SamplingParams,
    TokenStream,
)
from kvloom.scheduler.runners import ToyRunner
from tests.scheduler.engines import Gate, ScriptedRunner, final_of, read, until

EngineOf = Callable[..., Engine]
both_depths = pytest.mark.parametrize("depth", [1, 2])
LONG = SamplingParams(max_new_tokens=2000)


def params(count: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=count)


def launch_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("kvloom-")]


class Noting(ToyRunner):
    """Notes the order in which it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[Any] = []

    def attach(self, pools: Mapping[str, KVCache]) -> None:
        self.called.append(list(pools))

    def warmup(self, max_rows: int, max_tokens: int) -> None:
        self.called.append((max_rows, max_tokens, threading.current_thread() is threading.main_thread()))

    def close(self) -> None:
        self.called.append("close")


async def test_the_runner_is_prepared_once_and_closed_once(engine_of: EngineOf) -> None:
    runner = Noting()
    engine = engine_of(runner, max_running=8, max_batch_tokens=100, prefill_chunk=50)
    assert (engine.state, runner.called) == (EngineState.STARTING, [])
    async with engine as entered:
        assert entered is engine
        assert engine.state is EngineState.RUNNING
        assert engine.max_seq == 4096
        await engine.generate([1], params(1))
    assert runner.called == [["full"], (8, 100, False), "close"]
    await until(lambda: not launch_threads())


def test_an_engine_may_be_made_before_there_is_a_loop(engine_of: EngineOf) -> None:
    """At the top of a module, as applications do."""
    engine = engine_of()

    async def use() -> None:
        async with engine:
            assert (await engine.generate([1], params(2))).token_ids

    asyncio.run(use())


async def test_a_warm_up_that_fails(engine_of: EngineOf) -> None:
    class Cold(ToyRunner):
        closed = 0

        def warmup(self, max_rows: int, max_tokens: int) -> None:
            raise ValueError("too cold")

        def close(self) -> None:
            self.closed += 1

    runner = Cold()
    engine = engine_of(runner)
    with pytest.raises(ValueError, match="too cold"):
        async with engine:
            pass
    assert (engine.state, runner.closed) == (EngineState.STOPPED, 1)
    assert not launch_threads()
    with pytest.raises(Misuse):
        await engine.__aenter__()


async def test_an_engine_is_entered_once(engine_of: EngineOf) -> None:
    engine = engine_of()
    async with engine:
        with pytest.raises(Misuse, match="entered once"):
            async with engine:
                pass
        assert (await engine.generate([1], params(1))).token_ids, "the first is not disturbed"
    with pytest.raises(Misuse, match="entered once"):
        async with engine:
            pass


async def test_before_and_after(engine_of: EngineOf) -> None:
    engine = engine_of()
    with pytest.raises(Draining, match="starting"):
        await engine.generate([1], params(1))
    async with engine:
        pass
    with pytest.raises(Draining, match="stopped"):
        await engine.generate([1], params(1))
    await engine.drain()
    assert dict(engine.statistics().scheduler.rejected) == {"draining": 2}
    assert engine.statistics().state is EngineState.STOPPED


async def ask_all(engine: Engine, outputs: Sequence[int]) -> list[asyncio.Task[Result]]:
    tasks = [asyncio.create_task(engine.generate([1], params(count))) for count in outputs]
    await until(lambda: engine.statistics().scheduler.received == len(outputs))
    return tasks


@both_depths
async def test_drain_lets_all_that_came_finish(engine_of: EngineOf, depth: int) -> None:
    async with engine_of(ScriptedRunner(step_seconds=0.001), max_running=4, steps_in_flight_max=depth) as engine:
        tasks = await ask_all(engine, [5, 10, 20, 40, 5, 10, 20])
        draining = asyncio.create_task(engine.drain())
        await until(lambda: engine.state is EngineState.DRAINING)
        with pytest.raises(Draining, match="draining") as caught:
            await engine.generate([1], params(1))
        assert caught.value.status_hint == 503
        assert [len((await task).token_ids) for task in tasks] == [5, 10, 20, 40, 5, 10, 20]
        await draining
        assert engine.state is EngineState.STOPPED
        started = time.perf_counter()
        await engine.drain()
        assert time.perf_counter() - started < 0.1
    assert {task.result().reason for task in tasks} == {FinishReason.LENGTH}


async def test_drain_ends_what_takes_too_long(engine_of: EngineOf) -> None:
    async with engine_of(ScriptedRunner(step_seconds=0.001), max_running=2) as engine:
        tasks = await ask_all(engine, [2000, 2000, 2000])
        await engine.drain(timeout=0.1)
        results = [await task for task in tasks]
        assert [result.reason for result in results] == [FinishReason.SHUTDOWN] * 3
        assert [bool(result.token_ids) for result in results] == [True, True, False]
    assert dict(engine.statistics().scheduler.finished) == {"shutdown": 3}


async def test_leaving_without_drain_ends_everything(engine_of: EngineOf) -> None:
    async with engine_of(max_running=2, max_waiting=2) as engine:
        tasks = await ask_all(engine, [2000, 2000, 2000, 2000])
        waits_outside = asyncio.create_task(engine.generate([1], params(1)))
        await until(lambda: engine.statistics().scheduler.output_tokens)
    assert [(await task).reason for task in tasks] == [FinishReason.SHUTDOWN] * 4
    with pytest.raises(Draining):
        await waits_outside
    now = engine.statistics().scheduler
    assert (dict(now.finished), dict(now.rejected)) == ({"shutdown": 4}, {"draining": 1})


async def test_draining_sends_those_away_who_wait_for_a_place(engine_of: EngineOf) -> None:
    gate = Gate()
    async with engine_of(ScriptedRunner(gate), max_running=1, max_waiting=1) as engine:
        tasks = await ask_all(engine, [1, 1])
        outside = asyncio.create_task(engine.generate([1], params(1)))
        await gate.entered()
        draining = asyncio.create_task(engine.drain())
        with pytest.raises(Draining):
            await outside
        gate.open()
        await draining
        assert [(await task).reason for task in tasks] == [FinishReason.LENGTH] * 2


async def test_an_exception_in_the_block_is_the_callers(engine_of: EngineOf) -> None:
    engine = engine_of()
    with pytest.raises(ZeroDivisionError):
        async with engine:
            raise ZeroDivisionError
    assert engine.state is EngineState.STOPPED


@pytest.mark.parametrize("times", [1, 2])
@both_depths
async def test_the_host_task_is_cancelled(engine_of: EngineOf, times: int, depth: int) -> None:
    """Once, or again while it is leaving: the engine stops, pages come back, no thread stays."""
    gate = Gate(first=2)
    runner = ScriptedRunner(gate)
    engine = engine_of(runner, steps_in_flight_max=depth)
    streams: list[TokenStream] = []

    async def host() -> None:
        async with engine, engine.open([1], LONG) as stream:
            streams.append(stream)
            await asyncio.sleep(30)

    task = asyncio.create_task(host())
    await gate.entered()
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0.05)
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert final_of(streams[0]).reason is FinishReason.ABORT
    assert (engine.state, runner.closed) == (EngineState.STOPPED, 1)
    await until(lambda: not launch_threads())


async def test_a_cancelled_scope_around_it(engine_of: EngineOf) -> None:
    runner = ScriptedRunner()
    engine = engine_of(runner)
    with anyio.CancelScope() as scope:
        async with engine, engine.open([1], LONG) as stream:
            await anext(stream)
            scope.cancel()
            await read(stream)
    assert scope.cancelled_caught, "the reader was cancelled, its request did not end before it"
    assert (engine.state, runner.closed) == (EngineState.STOPPED, 1)
    assert final_of(stream).reason is FinishReason.ABORT
    await until(lambda: not launch_threads())


@both_depths
async def test_a_step_that_hangs_does_not_keep_us(engine_of: EngineOf, depth: int) -> None:
    gate = Gate(first=1)
    started = time.perf_counter()
    async with engine_of(ScriptedRunner(gate), steps_in_flight_max=depth) as engine:
        async with engine.open([1], LONG) as stream:
            assert len((await anext(stream)).token_ids) == 1
            await engine.drain(timeout=0.1)
            assert final_of(stream).reason is FinishReason.SHUTDOWN
        gate.open()  # it comes back after all, when nobody waits for it any more
        await until(lambda: True)
        await asyncio.sleep(0.05)
        assert engine.state is EngineState.STOPPED
        assert engine.failure is None
    assert time.perf_counter() - started < 0.1 + 1.0 + 1.0


async def test_what_was_queued_behind_a_step_that_hangs_is_not_run_any_more(engine_of: EngineOf) -> None:
    """Nor is the runner closed before it has come back from that step."""
    gate = Gate(first=1)
    runner = ScriptedRunner(gate)
    async with engine_of(runner, steps_in_flight_max=2) as engine, engine.open([1], LONG):
        await gate.entered()
        await until(lambda: engine.statistics().scheduler.steps_in_flight == 2)
    assert (runner.closed, len(runner.steps)) == (0, 2)
    gate.open()
    await until(lambda: not launch_threads())
    assert (runner.closed, len(runner.steps)) == (1, 2)


async def test_places_are_given_in_the_order_of_coming(engine_of: EngineOf) -> None:
    order: list[int] = []
    gate = Gate()
    async with engine_of(ScriptedRunner(gate), max_running=1, max_waiting=1) as engine:

        async def ask(number: int) -> None:
            async with engine.open([1], params(1)) as stream:
                order.append(number)
                await read(stream)

        tasks = []
        for number in range(8):
            tasks.append(asyncio.create_task(ask(number)))
            await asyncio.sleep(0)
        await gate.entered()
        tasks[4].cancel()
        gate.open()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert order == [0, 1, 2, 3, 5, 6, 7]
    now = engine.statistics().scheduler
    assert (dict(now.finished), dict(now.rejected), now.received) == ({"length": 7}, {"queue_full": 1}, 8)


async def test_who_would_not_wait_is_told_when_to_come_again(engine_of: EngineOf) -> None:
    """The faster the queue moves, the sooner."""
    gate = Gate(first=40)
    async with engine_of(ScriptedRunner(gate, step_seconds=0.002), max_running=1, max_waiting=1) as engine:
        for _ in range(20):
            await engine.generate([1], params(2))
        tasks = [asyncio.create_task(engine.generate([1], params(2))) for _ in range(2)]
        await gate.entered()
        await until(lambda: engine.statistics().scheduler.waiting == 1)
        with pytest.raises(QueueFull) as caught:
            await engine.generate([1], params(1), wait=False)
        assert 0 < caught.value.retry_after < 1
        gate.open()
        await asyncio.gather(*tasks)
