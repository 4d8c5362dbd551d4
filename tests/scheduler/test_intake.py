"""What may be passed as a prompt, and what requests get that they did not bring."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from kvloom.scheduler import InvalidRequest, Request, SamplingParams
from kvloom.scheduler.intake import Intake, as_prompt

BIG = 2**31 - 1


@given(st.lists(st.integers(0, BIG)), st.sampled_from([list, tuple, np.array, torch.tensor]))
def test_any_row_of_whole_numbers_will_do(tokens: list[int], kind: Any) -> None:
    prompt = as_prompt(kind(tokens))
    assert prompt.dtype == np.int32
    assert prompt.tolist() == tokens


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64])
def test_whole_numbers_of_any_width(dtype: Any) -> None:
    assert as_prompt(np.array([0, 1, 127], dtype)).tolist() == [0, 1, 127]


def test_a_prompt_is_the_requests_own() -> None:
    values = np.array([1, 2, 3], np.int32)
    prompt = as_prompt(values)
    values[:] = 9
    assert prompt.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "values",
    [
        [1.0, 2.0], [True, False], ["1"], "12", b"12", None, 5, {1: 2}, {1, 2}, [None], [[1, 2]], [[1], [2, 3]],
        np.zeros((2, 2), np.int32), np.array([1.5]), [-1], [2**31], [2**64], [-(2**70)], [1, object()],
        np.array([2**32 - 1], np.uint32), np.array([2**64 - 1], np.uint64), (i for i in range(3)),
    ],
)  # fmt: skip
def test_no_row_of_token_ids(values: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^prompt: "):
        as_prompt(values)


@pytest.mark.parametrize("values", [[], (), np.empty(0), np.empty((0, 3))])
def test_an_empty_prompt_is_left_to_the_door(values: Any) -> None:
    assert as_prompt(values).shape == (0,)
    assert as_prompt(values).dtype == np.int32


def request(intake: Intake, request_id: str | None = None, params: SamplingParams | None = None) -> Request:
    return intake.request(
        [1, 2], params, request_id=request_id, deadline=5.0, now=100.0, cache_namespace="", metadata=None
    )


def test_ids_and_seeds_for_those_who_bring_none() -> None:
    intake = Intake(seed=100)
    made = [request(intake) for _ in range(3)]
    assert len({one.id for one in made}) == 3
    assert len({one.seed for one in made}) == 3
    again = Intake(seed=100)
    assert [request(again).seed for _ in range(3)] == [one.seed for one in made]
    own = request(intake, "mine", SamplingParams(seed=7))
    assert (own.id, own.seed, own.deadline, own.prompt.tolist()) == ("mine", 7, 105.0, [1, 2])


@pytest.mark.parametrize("request_id", ["", 5, b"id", ["id"], float("nan")])
def test_an_id_that_is_no_name(request_id: Any) -> None:
    with pytest.raises(InvalidRequest, match="request_id"):
        request(Intake(seed=0), request_id)


@pytest.mark.parametrize("deadline", ["5", True, [1.0], 2j])
def test_a_deadline_that_is_no_number(deadline: Any) -> None:
    with pytest.raises(InvalidRequest, match="deadline"):
        Intake(seed=0).request(
            [1], None, request_id=None, deadline=deadline, now=0.0, cache_namespace="", metadata=None
        )


def test_params_of_another_make() -> None:
    with pytest.raises(InvalidRequest, match="params"):
        request(Intake(seed=0), params={"temperature": 1.0})  # type: ignore[arg-type]


def test_an_own_id_cannot_be_one_that_the_engine_gives() -> None:
    """Else somebody who brought none could be told that its id is taken."""
    intake = Intake(seed=0)
    given = request(intake).id
    with pytest.raises(InvalidRequest, match="request_id"):
        request(intake, given[:-1] + "7")


@pytest.mark.parametrize("seed", [2**63 - 1, -(2**63)])
def test_seeds_do_not_run_out(seed: int) -> None:
    intake = Intake(seed)
    assert all(-(2**63) <= request(intake).seed < 2**63 for _ in range(3))
