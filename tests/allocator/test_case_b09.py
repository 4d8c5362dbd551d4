"""B09: the half-filled last page at the end of a request is neither leaked nor counted twice.

Through the real engine: every prompt length with every output length, left alone or left in mid-decode, one or two
steps in flight, in a pool so small that requests wait for the pages of others, and some are preempted.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import numpy as np
import pytest

from kvloom.allocator import KeptPrefixCache, KVMemory, NullPrefixCache
from kvloom.allocator.prefix import RadixPrefixCache
from kvloom.scheduler import Engine, FinishReason, SamplingParams, SchedulerConfig
from kvloom.scheduler.runners import ToyRunner

PROMPTS, OUTPUTS = range(1, 41), range(1, 10)
SHARED = [7, 1, 8, 2] * 10
NOBODYS = np.full(64, 96, np.int32)  # tokens that begin like no prompt here


@asynccontextmanager
async def served(
    page_size: int, pages: int, depth: int, prefix_cache: KeptPrefixCache | None = None
) -> AsyncIterator[tuple[Engine, KVMemory]]:
    runner = ToyRunner(max_seq=64)
    memory = KVMemory.for_runner(
        runner, capacity_tokens=pages * page_size, page_size=page_size, max_rows=32, prefix_cache=prefix_cache
    )
    config = SchedulerConfig(max_running=24, prefill_chunk=16, max_batch_tokens=64, steps_in_flight_max=depth)
    async with Engine(runner, memory, config) as engine:
        yield engine, memory


async def ask(engine: Engine, prompt: list[int], output: int, leave_after: int | None = None) -> None:
    """One request to its end, or left after some deltas."""
    said = 0
    async with engine.open(prompt, SamplingParams(max_new_tokens=output)) as stream:
        async for delta in stream:
            said += len(delta.token_ids)
            if leave_after is not None and said >= leave_after:
                return
    assert stream.final is not None
    assert (stream.final.reason, said) == (FinishReason.LENGTH, output)


async def idle(engine: Engine) -> None:
    """Until the last step is over: what a request leaves behind may wait for it."""
    with anyio.fail_after(10):
        while engine.statistics().scheduler.steps_in_flight:
            await anyio.sleep(0.001)  # not 0: the launch thread needs the interpreter too


def balanced(memory: KVMemory) -> None:
    """Exactly everything is free, or the cache's and used by nobody: equality, not "at least"."""
    memory.check()
    report = memory.statistics()
    pool = report.pools["full"]
    assert (pool.free + pool.cached, pool.held, pool.quarantined) == (pool.capacity, 0, 0)
    assert pool.evictable == pool.cached
    assert memory.allocators["full"].available_size() == pool.free * pool.page_size
    assert sum(pool.freed.values()) == pool.allocated - pool.cached
    assert (report.rows_held, report.rows_quarantined) == (0, 0)
    if isinstance(memory.prefix_cache, NullPrefixCache):
        assert (pool.free, pool.cached) == (pool.capacity, 0)


def taken_whole(memory: KVMemory, slots: int) -> None:
    """Every slot can be had, and once."""
    taken = memory.allocators["full"].alloc(slots)
    assert taken is not None
    assert len(set(taken.tolist())) == slots


@pytest.mark.parametrize("make_cache", [NullPrefixCache, RadixPrefixCache])
@pytest.mark.parametrize(("page_size", "depth"), [(1, 2), (2, 1), (4, 2), (16, 1), (64, 2)])
async def test_b09_every_length(page_size: int, depth: int, make_cache: Callable[[], KeptPrefixCache]) -> None:
    """Idle after each prompt length; half of the requests share their prompt, half have one of their own."""
    pages = max(3, 100 // page_size)
    async with served(page_size, pages, depth, make_cache()) as (engine, memory):
        for length in PROMPTS:
            async with anyio.create_task_group() as tasks:
                for output in OUTPUTS:
                    own = [length, output] * 20
                    tasks.start_soon(ask, engine, SHARED[:length], output)
                    tasks.start_soon(ask, engine, own[:length], output, (output + 1) // 2)
            await idle(engine)
            balanced(memory)
        finished = engine.statistics().scheduler.finished
        assert finished["length"] + finished["abort"] == 2 * len(PROMPTS) * len(OUTPUTS)
        assert finished["abort"] > len(PROMPTS) * len(OUTPUTS) // 2
    entry = memory.admit(memory.match(NOBODYS), min(pages, -(-64 // page_size)) * page_size)
    assert entry is not None, "what is only cached makes room"
    memory.release([entry], [-1])
    cached = memory.statistics().pools["full"].cached
    taken_whole(memory, (pages - cached) * page_size)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("leave_after", [None, 1, 2])
async def test_b09_the_example(leave_after: int | None, depth: int) -> None:
    """Page 4, pool of 8 pages, prompt 6, 3 outputs: 32 available at idle."""
    async with served(4, 8, depth, NullPrefixCache()) as (engine, memory):
        await ask(engine, SHARED[:6], 3, leave_after)
        await idle(engine)
        assert memory.allocators["full"].available_size() == 32
        balanced(memory)


@pytest.mark.parametrize("depth", [1, 2])
async def test_b09_with_a_cache_only_whole_pages_stay(depth: int) -> None:
    """Of prompt 6 and 3 outputs, of which the last one is never fed back, 8 tokens have KV: two pages of 4.

    Of prompt 6 and 2 outputs 7 have: one page, and the half-filled one is free.
    """
    for outputs, whole in ((3, 2), (2, 1)):
        async with served(4, 8, depth) as (engine, memory):
            await ask(engine, SHARED[:6], outputs)
            await idle(engine)
            balanced(memory)
            pool = memory.statistics().pools["full"]
            assert (pool.cached, pool.free, pool.freed) == (
                whole,
                8 - whole,
                {"finish": 2 - whole} if whole < 2 else {},
            )
            await ask(engine, SHARED[:6], outputs)  # the same again, on top of what is there
            await idle(engine)
            balanced(memory)
            assert memory.statistics().pools["full"].cached == whole
