"""Failures that others have had: runners that fail, engines that stop (cases.md B31, B33; HTTP is tested elsewhere)."""

import asyncio
import gc
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import anyio
import pytest
import torch

from kvloom.scheduler import (
    BadStepResult,
    Draining,
    Engine,
    EngineFailed,
    EngineState,
    FinishReason,
    Result,
    RunnerFailed,
    SamplingParams,
)
from kvloom.scheduler.runners import StepOutput
from tests.scheduler.engines import Gate, ScriptedRunner, alone, engine_over, final_of, read, until

EngineOf = Callable[..., Engine]
LONG = SamplingParams(max_new_tokens=2000)
both_depths = pytest.mark.parametrize("depth", [1, 2])


def params(count: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=count)


# ---- B31: a runner error ends the loop and every client hangs ----


def raises(output: StepOutput) -> Any:
    raise ValueError("not today")


def nan_for_the_first_row(output: StepOutput) -> StepOutput:
    """Logits that say what the toy would, but for one row that holds NaN."""
    assert output.next_tokens is not None
    logits = torch.nn.functional.one_hot(output.next_tokens.long(), 256).float()
    logits[0, 3] = float("nan")
    return StepOutput(logits=logits)


def changed(change: Callable[[torch.Tensor], Any]) -> Callable[[StepOutput], Any]:
    def answer(output: StepOutput) -> Any:
        assert output.next_tokens is not None
        return StepOutput(next_tokens=change(output.next_tokens))

    return answer


ANSWERS: dict[str, Callable[[StepOutput], Any]] = {
    "raises": raises,
    "too few tokens": changed(lambda tokens: tokens[:-1]),
    "too many tokens": changed(lambda tokens: torch.cat((tokens, tokens))),
    "the wrong shape": changed(lambda tokens: tokens[:, None]),
    "below the vocabulary": changed(lambda tokens: tokens * 0 - 1),
    "beyond the vocabulary": changed(lambda tokens: tokens * 0 + 256),
    "floats": changed(lambda tokens: tokens.float()),
    "nothing": lambda output: None,
    "neither tokens nor logits": lambda output: StepOutput(),
    "a list": lambda output: StepOutput(next_tokens=[1, 2]),  # type: ignore[arg-type]
    "errors of no row": lambda output: StepOutput(next_tokens=output.next_tokens, row_errors={"A": 1}),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("kind", ANSWERS)
@both_depths
async def test_b31_a_bad_answer_is_an_error_for_that_batch_only(engine_of: EngineOf, kind: str, depth: int) -> None:
    """C comes while the step of A and B is out (with two steps in flight: it is together with them in the next one)."""
    gate = Gate()

    def act(step: int, output: StepOutput) -> Any:
        gate(step, output)
        return ANSWERS[kind](output) if step == 0 else output

    runner = ScriptedRunner(act)
    async with engine_of(runner, steps_in_flight_max=depth) as engine:
        a, b = (asyncio.create_task(engine.generate([1], params(20), request_id=name)) for name in "AB")
        await gate.entered()
        c = asyncio.create_task(engine.generate([1, 2, 3], params(20)))
        await until(lambda: engine.statistics().scheduler.received == 3)
        await until(lambda: engine.statistics().scheduler.steps_in_flight == depth)
        gate.open()
        with anyio.fail_after(1):
            for failed in (a, b):
                with pytest.raises((RunnerFailed, BadStepResult)):
                    await failed
        assert (await c).token_ids == await alone([1, 2, 3], 20)
        assert runner.steps[0] == ["A", "B"]
        assert all(0 <= token < 256 for step in runner.tokens for token in step), (
            "the model is fed tokens, nothing else"
        )
        assert (engine.state, engine.statistics().scheduler.failed_steps) == (EngineState.RUNNING, 1)
        await until(lambda: not engine.statistics().memory.pools["full"].held)
    assert dict(engine.statistics().scheduler.finished) == {"error": 2, "length": 1}


@both_depths
async def test_b31_nan_for_ever_in_one_row_does_not_spoil_the_others(engine_of: EngineOf, depth: int) -> None:
    """Not even those in the same step; nor does it count as a failed one."""
    gate = Gate()

    def act(step: int, output: StepOutput) -> Any:
        gate(step, output)
        return nan_for_the_first_row(output) if step > 1 and "bad" in runner.steps[-1] else output

    runner = ScriptedRunner(act)
    async with engine_of(runner, steps_in_flight_max=depth) as engine:
        bad = asyncio.create_task(engine.generate([1], params(20), request_id="bad"))
        await gate.entered()
        good = asyncio.create_task(engine.generate([1, 2, 3], params(20)))
        await until(lambda: engine.statistics().scheduler.received == 2)
        await until(lambda: engine.statistics().scheduler.steps_in_flight == depth)
        gate.open()
        with pytest.raises(RunnerFailed, match="no numbers"):
            await bad
        assert (await good).token_ids == await alone([1, 2, 3], 20)
        assert engine.statistics().scheduler.failed_steps == 0


@both_depths
async def test_b31_one_row_fails(engine_of: EngineOf, depth: int) -> None:
    boom = ValueError("boom")

    def act(step: int, output: StepOutput) -> StepOutput:
        names = runner.steps[-1]
        return StepOutput(
            output.next_tokens, row_errors={names.index("bad"): boom} if "bad" in names and step > 2 else {}
        )

    runner = ScriptedRunner(act)
    async with engine_of(runner, steps_in_flight_max=depth) as engine:
        bad, good = await asyncio.gather(
            engine.generate([1], params(20), request_id="bad"),
            engine.generate([1, 2, 3], params(20)),
            return_exceptions=True,
        )
    assert bad is boom
    assert isinstance(good, Result)
    assert good.token_ids == await alone([1, 2, 3], 20)
    assert engine.statistics().errors["runner"] >= 1


@both_depths
async def test_b31_a_runner_that_always_fails(engine_of: EngineOf, depth: int) -> None:
    def act(step: int, output: StepOutput) -> StepOutput:
        raise ValueError("broken for good")

    settings = {"max_running": 1, "max_waiting": 2, "runner_failures_max": 4, "steps_in_flight_max": depth}
    async with engine_of(ScriptedRunner(act), **settings) as engine:
        with anyio.fail_after(5):
            ends = await asyncio.gather(*(engine.generate([1], LONG) for _ in range(9)), return_exceptions=True)
        told = sum(isinstance(end, RunnerFailed) for end in ends)
        assert 4 // depth <= told <= 4, "with two steps in flight a request may be in two that fail"
        assert [type(end) for end in ends] == [RunnerFailed] * told + [EngineFailed] * (9 - told)
        assert all("broken for good" in str(end) for end in ends)
        assert engine.state is EngineState.FAILED
        started = time.perf_counter()
        for wait in (True, False):
            with pytest.raises(EngineFailed, match="broken for good") as caught:
                await engine.generate([1], LONG, wait=wait)
            assert caught.value.status_hint == 503
            assert isinstance(caught.value.__cause__, RunnerFailed)
            assert isinstance(caught.value.__cause__.__cause__, ValueError)
        assert time.perf_counter() - started < 0.5
    assert engine.statistics().errors["runner"] == 4


async def test_b31_failures_that_do_not_follow_each_other_do_not_add_up(engine_of: EngineOf) -> None:
    def act(step: int, output: StepOutput) -> StepOutput:
        if step % 2:
            raise ValueError("every other time")
        return output

    async with engine_of(ScriptedRunner(act), max_running=1, runner_failures_max=2) as engine:
        ends = await asyncio.gather(*(engine.generate([1], params(2)) for _ in range(6)), return_exceptions=True)
        assert [type(end) for end in ends] == [RunnerFailed] * 6
        assert engine.state is EngineState.RUNNING


@both_depths
async def test_b31_a_step_that_hangs_is_reported(engine_of: EngineOf, depth: int) -> None:
    gate = Gate(first=1)
    async with engine_of(ScriptedRunner(gate), step_timeout=0.1, steps_in_flight_max=depth) as engine:
        async with engine.open([1], params(3)) as stream:
            await gate.entered()
            assert not engine.stalled
            await until(lambda: engine.stalled, seconds=2)
            assert engine.statistics().stalled
            await until(lambda: elsewhere(engine), seconds=2)
            gate.open()
            await read(stream)
            assert final_of(stream).reason is FinishReason.LENGTH
        assert not engine.stalled
        await until(lambda: not elsewhere(engine), seconds=2)


def elsewhere(engine: Engine) -> bool:
    """What a health check in another thread sees."""
    seen: list[bool] = []
    thread = threading.Thread(target=lambda: seen.append(engine.statistics().stalled))
    thread.start()
    thread.join(5)
    return seen[0]


async def test_b31_idle_first(engine_of: EngineOf) -> None:
    async with engine_of() as engine:
        await asyncio.sleep(0.3)
        assert not sum(engine.statistics().scheduler.steps.values()), "an idle engine does nothing"
        with anyio.fail_after(5):
            assert (await engine.generate([1], params(3))).token_ids


@both_depths
async def test_b31_a_step_of_pure_python_leaves_the_loop_alive(engine_of: EngineOf, depth: int) -> None:
    begun, over = threading.Event(), threading.Event()

    def act(step: int, output: StepOutput) -> StepOutput:
        if step == 3:
            begun.set()
            until_then = time.perf_counter() + 0.3
            while time.perf_counter() < until_then:
                pass
            over.set()
        return output

    async with engine_of(ScriptedRunner(act), steps_in_flight_max=depth) as engine, engine.open([1], LONG):
        await until(begun.is_set)
        turns = 0
        while not over.is_set():
            engine.statistics()
            await asyncio.sleep(0.001)
            turns += 1
    assert turns > 3, "each took less than 100 ms in the mean"


@both_depths
async def test_b31_tokens_go_out_while_the_next_step_runs(engine_of: EngineOf, depth: int) -> None:
    gate = Gate(first=2)
    async with engine_of(ScriptedRunner(gate), steps_in_flight_max=depth) as engine:
        async with engine.open([1], params(3)) as stream:
            got: list[int] = []
            with anyio.fail_after(5):
                while len(got) < 2:
                    got += (await anext(stream)).token_ids
            await gate.entered()
            gate.open()
            got += await read(stream)
        assert got == await alone([1], 3)


# ---- B33: shutdown hangs, or drops what it promised to finish ----


async def serve(engine: Engine, running: int, waiting: int, outputs: int) -> list[asyncio.Task[Result]]:
    tasks = [asyncio.create_task(engine.generate([i], params(outputs))) for i in range(running + waiting)]
    await until(lambda: engine.statistics().scheduler.output_tokens > running)
    now = engine.statistics().scheduler
    assert (now.decoding + now.prefilling, now.waiting) == (running, waiting)
    return tasks


@both_depths
async def test_b33_stop_by_draining(engine_of: EngineOf, depth: int) -> None:
    runner = ScriptedRunner(step_seconds=0.001)
    async with engine_of(runner, max_running=4, steps_in_flight_max=depth) as engine:
        tasks = await serve(engine, 4, 3, outputs=60)
        drained = asyncio.create_task(engine.drain(timeout=10))
        await until(lambda: engine.state is EngineState.DRAINING)
        for wait in (True, False):
            with pytest.raises(Draining):
                await engine.generate([1], params(1), wait=wait)
        results = await asyncio.gather(*tasks)
        await drained
    assert [(result.reason, len(result.token_ids)) for result in results] == [(FinishReason.LENGTH, 60)] * 7
    assert engine.state is EngineState.STOPPED


@both_depths
async def test_b33_draining_has_an_end(engine_of: EngineOf, depth: int) -> None:
    runner = ScriptedRunner(step_seconds=0.001)
    started = time.perf_counter()
    async with engine_of(runner, max_running=4, steps_in_flight_max=depth) as engine:
        tasks = await serve(engine, 4, 3, outputs=3000)
        started = time.perf_counter()
        await engine.drain(timeout=0.1)
    assert time.perf_counter() - started < 0.1 + 1
    assert [(await task).reason for task in tasks] == [FinishReason.SHUTDOWN] * 7


@both_depths
async def test_b33_stop_now(engine_of: EngineOf, depth: int) -> None:
    async with engine_of(ScriptedRunner(step_seconds=0.001), max_running=4, steps_in_flight_max=depth) as engine:
        tasks = await serve(engine, 4, 3, outputs=3000)
        started = time.perf_counter()
    assert time.perf_counter() - started < 0.5
    assert [(await task).reason for task in tasks] == [FinishReason.SHUTDOWN] * 7


async def test_b33_stop_twice_and_while_idle(engine_of: EngineOf) -> None:
    async with engine_of() as engine:
        started = time.perf_counter()
        await asyncio.gather(engine.drain(timeout=10), engine.drain(timeout=10))
        await engine.drain(timeout=10)
    await engine.drain(timeout=10)
    assert time.perf_counter() - started < 0.5
    assert engine.state is EngineState.STOPPED


def test_b33_a_loop_that_ends_without_a_stop() -> None:
    """asyncio.run cancels what is left: no error, no stream open, no thread stays, and nobody touched a signal."""
    kept: list[Any] = []

    async def main() -> None:
        handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
        engine, _ = engine_over(ScriptedRunner())
        await engine.__aenter__()
        opened = engine.open([1], LONG)
        kept.extend((engine, opened, await opened.__aenter__()))
        assert handlers == {number: signal.getsignal(number) for number in signal.valid_signals()}

    asyncio.run(main())
    give_up_at = time.monotonic() + 5
    while any(thread.name.startswith("kvloom-") for thread in threading.enumerate()):
        assert time.monotonic() < give_up_at, "a thread stays"
        time.sleep(0.01)
    kept.clear()
    gc.collect()


SCRIPT = """
import asyncio
from kvloom.scheduler import SamplingParams
from tests.scheduler.engines import Gate, ScriptedRunner, engine_over

async def main():
    engine, _ = engine_over(ScriptedRunner(GATE))
    await engine.__aenter__()
    task = asyncio.create_task(engine.generate([1], SamplingParams(max_new_tokens=2000)))
    await GATE.entered()

GATE = Gate(first=3)
asyncio.run(main())
print("done")
"""


def test_b33_a_process_that_forgets_to_stop_ends_all_the_same() -> None:
    """Even while a step hangs: no thread of ours, and no timer, keeps it alive."""
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "done"  # before it the engine may have said that its task was cancelled
    assert "Traceback" not in ended.stderr
