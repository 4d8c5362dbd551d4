"""Twelve prompts at once through the real engine, and what the model says to each alone."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import anyio
import numpy as np
import torch
from transformers import PreTrainedModel

from kvloom.allocator import KVMemory, PoolSpec
from kvloom.allocator.memory_pool import least_window_pages
from kvloom.scheduler import Engine, FinishReason, SamplingParams, SchedulerConfig
from kvloom.scheduler.runners import TransformersRunner
from tests.models.tiny import generated

LENGTHS = (1, 2, 3, 7, 15, 16, 17, 31, 33, 48, 64, 90)
NEW_TOKENS = 20
FULL = 192  # tokens; the 12 requests would take 567, the longest one 110
ROWS = 3  # in a window pool there is room for the windows of so many


@dataclass(frozen=True)
class Spoken:
    model: PreTrainedModel
    prompts: list[list[int]]
    expected: list[list[int]]


def spoken_by(model: PreTrainedModel, device: str = "cpu") -> Spoken:
    """Prompts for a model, which is moved to `device`, and what it generates for each there."""
    torch.nn.Module.to(model, device)
    rng = np.random.default_rng(7)
    prompts = [rng.integers(0, model.config.vocab_size, length).tolist() for length in LENGTHS]
    return Spoken(model, prompts, [generated(model, prompt, NEW_TOKENS) for prompt in prompts])


def tight(specs: Sequence[PoolSpec], page_size: int) -> dict[str, int]:
    """Tokens by pool: too few for all at once in each."""
    return {
        spec.name: FULL if spec.window is None else ROWS * least_window_pages(spec.window, page_size) * page_size
        for spec in specs
    }


async def answers(
    case: Spoken,
    *,
    page_size: int,
    chunk: int,
    depth: int,
    capacity: int | None = None,
    host_bytes: int = 0,
    during: AbstractContextManager[None] | None = None,
    params: Sequence[SamplingParams] = (SamplingParams(max_new_tokens=NEW_TOKENS),) * len(LENGTHS),
) -> tuple[list[list[int]], int]:
    """What the engine says to all prompts at once, all within `during`, and how often it preempted.

    In pools that are too small for all, unless there is a `capacity`, tokens of each.
    """
    runner = TransformersRunner(case.model)
    roomy = {spec.name: capacity or 0 for spec in runner.spec.pools}
    tokens = roomy if capacity else tight(runner.spec.pools, page_size)
    memory = KVMemory.for_runner(runner, capacity_tokens=tokens, page_size=page_size, host_bytes=host_bytes)
    config = SchedulerConfig(max_running=12, max_batch_tokens=80, prefill_chunk=chunk, steps_in_flight_max=depth)
    said: list[list[int]] = [[] for _ in case.prompts]

    async def ask(i: int) -> None:
        result = await engine.generate(case.prompts[i], params[i])
        assert result.reason is FinishReason.LENGTH
        said[i] = list(result.token_ids)

    async with Engine(runner, memory, config) as engine:
        with during or nullcontext():
            async with anyio.create_task_group() as tasks:
                for i in range(len(case.prompts)):
                    tasks.start_soon(ask, i)
    memory.check()
    assert all(pool.held == pool.quarantined == 0 for pool in memory.statistics().pools.values())
    assert memory.statistics().host.used == 0
    assert (memory.statistics().host.bytes_in > 0) == (host_bytes > 0)
    return said, engine.statistics().scheduler.preemptions
