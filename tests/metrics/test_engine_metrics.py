"""What a scrape of a real engine says, while it serves and right after its last token."""

from collections.abc import Awaitable, Callable
from functools import partial

import anyio
import pytest

from kvloom.allocator import Batch, KVMemory
from kvloom.metrics import KVLoomCollector, instrument
from kvloom.scheduler import Engine, SamplingParams, SchedulerConfig
from kvloom.scheduler.errors import RunnerFailed, TooLong
from kvloom.scheduler.plan import Committed, Plan
from kvloom.scheduler.request import Finished
from kvloom.scheduler.runners import StepOutput, ToyRunner
from tests.metrics.made import Series, series, value

both_depths = pytest.mark.parametrize("depth", [1, 2])


class FailsOnce(ToyRunner):
    """Raises in its third step."""

    steps = 0

    def forward(self, batch: Batch) -> StepOutput:
        self.steps += 1
        if self.steps == 3:
            raise ValueError("not today")
        return super().forward(batch)


class Raises:
    """An observer that raises whatever it is told."""

    def on_step(self, plan: Plan, committed: Committed, seconds: float) -> None:
        raise RuntimeError("on_step")

    def on_finished(self, committed: Committed, now: float) -> None:
        raise RuntimeError("on_finished")


def engine_of(runner: ToyRunner | None = None, *, tokens: int = 4096, page_size: int = 16, depth: int = 1) -> Engine:
    runner = runner or ToyRunner()
    memory = KVMemory.for_runner(runner, capacity_tokens=tokens, page_size=page_size)
    return Engine(runner, memory, SchedulerConfig(max_running=8, steps_in_flight_max=depth))


async def ask(engine: Engine, prompt: int, output: int, *, leave_after: int | None = None) -> Finished | None:
    """One request, left after some deltas if wished; its end, if it was waited for."""
    async with engine.open([7] * prompt, SamplingParams(max_new_tokens=output)) as stream:
        deltas = 0
        async for _ in stream:
            deltas += 1
            if deltas == leave_after:
                break
    return stream.final


async def together(*asked: Callable[[], Awaitable[Finished | None]]) -> list[Finished]:
    ends: list[Finished] = []

    async def keep(one: Callable[[], Awaitable[Finished | None]]) -> None:
        if (end := await one()) is not None:
            ends.append(end)

    async with anyio.create_task_group() as tasks:
        for one in asked:
            tasks.start_soon(keep, one)
    return ends


def total(found: Series, name: str) -> float:
    """The sum over all labels."""
    return sum(count for (sample, _), count in found.items() if sample == f"kvloom_{name}")


def require_whole(found: Series) -> None:
    """What holds in every scrape."""
    received, rejected, finished, in_flight = (
        total(found, name)
        for name in ("requests_received_total", "requests_rejected_total", "requests_finished_total", "requests")
    )
    assert received == rejected + finished + in_flight
    assert total(found, "kv_pages") == total(found, "kv_capacity_pages")
    assert all(count >= 0 for count in found.values())


def require_idle(found: Series) -> None:
    """B41: no gauge keeps a busy value."""
    require_whole(found)
    for name in ("requests", "waiting_prompt_tokens", "oldest_waiting_timestamp_seconds", "kv_slack_tokens"):
        assert total(found, name) == 0
    assert value(found, "kvloom_kv_pages", pool="full", state="active") == 0
    assert value(found, "kvloom_kv_used_ratio", pool="full") == 0


async def scrape_elsewhere(collector: KVLoomCollector) -> Series:
    """As an exporter does: in a thread of its own."""
    return series(await anyio.to_thread.run_sync(collector.render))


@both_depths
async def test_24_requests_some_left_early(depth: int) -> None:
    """B41, B44: everyone is counted, with one reason, and nothing is left when the last token has come."""
    async with engine_of(depth=depth) as engine:
        collector = instrument(engine, model="m")
        with pytest.raises(TooLong):
            await ask(engine, 5000, 1)
        ends = await together(
            *(partial(ask, engine, 10 + n, 5 + n) for n in range(18)),
            *(partial(ask, engine, 20 + n, 500, leave_after=2) for n in range(6)),
        )
        found, elsewhere = series(collector.render()), await scrape_elsewhere(collector)
    for scrape in (found, elsewhere):
        require_idle(scrape)
        assert value(scrape, "kvloom_requests_received_total") == 25
        assert value(scrape, "kvloom_requests_rejected_total", reason="too_long") == 1
        assert value(scrape, "kvloom_requests_finished_total", reason="length") == 18
        assert value(scrape, "kvloom_requests_finished_total", reason="abort") == 6
        assert value(scrape, "kvloom_time_to_first_token_seconds_count") == 24
        assert value(scrape, "kvloom_output_tokens_total") >= sum(end.usage.output_tokens for end in ends)
        assert total(scrape, "request_duration_seconds_count") == 24
        assert value(scrape, "kvloom_request_queue_seconds_count", phase="first") == 24
        assert total(scrape, "steps_total") == total(scrape, "step_seconds_count")


@both_depths
async def test_every_scrape_while_it_serves_is_whole(depth: int) -> None:
    async with engine_of(ToyRunner(step_seconds=0.001), depth=depth) as engine:
        collector = instrument(engine, model="m")
        async with anyio.create_task_group() as tasks:
            for number in range(24):
                leave_after = number if number % 4 == 1 else None
                tasks.start_soon(partial(ask, engine, 30, 40, leave_after=leave_after))
            busy = 0.0
            for _ in range(20):
                await anyio.sleep(0.002)
                for found in (series(collector.render()), await scrape_elsewhere(collector)):
                    require_whole(found)
                    busy = max(busy, total(found, "requests"))
        require_idle(series(collector.render()))
    assert busy > 0


async def test_totals_after_preemptions() -> None:
    """B40: what was asked and answered is counted once, however often it was computed."""
    async with engine_of(tokens=64, page_size=1) as engine:
        collector = instrument(engine, model="m")
        ends = await together(*(partial(ask, engine, n, 5) for n in (10, 20, 30)))
        found = series(collector.render())
    require_idle(found)
    preemptions = sum(end.usage.preemptions for end in ends)
    assert preemptions > 0, "the pool is too large for this test"
    assert value(found, "kvloom_prompt_tokens_total", source="computed") == 60
    assert value(found, "kvloom_output_tokens_total") == 15
    assert value(found, "kvloom_preemptions_total", reason="kv") == preemptions
    assert value(found, "kvloom_request_preemptions_sum") == preemptions
    assert value(found, "kvloom_time_to_first_token_seconds_count") == 3
    assert value(found, "kvloom_inter_token_seconds_count") == 12


async def test_after_a_failed_step() -> None:
    async with engine_of(FailsOnce()) as engine:
        collector = instrument(engine, model="m")
        with pytest.raises(RunnerFailed):
            await engine.generate([7] * 10, SamplingParams(max_new_tokens=10))
        found = series(collector.render())
        require_idle(found)
        assert value(found, "kvloom_requests_finished_total", reason="error") == 1
        assert value(found, "kvloom_errors_total", where="runner") == 1
        await engine.generate([7] * 10, SamplingParams(max_new_tokens=10))
        require_idle(series(collector.render()))


async def test_a_request_refused_by_an_idle_engine_shows_at_once() -> None:
    """B44: also where the scrape is made in another thread, and no step follows."""
    async with engine_of() as engine:
        collector = instrument(engine, model="m")
        await ask(engine, 10, 2)
        with pytest.raises(TooLong):
            await ask(engine, 5000, 1)
        await anyio.sleep(0)
        found = await scrape_elsewhere(collector)
    assert value(found, "kvloom_requests_rejected_total", reason="too_long") == 1


@both_depths
async def test_an_observer_that_raises_disturbs_nobody(depth: int) -> None:
    """B40: neither serving nor the observers after it."""
    async with engine_of(depth=depth) as engine:
        quiet = await engine.generate([7] * 10, SamplingParams(max_new_tokens=20))
    async with engine_of(depth=depth) as engine:
        engine.add_observer(Raises())
        collector = instrument(engine, model="m")
        assert (await engine.generate([7] * 10, SamplingParams(max_new_tokens=20))).token_ids == quiet.token_ids
        assert (await engine.generate([7] * 10, SamplingParams(max_new_tokens=20))).token_ids == quiet.token_ids
        found = series(collector.render())
    require_idle(found)
    assert value(found, "kvloom_errors_total", where="hook") > 0
    assert value(found, "kvloom_request_duration_seconds_count", reason="length") == 2


async def test_the_state_of_the_engine() -> None:
    async with engine_of() as engine:
        collector = instrument(engine, model="m")
        assert value(series(collector.render()), "kvloom_engine_state", state="running") == 1
        assert value(series(collector.render()), "kvloom_last_step_timestamp_seconds") == 0
        await ask(engine, 10, 2)
        assert value(series(collector.render()), "kvloom_last_step_timestamp_seconds") > 1.7e9
    found = series(collector.render())
    assert value(found, "kvloom_engine_state", state="stopped") == 1
    assert total(found, "engine_state") == 1
