"""A step's result is checked before anything is believed."""

from typing import Any

import numpy as np
import pytest

from kvloom.scheduler import BadStepResult, Plan, Request, StepResult
from kvloom.scheduler.request import Sequence
from kvloom.scheduler.results import checked_tokens

BOOM = RuntimeError("boom")


def plan(rows: int = 3, sampled: tuple[int, ...] = (0, 2)) -> Plan:
    ints, prompt = np.arange(rows, dtype=np.int32), np.ones(1, np.int32)
    return Plan(
        step=7,
        rows=ints + 5,
        prefix_lens=ints,
        q_lens=ints,
        seq_lens=ints,
        decode_rows=rows,
        token_ids=ints,
        token_src=None,
        sample_rows=np.array(sampled, np.int32),
        sampling=None,
        sequences=[Sequence(Request(id=f"r{i}", prompt=prompt), i, 0.0, 1, None, prompt, 0.0) for i in range(rows)],
        departures=0,
    )


def check(tokens: Any, errors: Any = None, gone: tuple[int, ...] = (), of: Plan | None = None) -> list[int]:
    alive = np.ones(10, np.bool_)
    alive[list(gone)] = False
    result = StepResult(np.asarray(tokens), {} if errors is None else errors)
    checked = checked_tokens(of or plan(), result, vocab_size=100, alive=alive)
    assert checked.dtype == np.int32
    return list(map(int, checked))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.int64, np.uint64])
def test_whole_numbers_of_any_width(dtype: Any) -> None:
    assert check(np.array([0, 99], dtype)) == [0, 99]


def test_a_result_may_be_a_view() -> None:
    assert check(np.arange(8)[::4]) == [0, 4]
    assert check(np.arange(8)[::-4]) == [7, 3]


@pytest.mark.parametrize("tokens", [[], np.empty(0), np.empty(0, np.int64)])
def test_nobody_was_sampled(tokens: Any) -> None:
    assert check(tokens, of=plan(sampled=())) == []


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([1], r"2 whole numbers wanted, got int64 of shape \(1,\)"),
        ([1, 2, 3], r"shape \(3,\)"),
        ([[1, 2]], r"shape \(1, 2\)"),
        ([[1], [2]], r"shape \(2, 1\)"),
        (5, r"shape \(\)"),
        ([], r"shape \(0,\)"),
        ([1.0, 2.0], "got float64"),
        ([True, False], "got bool"),
        ([float("nan"), 1.0], "got float64"),
        ([-1, 2], r"outside 0 to 99 for requests \{'r0': -1\}"),
        ([1, 100], r"for requests \{'r2': 100\}"),
        ([2**40, -(2**63)], r"\{'r0': 1099511627776, 'r2': -9223372036854775808\}"),
        (np.array([2**64 - 1, 1], np.uint64), "for requests"),
    ],
)
def test_no_tokens(tokens: Any, words: str) -> None:
    with pytest.raises(BadStepResult, match=f"^step 7: .*{words}"):
        check(tokens)


@pytest.mark.parametrize(
    "errors",
    [{2: BOOM}, {-1: BOOM}, {"r0": BOOM}, {0.0: BOOM}, {None: BOOM}, {0: "boom"}, {0: None}, [BOOM], "boom", 3],
)
def test_errors_that_are_none(errors: Any) -> None:
    with pytest.raises(BadStepResult, match=r"^step 7: row_errors"):
        check([1, 2], errors)


def test_a_row_with_an_error_may_have_any_token() -> None:
    assert check([1, -1], {1: BOOM})[0] == 1
    assert check([1, -1], {np.int64(1): BOOM})[0] == 1
    with pytest.raises(BadStepResult):
        check([-1, -1], {1: BOOM})


def test_so_may_a_row_whose_sequence_has_left() -> None:
    assert check([-1, 3], gone=(5,))[1] == 3
    with pytest.raises(BadStepResult):
        check([3, -1], gone=(5,))
    with pytest.raises(BadStepResult, match="shape"):
        check([3], gone=(5,))
