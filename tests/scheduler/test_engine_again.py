"""Memory and runners that an engine has used before, or that were made for another."""

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import anyio
import pytest

from kvloom.allocator import InvalidArgument, KVMemory, PoolSpec
from kvloom.scheduler import Engine, EngineState, NeverFits, QueueFull, SamplingParams, SchedulerConfig, TooLong
from kvloom.scheduler.errors import BrokenInvariant, EngineFailed, InvalidRequest, Misuse
from kvloom.scheduler.runners import ShadowRunner, StepOutput, ToyRunner
from kvloom.scheduler.runners.shadow import SHADOW_POOL, continuation
from tests.scheduler.driven import require_nothing_held
from tests.scheduler.engines import Gate, ScriptedRunner, read, until

EngineOf = Callable[..., Engine]
WINDOWED = replace(SHADOW_POOL, name="swa", window=4)
both_depths = pytest.mark.parametrize("depth", [1, 2])


async def ask(engine: Engine, prompt: list[int], count: int) -> None:
    """Most end with a stop, which the step in flight does not know of."""
    stops = tuple(range(20))
    result = await engine.generate(prompt, SamplingParams(max_new_tokens=count, stop_token_ids=stops))
    whole = continuation(prompt, count)
    assert result.token_ids == whole[: next((n + 1 for n, token in enumerate(whole) if token in stops), count)]


@both_depths
async def test_engines_one_after_the_other_over_one_memory(depth: int) -> None:
    """Steps are numbered on: a new engine's step 1 must not pass for one that was settled long ago."""
    memory = KVMemory.for_runner(ShadowRunner(), capacity_tokens=24 * 4, page_size=4, max_rows=8)
    config = SchedulerConfig(max_running=6, max_batch_tokens=24, prefill_chunk=7, steps_in_flight_max=depth)
    for life in range(3):
        async with Engine(ShadowRunner(), memory, config) as engine, anyio.create_task_group() as tasks:
            for number in range(40):
                tasks.start_soon(ask, engine, [number, life, 3, 4, 5, 6, 7][: 2 + number % 6], 12)
        assert engine.statistics().scheduler.finished["stop"] > 20
        require_nothing_held(memory)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ({"pools": (PoolSpec(kv_heads=2, head_dim=4, layers=(0,)),)}, "pools"),
        ({"needs": frozenset()}, "page_table"),
        ({"device": "meta"}, "meta"),
    ],
)
def test_memory_made_for_another_runner(made: dict[str, Any], words: str) -> None:
    memory = KVMemory(
        **{"pools": (SHADOW_POOL,), "capacity_tokens": 64, "needs": frozenset({"page_table"}), **made}
    )  # fmt: skip
    with pytest.raises(InvalidArgument, match=words):
        Engine(ShadowRunner(), memory)


def test_a_window_is_not_quietly_taken_for_none() -> None:
    """Nor a pool with a window for one without, nor one for several."""
    with pytest.raises(InvalidArgument, match="the runner wants the pools"):
        Engine(ShadowRunner(), KVMemory((WINDOWED,), capacity_tokens=64, needs=frozenset({"page_table"})))
    with pytest.raises(InvalidArgument, match="the runner wants the pools"):
        Engine(
            ShadowRunner(pools=(SHADOW_POOL, WINDOWED)),
            KVMemory((SHADOW_POOL,), capacity_tokens=64, needs=frozenset({"page_table"})),
        )


async def test_a_window_is_served() -> None:
    """Requests far longer than what the window's pool holds, which they give back as they go on."""
    runner = ShadowRunner(pools=(WINDOWED,), max_seq=200)
    memory = KVMemory.for_runner(runner, capacity_tokens=5 * 4, page_size=4, max_rows=4)
    async with Engine(runner, memory, SchedulerConfig(max_running=4, steps_in_flight_max=2)) as engine:
        with anyio.fail_after(10):
            for prompt in ([1, 2, 3], [4] * 60):
                result = await engine.generate(prompt, SamplingParams(max_new_tokens=100))
                assert result.token_ids == continuation(prompt, 100)
    require_nothing_held(memory)
    assert memory.statistics().pools["swa"].allocated >= (102 + 159) // 4


@pytest.mark.parametrize("sizes", [{"capacity_tokens": 64.0}, {"capacity_tokens": 64, "page_size": 2.5}])
def test_sizes_that_are_no_whole_numbers(sizes: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="whole number"):
        KVMemory(**sizes)


async def test_rows_shorter_than_the_models_context() -> None:
    runner = ToyRunner()
    memory = KVMemory(runner.spec.pools, capacity_tokens=1024, max_seq=64)
    async with Engine(runner, memory) as engine:
        with pytest.raises(NeverFits, match="up to 64"):
            await engine.generate([1] * 65, SamplingParams(max_new_tokens=1))
        assert len((await engine.generate([1] * 60)).token_ids) == 5
    require_nothing_held(memory)


async def test_what_can_never_run_is_told_so_before_it_waits_for_a_place(engine_of: EngineOf) -> None:
    gate = Gate()
    short = engine_of(ScriptedRunner(gate, max_seq=64), max_running=1, max_waiting=1)
    async with short as engine, anyio.create_task_group() as tasks:
        for _ in range(2):
            tasks.start_soon(engine.generate, [1], SamplingParams(max_new_tokens=1))
        await gate.entered()
        await until(lambda: engine.statistics().scheduler.waiting == 1)
        with pytest.raises(QueueFull):
            await engine.generate([1], wait=False)
        with anyio.fail_after(1), pytest.raises(TooLong):
            await engine.generate([1] * 100)
        gate.open()


async def test_a_broken_invariant_on_the_launch_thread_stops_the_engine(engine_of: EngineOf) -> None:
    def act(step: int, output: StepOutput) -> StepOutput:
        raise BrokenInvariant("two and two are five")

    async with engine_of(ScriptedRunner(act)) as engine:
        with pytest.raises(EngineFailed, match="two and two"):
            await engine.generate([1])
        assert engine.failure is not None


async def test_a_step_given_up_is_no_failure_and_is_observed() -> None:
    class Counting:
        steps = 0

        def on_step(self, plan: object, committed: object, seconds: float) -> None:
            self.steps += 1

        def on_finished(self, committed: object, now: float) -> None:
            pass

    gate, counting = Gate(first=1), Counting()
    runner = ScriptedRunner(gate)
    engine = Engine(
        runner, KVMemory.for_runner(runner, capacity_tokens=256, max_rows=4), SchedulerConfig(max_running=4)
    )
    engine.add_observer(counting)
    async with engine, engine.open([1]) as stream:
        await anext(stream)
        await gate.entered()
    gate.open()
    counts = engine.statistics().scheduler
    assert (sum(counts.steps.values()), counts.failed_steps, counting.steps) == (2, 0, 2)
    assert await read(stream) == []


async def test_engines_are_left_in_any_order_and_from_any_task(engine_of: EngineOf) -> None:
    """One model takes over from another while its requests go on."""
    old, new = engine_of(), engine_of()
    await old.__aenter__()
    await asyncio.create_task(new.__aenter__())
    await old.__aexit__(None, None, None)
    assert len((await new.generate([1], SamplingParams(max_new_tokens=3))).token_ids) == 3
    await asyncio.create_task(new.__aexit__(None, None, None))
    with pytest.raises(Misuse, match="not entered"):
        await engine_of().__aexit__(None, None, None)


async def test_a_memory_belongs_to_one_engine_at_a_time() -> None:
    memory = KVMemory.for_runner(ToyRunner(), capacity_tokens=256, max_rows=4)
    first, second = (Engine(ToyRunner(), memory, SchedulerConfig(max_running=4)) for _ in range(2))
    async with first:
        with pytest.raises(InvalidArgument, match="another engine"):
            await second.__aenter__()
        await first.generate([1], SamplingParams(max_new_tokens=3))
    async with second:
        assert len((await second.generate([1], SamplingParams(max_new_tokens=3))).token_ids) == 3


async def test_only_one_of_two_enters(engine_of: EngineOf) -> None:
    engine = engine_of()
    both = await asyncio.gather(*(engine.__aenter__() for _ in range(2)), return_exceptions=True)
    assert [type(one) for one in both] == [Engine, Misuse]
    await engine.__aexit__(None, None, None)


async def test_an_awaited_step_that_hangs_is_cancelled(engine_of: EngineOf) -> None:
    class Remote(ToyRunner):
        cancelled = False

        async def forward(self, batch: object) -> StepOutput:  # type: ignore[override]
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled = True
                raise
            raise AssertionError

    runner, before = Remote(), asyncio.all_tasks()
    async with engine_of(runner) as engine, engine.open([1]):
        await until(lambda: engine.statistics().scheduler.steps_in_flight == 1)
    await until(lambda: runner.cancelled and asyncio.all_tasks() == before)


@pytest.mark.parametrize("timeout", ["x", float("nan"), -1.0])
async def test_a_drain_that_is_refused_changes_nothing(engine_of: EngineOf, timeout: Any) -> None:
    async with engine_of() as engine:
        with pytest.raises(Misuse, match="timeout"):
            await engine.drain(timeout)
        assert (await engine.generate([1], SamplingParams(max_new_tokens=1))).token_ids


@pytest.mark.parametrize("request_id", [[1], {}, None, b"x"])
async def test_an_abort_of_what_is_no_id(engine_of: EngineOf, request_id: Any) -> None:
    async with engine_of() as engine:
        with pytest.raises(InvalidRequest, match="request_id"):
            engine.abort(request_id)
        assert (await engine.generate([1], SamplingParams(max_new_tokens=1))).token_ids


@both_depths
async def test_a_memory_is_not_free_before_the_last_step_of_its_engine_is_over(depth: int) -> None:
    """A step that hangs may still write KV: nobody else may have the pages."""
    gate = Gate()
    runner = ScriptedRunner(gate)
    memory = KVMemory.for_runner(runner, capacity_tokens=256, max_rows=4)
    config = SchedulerConfig(max_running=4, steps_in_flight_max=depth)
    first = Engine(runner, memory, config)
    async with first, first.open([1]):
        await gate.entered()
    with pytest.raises(InvalidArgument, match="step still out"):
        await Engine(ToyRunner(), memory, config).__aenter__()
    gate.open()
    await until(lambda: runner.closed)
    async with Engine(ToyRunner(), memory, config) as second:
        assert (await second.generate([1], SamplingParams(max_new_tokens=1))).token_ids
        await first.__aexit__(None, None, None)  # once more: it has nothing to give back
        with pytest.raises(InvalidArgument, match="another engine"):
            await Engine(ToyRunner(), memory, config).__aenter__()


async def test_a_drain_ends_with_the_engine(engine_of: EngineOf) -> None:
    gate = Gate()
    engine = engine_of(ScriptedRunner(gate))
    async with engine, engine.open([1]):
        await gate.entered()
        drain = asyncio.create_task(engine.drain())
        await asyncio.sleep(0.01)
    with anyio.fail_after(2):
        await drain
    gate.open()
    with pytest.raises(Misuse, match="not entered"):
        await engine_of().drain()


async def test_the_loop_is_cancelled_while_nothing_happens(engine_of: EngineOf) -> None:
    engine = engine_of()
    async with engine:
        await asyncio.sleep(0.01)
        (task,) = (task for task in asyncio.all_tasks() if task.get_name() == "kvloom run")
        task.cancel()
        await until(lambda: engine.failure)
        with pytest.raises(EngineFailed):
            await engine.generate([1])


async def test_leaving_does_not_wait_for_the_hosts_threads(engine_of: EngineOf) -> None:
    freed = threading.Event()

    def work() -> None:
        assert freed.wait(20)

    async with anyio.create_task_group() as tasks:
        with anyio.fail_after(5):
            async with engine_of():
                for _ in range(40):  # as many as there are for all
                    tasks.start_soon(anyio.to_thread.run_sync, work)
                await anyio.sleep(0.05)
        freed.set()


class Sticky(ToyRunner):
    """Cannot be closed."""

    def close(self) -> None:
        raise RuntimeError("stuck")


async def test_a_runner_that_cannot_be_closed_hides_nothing(engine_of: EngineOf) -> None:
    with pytest.raises(RuntimeError, match="stuck"):
        async with engine_of(Sticky()):
            pass
    with pytest.raises(ZeroDivisionError):
        async with engine_of(Sticky()):
            raise ZeroDivisionError
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05), engine_of(Sticky()):
            await asyncio.sleep(5)

    class Cold(Sticky):
        def warmup(self, max_rows: int, max_tokens: int) -> None:
            raise ValueError("too cold")

    with pytest.raises(ValueError, match="too cold") as caught:
        await engine_of(Cold()).__aenter__()
    assert "stuck" in caught.value.__notes__[0]


async def test_a_coroutine_made_after_leaving_is_cancelled(engine_of: EngineOf) -> None:
    class Late(ToyRunner):
        def forward(self, batch: object) -> Any:
            time.sleep(1.3)
            return asyncio.Event().wait()

        closed = False

        def close(self) -> None:
            self.closed = True

    runner, before = Late(), asyncio.all_tasks()
    async with engine_of(runner) as engine, engine.open([1]):
        await until(lambda: engine.statistics().scheduler.steps_in_flight == 1)
    await until(lambda: runner.closed and asyncio.all_tasks() == before)


@pytest.mark.parametrize("deadline", [10**400, float("inf")])
async def test_a_deadline_that_never_comes(engine_of: EngineOf, deadline: float) -> None:
    async with engine_of() as engine:
        assert (await engine.generate([1], SamplingParams(max_new_tokens=1), deadline=deadline)).token_ids
    with pytest.raises(InvalidRequest, match="temperature"):
        SamplingParams(temperature=10**400)


async def test_a_runner_at_work_is_not_closed_by_an_engine_that_cannot_have_it() -> None:
    class Taken(ScriptedRunner):
        attached = 0

        def attach(self, pools: Any) -> None:
            if self.attached:
                raise RuntimeError("at work for another")
            self.attached += 1
            super().attach(pools)

    runner = Taken()
    config = SchedulerConfig(max_running=4)
    first, second = (
        Engine(runner, KVMemory.for_runner(runner, capacity_tokens=256, max_rows=4), config) for _ in range(2)
    )
    async with first:
        with pytest.raises(RuntimeError, match="at work for another"):
            await second.__aenter__()
        assert (second.state, runner.closed) == (EngineState.STOPPED, 0)
        assert (await first.generate([1], SamplingParams(max_new_tokens=3))).token_ids
    assert runner.closed == 1
