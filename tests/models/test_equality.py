"""The whole of it against `generate`: engine, memory, runner and sampler, with pools too small for all at once.

Greedy tokens must equal, one by one, what transformers generates for each prompt alone, whatever the page size, the
chunk, the number of steps in flight, and however often a request is thrown out and computed again.
"""

from collections.abc import Iterator, Mapping
from itertools import cycle
from typing import Any

import pytest
import torch

from kvloom.scheduler import SamplingParams
from tests.models.crowd import LENGTHS, NEW_TOKENS, Spoken, answers, spoken_by
from tests.models.tiny import MODELS

PARAMS: tuple[Mapping[str, Any], ...] = (
    {},
    {"top_k": 10, "repetition_penalty": 1.3},
    {"top_p": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"min_p": 0.1, "top_p": 0.95, "top_k": 20},
)


@pytest.fixture(scope="module")
def spoken() -> Mapping[str, Spoken]:
    """What each model generates for each prompt, worked out once."""
    return {name: spoken_by(make()) for name, make in MODELS.items()}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small only lose time between two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("host_bytes", [0, 2**30], ids=["recompute", "offload"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunk", [7, 16, 64])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("name", MODELS)
async def test_tokens_equal_those_of_generate(
    spoken: Mapping[str, Spoken], name: str, page_size: int, chunk: int, depth: int, host_bytes: int
) -> None:
    """With the prefix cache on, window layers in a pool of their own, pages evicted, requests thrown out."""
    case = spoken[name]
    said, preemptions = await answers(case, page_size=page_size, chunk=chunk, depth=depth, host_bytes=host_bytes)
    assert said == case.expected
    assert preemptions > 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", MODELS)
async def test_sampled_tokens_do_not_depend_on_the_crowd(spoken: Mapping[str, Spoken], name: str, depth: int) -> None:
    """Seeded requests, penalties and all: preempted in a small pool as in one with room for everybody."""
    case = spoken[name]
    params = [
        SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.8, seed=i, **some)
        for i, some in zip(range(len(LENGTHS)), cycle(PARAMS), strict=False)
    ]
    crowded, preemptions = await answers(case, page_size=4, chunk=16, depth=depth, params=params)
    at_ease, none = await answers(case, page_size=16, chunk=64, depth=1, capacity=1024, params=params)
    assert crowded == at_ease
    assert preemptions > none == 0
