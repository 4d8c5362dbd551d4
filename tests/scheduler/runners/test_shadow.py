"""The shadow-KV runner must itself be worth its salt: each kind of wrong memory shows."""

import asyncio

import numpy as np
import pytest
import torch

from kvloom.allocator import KVMemory, MHATokenToKVPool
from kvloom.scheduler import Engine, EngineFailed, Request, SamplingParams, SchedulerConfig, SchedulerCore, StepResult
from kvloom.scheduler.config import ModelLimits
from kvloom.scheduler.runners.shadow import ShadowRunner, ShadowViolation, continuation
from tests.scheduler.runners.by_hand import Pages, Row


class Bench:
    """Two requests, driven step by step."""

    def __init__(self) -> None:
        self.runner = ShadowRunner()
        self.memory = KVMemory.for_runner(self.runner, capacity_tokens=64, page_size=4, max_rows=4)
        self.runner.attach(self.memory.pools)
        self.core = SchedulerCore(self.memory, SchedulerConfig(max_running=4), ModelLimits(97, 4096))
        for name, prompt in (("a", range(1, 7)), ("b", range(11, 20))):
            request = Request(id=name, prompt=np.array(prompt, np.int32), params=SamplingParams(max_new_tokens=9))
            self.core.add(request, 0.0)
        self.step()

    def step(self) -> list[int]:
        plan = self.core.plan(0.0)
        assert plan is not None
        tokens = self.runner.forward(self.memory.bind(plan)).next_tokens
        assert tokens is not None
        return list(self.core.commit(plan.step, StepResult(tokens.numpy()), 0.0).tokens)


def test_right_memory_passes_and_says_the_continuation() -> None:
    bench = Bench()
    assert [bench.step()[1] for _ in range(5)] == continuation(range(11, 20), 6)[1:]


def test_a_page_of_another_request_is_seen() -> None:
    bench = Bench()
    bench.memory.tables["full"].pages[0, 0] = bench.memory.tables["full"].pages[1, 0]
    with pytest.raises(ShadowViolation, match=r"'a': slot .* of position 0 in 'full' holds"):
        bench.step()


def test_a_slot_overwritten_by_somebody_is_seen() -> None:
    bench = Bench()
    bench.runner._shadows["full"][bench.memory.tables["full"].pages[1, 1] * 4 + 2] += 1
    with pytest.raises(ShadowViolation, match=r"'b': slot .* of position 6 in 'full' holds"):
        bench.step()


def test_the_dump_page_is_seen() -> None:
    bench = Bench()
    bench.memory.tables["full"].pages[1, 0] = 0
    with pytest.raises(ShadowViolation, match="dump page"):
        bench.step()


@pytest.mark.parametrize("told", [True, False])
def test_a_request_that_comes_back_on_more_than_it_had_computed(told: bool) -> None:
    """It was preempted in its prompt, and another one has computed the rest of that meanwhile."""
    prompt = list(range(30, 47))
    runner, pages = ShadowRunner(), Pages(20, page_size=4)
    runner.attach({"full": MHATokenToKVPool(80, 4, torch.int64, 1, 1, 1, "cpu", layers=(0,))})
    if told:
        runner.tell("0", prompt)
    other = Row(1)
    runner.forward(pages.batch([(Row(0), prompt[:4]), (other, prompt)], 0, [1]))
    back = Row(0, length=16, pages=other.pages[:4])
    said = runner.forward(pages.batch([(back, prompt[16:])], 0, [0])).next_tokens
    assert said is not None
    assert said.tolist() == continuation(prompt, 1)


async def test_a_violation_fails_the_engine_and_everybody_is_told() -> None:
    runner = ShadowRunner()
    memory = KVMemory.for_runner(runner, capacity_tokens=256, page_size=4)
    async with Engine(runner, memory) as engine, engine.open([1, 2, 3], SamplingParams(max_new_tokens=100)) as stream:
        await anext(stream)
        runner._shadows["full"][:] = 1
        while stream.final is None:
            await asyncio.sleep(0.01)
        with pytest.raises(EngineFailed, match="ShadowViolation"):
            await engine.generate([4])
        assert isinstance(stream.final.error, EngineFailed)
