"""B09: the half-filled last page at the end of a request is neither leaked nor counted twice.

Through the real engine: every prompt length with every output length, left alone or left in mid-decode, one or two
steps in flight, in a pool so small that requests wait for the pages of others, and some are preempted.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from kvloom.allocator import KVMemory
from kvloom.scheduler import Engine, FinishReason, SamplingParams, SchedulerConfig
from kvloom.scheduler.runners import ToyRunner

PROMPTS, OUTPUTS = range(1, 41), range(1, 10)
SHARED = [7, 1, 8, 2] * 10


@asynccontextmanager
async def served(page_size: int, pages: int, depth: int) -> AsyncIterator[tuple[Engine, KVMemory]]:
    runner = ToyRunner(max_seq=64)
    memory = KVMemory.for_runner(runner, capacity_tokens=pages * page_size, page_size=page_size, max_rows=32)
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
    """Exactly everything is free: equality, not "at least"."""
    memory.check()
    report = memory.statistics()
    pool = report.pools["full"]
    assert (pool.free, pool.held, pool.cached, pool.quarantined) == (pool.capacity, 0, 0, 0)
    assert memory.allocator.available_size() == memory.capacity_tokens
    assert sum(pool.freed.values()) == pool.allocated
    assert (report.rows_held, report.rows_quarantined) == (0, 0)


@pytest.mark.parametrize(("page_size", "depth"), [(1, 2), (2, 1), (4, 2), (16, 1), (64, 2)])
async def test_b09_every_length(page_size: int, depth: int) -> None:
    """Idle after each prompt length; half of the requests share their prompt, half have one of their own."""
    async with served(page_size, max(3, 100 // page_size), depth) as (engine, memory):
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
    taken = memory.allocator.alloc(memory.capacity_tokens)
    assert taken is not None
    assert len(set(taken.tolist())) == memory.capacity_tokens


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("leave_after", [None, 1, 2])
async def test_b09_the_example(leave_after: int | None, depth: int) -> None:
    """Page 4, pool of 8 pages, prompt 6, 3 outputs: 32 available at idle."""
    async with served(4, 8, depth) as (engine, memory):
        await ask(engine, SHARED[:6], 3, leave_after)
        await idle(engine)
        assert memory.allocator.available_size() == 32
        balanced(memory)
