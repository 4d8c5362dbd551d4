"""Conversations of six turns: each finds all that the turn before has left behind, and says what `generate` says.

Also where there is room for one conversation only, and the others wait on the host.
"""

import anyio
import numpy as np
import pytest

from kvloom.allocator import KVMemory
from kvloom.scheduler import Engine, Result, SamplingParams, SchedulerConfig
from kvloom.scheduler.runners import TransformersRunner
from tests.models.tiny import MODELS, generated

TURNS = 6
ANSWER = 7  # tokens
QUESTIONS = (21, 5, 17, 1, 30, 9)  # tokens of each turn's


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("name", MODELS)
async def test_each_turn_hits_the_pages_of_the_last(name: str, page_size: int, depth: int) -> None:
    model = MODELS[name]()
    runner = TransformersRunner(model)
    roomy = {spec.name: 1024 for spec in runner.spec.pools}
    memory = KVMemory.for_runner(runner, capacity_tokens=roomy, page_size=page_size)
    config = SchedulerConfig(max_running=4, max_batch_tokens=64, prefill_chunk=16, steps_in_flight_max=depth)
    rng = np.random.default_rng(3)
    talks: list[list[int]] = [[], [], []]
    spoken: list[tuple[list[int], Result]] = []

    async def turn(talk: list[int]) -> None:
        before = len(talk) - 1  # of the last token said there is no KV
        talk += rng.integers(0, model.config.vocab_size, QUESTIONS[len(spoken) // len(talks)]).tolist()
        prompt = list(talk)
        result = await engine.generate(prompt, SamplingParams(max_new_tokens=ANSWER))
        talk += result.token_ids
        spoken.append((prompt, result))
        assert result.usage.cached_tokens == max(before, 0) // page_size * page_size

    async with Engine(runner, memory, config) as engine:
        for _ in range(TURNS):
            async with anyio.create_task_group() as tasks:
                for talk in talks:
                    tasks.start_soon(turn, talk)
    assert len(spoken) == TURNS * len(talks)
    for prompt, result in spoken:  # now that the model is its owner's again
        assert result.token_ids == generated(model, prompt, ANSWER)
    hits = memory.statistics().prefix.hit_tokens
    assert hits == sum(result.usage.cached_tokens for _, result in spoken) > 0
    memory.check()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("page_size", [1, 4, 16])
async def test_a_turn_finds_on_the_host_what_others_have_pushed_out(page_size: int, depth: int) -> None:
    model = MODELS["llama"]()
    runner = TransformersRunner(model)
    memory = KVMemory.for_runner(runner, capacity_tokens=144, page_size=page_size, host_prefix_bytes=2**20)
    config = SchedulerConfig(max_running=1, max_batch_tokens=64, prefill_chunk=16, steps_in_flight_max=depth)
    rng = np.random.default_rng(3)
    system = rng.integers(0, model.config.vocab_size, 20).tolist()
    talks: list[list[int]] = [list(system) for _ in range(3)]
    spoken: list[tuple[list[int], Result]] = []
    async with Engine(runner, memory, config) as engine:
        for turn in range(TURNS):
            for talk in talks:
                before = len(talk) - 1 if turn else 0
                talk.extend(rng.integers(0, model.config.vocab_size, QUESTIONS[turn]).tolist())
                prompt = list(talk)
                result = await engine.generate(prompt, SamplingParams(max_new_tokens=ANSWER))
                talk.extend(result.token_ids)
                spoken.append((prompt, result))
                assert result.usage.cached_tokens >= before // page_size * page_size
    for prompt, result in spoken:
        assert result.token_ids == generated(model, prompt, ANSWER)
    report = memory.statistics()
    cached = sum(result.usage.cached_tokens for _, result in spoken)
    assert report.prefix.host_hit_tokens + report.prefix.hit_tokens == cached
    assert report.prefix.host_hit_tokens > 400
    assert report.host.bytes_in == report.prefix.host_hit_tokens * sum(pool.bytes_per_token for pool in memory.specs)
    memory.check()
