"""Random callers of the real engine, threads and all, over the shadow-KV runner."""

import asyncio
import random
from dataclasses import replace

import pytest

from kvloom.allocator import KVMemory, PoolSpec
from kvloom.scheduler import Engine, FinishReason, SamplingParams, SchedulerConfig
from kvloom.scheduler.runners.shadow import SHADOW_POOL, ShadowRunner, continuation
from tests.scheduler.driven import require_nothing_held

SHARED = tuple(i * 31 % 97 for i in range(40))  # what some prompts begin with


async def caller(engine: Engine, draw: random.Random) -> str:
    """One caller: reads all, leaves early, is cancelled, or wants the whole answer."""
    await asyncio.sleep(draw.random() * 0.05)
    prompt = [*SHARED[: draw.choice([0, 0, 7, 20, 40])], *(draw.randrange(97) for _ in range(draw.randint(1, 50)))]
    count = draw.randint(1, 30)
    params = SamplingParams(max_new_tokens=count)
    habit = draw.choice(["generate", "read", "leave", "cancel"])
    if habit == "generate":
        result = await engine.generate(prompt, params)
        assert result.token_ids == continuation(prompt, len(result.token_ids))
        return str(result.reason)
    heard: list[int] = []
    async with engine.open(prompt, params) as stream:
        try:
            async with asyncio.timeout(0.01 if habit == "cancel" else None):
                async for delta in stream:
                    heard += delta.token_ids
                    if habit == "leave" and len(heard) > count // 2:
                        break
        except TimeoutError:
            pass
    assert heard == continuation(prompt, len(heard))
    assert stream.final is not None
    assert stream.final.reason is not FinishReason.ERROR, stream.final.error
    return str(stream.final.reason)


FULL, SWA = SHADOW_POOL, replace(SHADOW_POOL, name="swa", window=11)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("pools", [(FULL,), (FULL, SWA), (SWA,)], ids=["full", "both", "swa"])
@pytest.mark.parametrize("seed", range(3))
async def test_random_callers_get_what_a_run_alone_says(seed: int, pools: tuple[PoolSpec, ...], depth: int) -> None:
    draw = random.Random(seed)
    runner = ShadowRunner(max_seq=128, pools=pools)
    memory = KVMemory.for_runner(
        runner, capacity_tokens=draw.choice([96, 400]), page_size=draw.choice([1, 4, 16]), lengths=[40]
    )
    config = SchedulerConfig(
        max_running=6, max_batch_tokens=32, prefill_chunk=draw.randint(3, 32), max_waiting=5, steps_in_flight_max=depth
    )
    async with Engine(runner, memory, config) as engine:
        reasons = await asyncio.gather(*(caller(engine, random.Random(seed * 1000 + i)) for i in range(60)))
        await engine.drain(timeout=5)
        now = engine.statistics()
    assert {"length", "abort"} <= set(reasons)
    assert now.scheduler.received == sum(now.scheduler.finished.values()) + sum(now.scheduler.rejected.values()) == 60
    assert now.scheduler.prompt_tokens_cached > 0
    require_nothing_held(memory)
