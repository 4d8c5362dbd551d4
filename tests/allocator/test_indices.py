"""Callers' numbers as host arrays, and the little sums over them."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from kvloom.allocator import InvalidArgument
from kvloom.allocator.indices import Ints, host_ints, page_count, places_below, spans, starts, whole

small = st.integers(0, 50)


@pytest.mark.parametrize(
    "make",
    [
        list,
        tuple,
        np.array,
        torch.tensor,
        lambda v: np.array(v, np.int32),
        lambda v: np.array(v, np.uint16),
        lambda v: np.repeat(np.array(v), 2)[::2],  # a view with a stride
        lambda v: torch.tensor(v, dtype=torch.int32),
        lambda v: torch.tensor(v).repeat_interleave(3)[::3],
    ],
)
def test_any_container_of_whole_numbers(make: Callable[[list[int]], Ints]) -> None:
    array = host_ints("n", make([3, 1, 2]))
    assert array.dtype == np.int64
    assert array.tolist() == [3, 1, 2]


@pytest.mark.parametrize("empty", [[], (), np.empty(0, np.float32), torch.empty(0), torch.empty(0, dtype=torch.int32)])
def test_nothing_is_an_empty_row_whatever_its_type(empty: Ints) -> None:
    array = host_ints("n", empty)
    assert array.dtype == np.int64
    assert array.shape == (0,)


@pytest.mark.parametrize(
    "wrong",
    [
        [1.0, 2.0],
        [True, False],
        ["1"],
        [[1, 2]],
        [[1], [2, 3]],
        [None],
        [2**70],
        3,
        None,
        np.array([1.5]),
        torch.tensor([1.0]),
        torch.tensor([1.0], dtype=torch.bfloat16),
        torch.tensor(3),
        torch.tensor([[1, 2]]),
    ],
)
def test_what_is_no_row_of_whole_numbers_is_refused_by_name(wrong: Ints) -> None:
    with pytest.raises(InvalidArgument, match="the_name"):
        host_ints("the_name", wrong)


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_the_callers_array_stays_the_callers(make: Callable[[list[int]], Ints]) -> None:
    theirs = make([1, 2, 3])
    ours = host_ints("n", theirs)
    theirs[0] = 9  # type: ignore[index]
    assert ours.tolist() == [1, 2, 3]


@pytest.mark.parametrize("value", [3, np.int32(3), torch.tensor(3)])
def test_a_whole_number_of_any_make(value: int) -> None:
    number = whole("n", value)
    assert (type(number), number) == (int, 3)


@pytest.mark.parametrize("value", [3.0, "3", None, torch.tensor(3.0), np.float64(3)])
def test_what_is_no_whole_number_is_refused_by_name(value: int) -> None:
    with pytest.raises(InvalidArgument, match="the_name"):
        whole("the_name", value)


@given(st.lists(small, max_size=20), st.integers(1, 20))
def test_page_count(tokens: list[int], page_size: int) -> None:
    expected = [len({position // page_size for position in range(n)}) for n in tokens]
    assert page_count(np.array(tokens, np.int32), page_size).tolist() == expected


@given(st.lists(small, max_size=20))
def test_starts(counts: list[int]) -> None:
    result = starts(np.array(counts, np.int64))
    assert result.dtype == np.int32
    assert result.tolist() == [sum(counts[:i]) for i in range(len(counts) + 1)]


@given(st.lists(st.tuples(st.integers(-9, 99), small), max_size=20))
def test_spans(rows: list[tuple[int, int]]) -> None:
    first, counts = np.array(rows, np.int32).reshape(-1, 2).T
    expected = [begin + i for begin, count in rows for i in range(count)]
    assert spans(first, counts).tolist() == expected


@given(st.integers(0, 70))
def test_places_below(count: int) -> None:
    places = places_below(count)
    assert places.tolist() == list(range(count))
    assert places.dtype == np.intp
    assert not places.flags.writeable
