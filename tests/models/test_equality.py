"""The whole of it against `generate`: engine, memory, runner and sampler, with pools too small for all at once.

Greedy tokens must equal, one by one, what transformers generates for each prompt alone, whatever the page size, the
chunk, the number of steps in flight, and however often a request is thrown out and computed again.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import anyio
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from kvloom.allocator import KVMemory
from kvloom.scheduler import Engine, FinishReason, SamplingParams, SchedulerConfig
from kvloom.scheduler.runners import TransformersRunner
from tests.models.tiny import MODELS, generated

LENGTHS = (1, 2, 3, 7, 15, 16, 17, 31, 33, 48, 64, 90)
NEW_TOKENS = 20
CAPACITY = 192  # tokens; the 12 requests would take 567, the longest one 110


@dataclass(frozen=True)
class Spoken:
    model: PreTrainedModel
    prompts: list[list[int]]
    expected: list[list[int]]


@pytest.fixture(scope="module")
def spoken() -> Mapping[str, Spoken]:
    """What each model generates for each prompt, worked out once."""
    found = {}
    for name, make in MODELS.items():
        model = make()
        rng = np.random.default_rng(7)
        prompts = [rng.integers(0, model.config.vocab_size, length).tolist() for length in LENGTHS]
        found[name] = Spoken(model, prompts, [generated(model, prompt, NEW_TOKENS) for prompt in prompts])
    return found


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small only lose time between two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


async def answers(
    case: Spoken, *, page_size: int, chunk: int, depth: int, capacity: int
) -> tuple[list[list[int]], int]:
    """What the engine says to all prompts at once, and how often it preempted."""
    runner = TransformersRunner(case.model)
    memory = KVMemory.for_runner(runner, capacity_tokens=capacity, page_size=page_size)
    config = SchedulerConfig(max_running=12, max_batch_tokens=80, prefill_chunk=chunk, steps_in_flight_max=depth)
    said: list[list[int]] = [[] for _ in case.prompts]

    async def ask(i: int) -> None:
        result = await engine.generate(case.prompts[i], SamplingParams(max_new_tokens=NEW_TOKENS))
        assert result.reason is FinishReason.LENGTH
        said[i] = list(result.token_ids)

    async with Engine(runner, memory, config) as engine, anyio.create_task_group() as tasks:
        for i in range(len(case.prompts)):
            tasks.start_soon(ask, i)
    memory.check()
    (pool,) = memory.statistics().pools.values()
    assert pool.held == 0
    return said, engine.statistics().scheduler.preemptions


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunk", [7, 16, 64])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("name", MODELS)
async def test_tokens_equal_those_of_generate(
    spoken: Mapping[str, Spoken], name: str, page_size: int, chunk: int, depth: int
) -> None:
    case = spoken[name]
    said, preemptions = await answers(case, page_size=page_size, chunk=chunk, depth=depth, capacity=CAPACITY)
    assert said == case.expected
    assert preemptions > 0
