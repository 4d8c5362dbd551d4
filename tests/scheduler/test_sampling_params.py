"""Wishes that make no sense are refused, each by its field."""

from typing import Any

import pytest

from kvloom.scheduler import InvalidRequest, SamplingParams

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("max_new_tokens", [0, -1, 1.5, "5", True, 2**31, 10**12]),
        ("temperature", [-0.1, NAN, INF, -INF, 1e308, "1", None, True]),
        ("top_k", [-1, 1.0, True, None, 2**31]),
        ("top_p", [0.0, -0.5, 1.01, NAN, None]),
        ("min_p", [-0.01, 1.01, NAN]),
        ("seed", [1.5, "1", True, 2**63, -(2**63) - 1]),
        ("repetition_penalty", [0.0, -1.0, 101.0, NAN, INF]),
        ("presence_penalty", [-101.0, 101.0, NAN, None]),
        ("frequency_penalty", [-101.0, 101.0, INF, "0"]),
        ("min_new_tokens", [-1, 2.0, None, 2**31]),
        ("stop_token_ids", [(-1,), (1.5,), (True,), ("a",), ([1],), "12", 5, None, (2**31,)]),
        ("n", [0, 2, 3, 10**6, "1", None]),
        ("logprobs", [0, 1, 5, True]),
    ],
)
def test_refused_by_name(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InvalidRequest, match=f"^{field}: ") as caught:
            SamplingParams(**{field: value})
        assert caught.value.field == field
        assert caught.value.status_hint == 400


def test_more_at_least_than_at_most() -> None:
    with pytest.raises(InvalidRequest, match="min_new_tokens: 6 is more than max_new_tokens=5"):
        SamplingParams(min_new_tokens=6, max_new_tokens=5)


@pytest.mark.parametrize(
    "fine",
    [
        {},
        {"max_new_tokens": 1, "min_new_tokens": 1},
        {"max_new_tokens": 2**31 - 1, "min_new_tokens": 2**31 - 1},
        {"min_new_tokens": 2**31 - 1},
        {"temperature": 100, "top_k": 2**31 - 1, "top_p": 1, "min_p": 1},
        {"temperature": 1e-300, "top_p": 1e-300, "repetition_penalty": 0.01},
        {"seed": 2**63 - 1},
        {"seed": -(2**63)},
        {"presence_penalty": -100, "frequency_penalty": 100},
        {"stop_token_ids": (0, 2**31 - 1)},
        {"ignore_eos": True},
    ],
)
def test_the_edges_of_what_makes_sense(fine: dict[str, Any]) -> None:
    params = SamplingParams(**fine)
    assert {name: getattr(params, name) for name in fine} == fine


def test_stop_tokens_are_kept_as_they_were() -> None:
    tokens = [1, 2]
    params = SamplingParams(stop_token_ids=tokens)  # type: ignore[arg-type]
    tokens.append(10**12)
    assert params.stop_token_ids == (1, 2)
    assert hash(params) == hash(SamplingParams(stop_token_ids=(1, 2)))


@pytest.mark.parametrize(
    ("params", "penalised"),
    [
        ({}, False),
        ({"temperature": 1.0}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": -0.1}, True),
        ({"frequency_penalty": 0.1}, True),
    ],
)
def test_penalised(params: dict[str, float], penalised: bool) -> None:
    assert SamplingParams(**params).penalised is penalised  # type: ignore[arg-type]
