"""What is turned away at the door, and how much the others may say."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvloom.scheduler import InvalidRequest, ModelLimits, NeverFits, Request, SamplingParams, TooLong
from kvloom.scheduler.door import output_limit

LIMITS = ModelLimits(vocab_size=100, max_seq=32, eos_ids=(5,))


def request(prompt: int | np.ndarray[Any, Any], **params: Any) -> Request:
    tokens = np.ones(prompt, np.int32) if isinstance(prompt, int) else prompt
    return Request(id="r", prompt=tokens, params=SamplingParams(**params))


@pytest.mark.parametrize(
    ("prompt", "wish", "capacity", "limit"),
    [
        (1, None, 1000, 31),
        (30, None, 1000, 2),
        (31, None, 1000, 1),
        (31, 1, 1000, 1),
        (30, 2, 1000, 2),
        (30, 10, 1000, 2),
        (4, 10, 1000, 10),
        (4, 100, 1000, 28),
        (8, None, 8, 1),  # the last token needs no KV
        (8, None, 10, 3),
        (8, 2, 10, 2),
    ],
)
def test_most_output_tokens(prompt: int, wish: int | None, capacity: int, limit: int) -> None:
    assert output_limit(request(prompt, max_new_tokens=wish), LIMITS, capacity) == limit


@pytest.mark.parametrize(
    ("asked", "error", "words"),
    [
        (lambda: request(0), InvalidRequest, "prompt: is empty"),
        (lambda: request(np.zeros((1, 4), np.int32)), InvalidRequest, "one dimension"),
        (lambda: request(np.zeros(4, np.int64)), InvalidRequest, "int64"),
        (lambda: request(np.array([1, -2], np.int32)), InvalidRequest, r"from 0 to 99; got \[-2\]"),
        (lambda: request(np.array([100, 99], np.int32)), InvalidRequest, r"got \[100\]"),
        (lambda: request(4, stop_token_ids=(4, 100)), InvalidRequest, "stop_token_ids: token ids run from 0 to 99"),
        (lambda: request(32), TooLong, "32 tokens; the model's context of 32"),
        (lambda: request(33), TooLong, "33 tokens"),
        (lambda: request(21), NeverFits, "21 tokens; the KV memory holds sequences of up to 20"),
    ],
)
def test_turned_away(asked: Callable[[], Request], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        output_limit(asked(), LIMITS, memory_max_seq=20)


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, 2**70])
def test_a_seed_that_is_no_64_bit_number_does_not_come_as_far_as_a_step(seed: int) -> None:
    with pytest.raises(InvalidRequest, match="seed"):
        output_limit(Request(id="r", prompt=np.ones(1, np.int32), seed=seed), LIMITS, 100)


def test_a_namespace_that_cannot_be_looked_up() -> None:
    with pytest.raises(InvalidRequest, match="cache_namespace"):
        output_limit(Request(id="r", prompt=np.ones(1, np.int32), cache_namespace=["a"]), LIMITS, 100)  # type: ignore[arg-type]


def test_a_deadline_that_is_no_time() -> None:
    """Nothing is before it and nothing after it: it would keep all other deadlines from coming."""
    with pytest.raises(InvalidRequest, match="deadline"):
        output_limit(Request(id="r", prompt=np.ones(1, np.int32), deadline=float("nan")), LIMITS, 100)
