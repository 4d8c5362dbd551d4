"""B31 and B33: what clients, balancers and operators see when the runner fails or the server stops."""

import asyncio
import threading
import time

import httpx
import pytest
import uvicorn

from kvloom.allocator import Batch
from kvloom.scheduler import SchedulerConfig
from kvloom.scheduler.runners import StepOutput
from tests.examples.openai_server.made import ScriptedRunner, Served, events, eventually, served


class MoodyRunner(ScriptedRunner):
    """Does in each step what `mood` says."""

    mood = "well"
    wakes = threading.Event()

    def forward(self, batch: Batch) -> StepOutput:
        match self.mood:
            case "raise once":
                self.mood = "well"
                raise RuntimeError("once")
            case "raise":
                raise RuntimeError("always")
            case "hang":
                self.wakes.wait()
            case "compute":  # in Python, so that it competes for the interpreter lock
                end = time.perf_counter() + 0.3
                while time.perf_counter() < end:
                    pass
        return super().forward(batch)


async def health(it: Served) -> int:
    return (await it.http.get("/health")).status_code


async def ready(it: Served) -> int:
    return (await it.http.get("/ready")).status_code


async def test_b31_one_failed_step_is_an_error_for_its_requests_only() -> None:
    runner = MoodyRunner(step_seconds=0.02)
    async with served(runner, config=SchedulerConfig(max_running=2)) as it:
        both = [asyncio.create_task(it.post(stream=stream, ignore_eos=True)) for stream in (True, False)]
        await eventually(lambda: it.engine.statistics().scheduler.decoding == 2)
        third = asyncio.create_task(it.post(max_tokens=5))
        await eventually(lambda: it.engine.statistics().scheduler.waiting == 1)
        runner.mood = "raise once"
        streamed, whole = await asyncio.wait_for(asyncio.gather(*both), 1)
        assert events(streamed.text)[-1]["error"]["code"] == "runner_failed"
        assert whole.status_code == 500
        assert (await third).json()["usage"]["completion_tokens"] == 5
        assert (await health(it), await ready(it)) == (200, 200)


async def test_b31_runner_that_always_fails_turns_health_red() -> None:
    runner = MoodyRunner()
    async with served(runner, config=SchedulerConfig(runner_failures_max=3)) as it:
        runner.mood = "raise"
        answers = [await it.post() for _ in range(3)]
        assert [answer.status_code for answer in answers] in ([500, 500, 500], [500, 500, 503])
        await eventually(lambda: it.engine.failure is not None)
        assert (await health(it), await ready(it)) == (503, 503)
        refused = await it.post(stream=True)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_failed")
        assert (await it.http.get("/metrics")).status_code == 200


async def test_b31_runner_that_hangs_turns_health_red_until_it_comes_back() -> None:
    runner = MoodyRunner()
    async with served(runner, config=SchedulerConfig(step_timeout=0.2)) as it:
        runner.wakes.clear()
        runner.mood = "hang"
        try:
            task = asyncio.create_task(it.post(max_tokens=2))
            await eventually(lambda: it.engine.stalled)
            assert (await health(it), await ready(it)) == (503, 503)
        finally:
            runner.mood = "well"
            runner.wakes.set()
        assert (await task).status_code == 200
        assert (await health(it), await ready(it)) == (200, 200)


async def test_b31_health_and_metrics_answer_while_a_step_computes() -> None:
    """300 ms in Python, in the launch thread: the event loop gets its turns."""
    runner = MoodyRunner()
    async with served(runner) as it:
        await health(it)  # a connection to go on with
        runner.mood = "compute"
        task = asyncio.create_task(it.post(max_tokens=3))
        await eventually(lambda: it.live == 1)
        seconds: list[float] = []
        while not task.done() and len(seconds) < 12:
            for path in ("/health", "/metrics"):
                before = time.perf_counter()
                assert (await it.http.get(path)).status_code == 200
                seconds.append(time.perf_counter() - before)
        assert len(seconds) >= 6
        assert sorted(seconds)[len(seconds) // 2] < 0.1
        assert (await task).status_code == 200


async def test_b31_idle_start_works() -> None:
    async with served() as it:
        await asyncio.sleep(0.5)
        assert (await it.post(max_tokens=2)).status_code == 200


async def test_b33_stopping_lets_running_and_waiting_requests_finish() -> None:
    runner = ScriptedRunner(step_seconds=0.01)
    async with served(runner, config=SchedulerConfig(max_running=4), drain_seconds=10) as it:
        tasks = [asyncio.create_task(it.post(max_tokens=30, stream=place % 2 == 0)) for place in range(7)]
        await eventually(lambda: it.live == 7)
        await eventually(lambda: it.engine.statistics().scheduler.decoding == 4)
        it.server.should_exit = True
        await eventually(lambda: it.engine.state == "draining")
        for place, answer in enumerate(await asyncio.gather(*tasks)):
            assert answer.status_code == 200
            if place % 2 == 0:
                assert events(answer.text)[-1]["choices"][0]["finish_reason"] == "length"
                assert answer.text.endswith("data: [DONE]\n\n")
        with pytest.raises(httpx.ConnectError):
            await it.http.get("/health")
    assert it.engine.statistics().scheduler.finished == {"length": 7}


async def test_b33_what_is_not_done_in_time_ends_with_an_error() -> None:
    async with served(ScriptedRunner(step_seconds=0.01), drain_seconds=0.2) as it:
        tasks = [asyncio.create_task(it.post(ignore_eos=True, stream=stream)) for stream in (True, False)]
        await eventually(lambda: it.engine.statistics().scheduler.decoding == 2)
        before = time.monotonic()
        it.server.should_exit = True
        streamed, whole = await asyncio.gather(*tasks)
        assert events(streamed.text)[-1]["error"]["code"] == "shutdown"
        assert "[DONE]" not in streamed.text
        assert (whole.status_code, whole.json()["error"]["code"]) == (503, "shutdown")
        await eventually(lambda: it.engine.state == "stopped")
        assert time.monotonic() - before < 1.2


async def test_b33_new_requests_are_refused_during_the_drain() -> None:
    async with served(ScriptedRunner(step_seconds=0.01)) as it:
        task = asyncio.create_task(it.post(max_tokens=30))
        await eventually(lambda: it.live == 1)
        drain = asyncio.create_task(it.engine.drain(5))
        await eventually(lambda: it.engine.state == "draining")
        assert (await health(it), await ready(it)) == (200, 503)
        refused = await it.post(stream=True)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert "retry-after" in refused.headers
        assert (await task).status_code == 200
        await drain
        await it.engine.drain(5)  # again: nothing happens


async def test_b33_stopping_an_idle_server_is_immediate() -> None:
    async with served() as it:
        before = time.monotonic()
    assert time.monotonic() - before < 1
    assert it.engine.state == "stopped"


async def test_b33_lifespan_alone_drains_under_any_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvicorn as it is: it waits for the answers, then the lifespan ends the engine."""
    async with served(ScriptedRunner(step_seconds=0.01)) as it:
        monkeypatch.setattr(type(it.server), "shutdown", uvicorn.Server.shutdown)
        task = asyncio.create_task(it.post(max_tokens=30, stream=True))
        await eventually(lambda: it.engine.statistics().scheduler.decoding == 1)
        it.server.should_exit = True
        assert (await task).text.endswith("data: [DONE]\n\n")
    assert it.engine.state == "stopped"
    assert it.held_pages == 0
