"""An engine that fails, whatever it is that breaks: nobody is left waiting."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from kvloom.allocator import KVMemory
from kvloom.scheduler import (
    Engine,
    EngineFailed,
    EngineState,
    FatalRunnerError,
    Result,
    RunnerFailed,
    SamplingParams,
    SchedulerConfig,
    SchedulerError,
)
from kvloom.scheduler.runners import StepOutput
from tests.scheduler.engines import ScriptedRunner, final_of, read, until

EngineOf = Callable[..., Engine]
both_depths = pytest.mark.parametrize("depth", [1, 2])
LONG = SamplingParams(max_new_tokens=2000)


def params(count: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=count)


@both_depths
async def test_a_fatal_error_ends_everything_with_its_cause(engine_of: EngineOf, depth: int) -> None:
    def act(step: int, output: StepOutput) -> StepOutput:
        if step == 3:
            raise FatalRunnerError("device lost")
        return output

    async with engine_of(ScriptedRunner(act), max_running=1, max_waiting=1, steps_in_flight_max=depth) as engine:
        results = await asyncio.gather(
            *(engine.generate([1], LONG) for _ in range(3)), return_exceptions=True
        )  # fmt: skip
        assert all(isinstance(error, EngineFailed) and "device lost" in str(error) for error in results), results
        assert engine.state is EngineState.FAILED
        assert isinstance(engine.failure, EngineFailed)
        assert isinstance(engine.failure.__cause__, FatalRunnerError)
        started = time.perf_counter()
        with pytest.raises(EngineFailed, match="device lost") as caught:
            await engine.generate([1], params(1))
        assert isinstance(caught.value.__cause__, FatalRunnerError)
        await engine.drain(timeout=10)
        assert time.perf_counter() - started < 1
    assert engine.state is EngineState.FAILED


class Breaking(KVMemory):
    """Raises out of one verb, from a moment on."""

    broken: str = ""

    def _break(self, verb: str) -> None:
        if self.broken == verb:
            raise RuntimeError(f"{verb} is broken")

    def bind(self, plan: Any) -> Any:
        self._break("bind")
        return super().bind(plan)

    def reserve(self, rows: Any, lengths: Any, op: str = "decode", spare: int = 0) -> Any:
        self._break("reserve")
        return super().reserve(rows, lengths, op)

    def publish(self, rows: Any, lengths: Any, tokens_of: Any) -> None:
        self._break("publish")

    def release(self, rows: Any, fences: Any, reason: str = "finish") -> None:
        self._break("release")
        super().release(rows, fences, reason)

    def settle(self, step: int) -> None:
        self._break("settle")
        super().settle(step)


@pytest.mark.parametrize("verb", ["bind", "reserve", "publish", "release", "settle"])
@pytest.mark.parametrize("trigger", ["by itself", "abort", "leave"])
@both_depths
async def test_whatever_breaks_nobody_waits_for_ever(verb: str, trigger: str, depth: int) -> None:
    """The books may not balance any more; but every stream ends, with an error, and the engine says that it failed."""
    runner = ScriptedRunner(step_seconds=0.002)
    memory = Breaking.for_runner(runner, capacity_tokens=1024, page_size=16)
    assert isinstance(memory, Breaking)
    engine = Engine(runner, memory, SchedulerConfig(max_running=2, steps_in_flight_max=depth))
    with anyio.fail_after(10):
        async with engine:
            counts = [40, 41, 42, 400]
            tasks = [
                asyncio.create_task(engine.generate([1], params(count), request_id=str(count))) for count in counts
            ]
            await until(lambda: engine.statistics().scheduler.output_tokens > 5)
            memory.broken = verb
            if trigger == "abort":
                engine.abort("40")
            elif trigger == "leave":
                tasks[1].cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            assert engine.state is EngineState.FAILED
    failed = [end for end in ends if isinstance(end, EngineFailed)]
    assert len(failed) >= 2
    assert all(isinstance(end, SchedulerError | Result | asyncio.CancelledError) for end in ends), ends
    assert f"{verb} is broken" in str(failed[0])
    assert runner.closed == 1


async def test_a_step_that_fails_is_told_to_its_requests_only(engine_of: EngineOf) -> None:
    def act(step: int, output: StepOutput) -> StepOutput:
        if step == 1:
            raise ValueError("not today")
        return output

    async with engine_of(ScriptedRunner(act), max_running=1) as engine:
        first, second = await asyncio.gather(
            engine.generate([1], params(3)), engine.generate([2], params(3)), return_exceptions=True
        )
        assert isinstance(first, RunnerFailed)
        assert isinstance(first.__cause__, ValueError)
        assert isinstance(second, Result)
        async with engine.open([1], params(2)) as stream:
            await read(stream)
        assert final_of(stream).error is None
    assert engine.statistics().errors["runner"] == 1


@both_depths
async def test_somebody_cancels_the_engines_task(engine_of: EngineOf, depth: int) -> None:
    """A framework that cancels every task it finds: nobody may wait for ever."""
    async with engine_of(ScriptedRunner(step_seconds=0.001), steps_in_flight_max=depth) as engine:
        async with engine.open([1], LONG) as stream:
            await anext(stream)
            (task,) = (task for task in asyncio.all_tasks() if task.get_name() == "kvloom run")
            task.cancel()
            with anyio.fail_after(5):
                await read(stream)
            assert isinstance(final_of(stream).error, EngineFailed)
        assert engine.state is EngineState.FAILED
        with pytest.raises(EngineFailed):
            await engine.generate([1], params(1))
