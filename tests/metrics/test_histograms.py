"""The array histogram is compared with the obvious one."""

import math
import threading
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, strategies as st

from kvloom.metrics.histograms import FEW, Histogram

BOUNDS = (0.0, 0.001, 0.1, 1.0, 2.5, 300.0)


def naive(bounds: tuple[float, ...], values: list[float]) -> list[int]:
    """Cumulative counts by the definition of `le`."""
    return [sum(value <= bound for value in values) for bound in (*bounds, math.inf)]


values_near_bounds = st.lists(
    st.one_of(
        st.sampled_from(BOUNDS),
        st.sampled_from([math.nextafter(bound, side) for bound in BOUNDS for side in (-math.inf, math.inf)]),
        st.floats(-1.0, 1e6),
    ),
    max_size=3 * FEW,
)


@given(batches=st.lists(values_near_bounds, max_size=4))
def test_equals_its_naive_twin(batches: list[list[float]]) -> None:
    histogram = Histogram(BOUNDS)
    for batch in batches:
        histogram.observe_many(np.array(batch, np.float64))
    values = [value for batch in batches for value in batch]
    state = histogram.snapshot()
    assert state.cumulative == naive(BOUNDS, values)
    assert state.count == len(values)
    assert math.isclose(state.sum, sum(values), rel_tol=1e-9, abs_tol=1e-6)


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("times", [1, FEW, FEW + 1])
def test_a_value_on_a_bound_belongs_to_its_bucket(bound: float, times: int) -> None:
    histogram = Histogram(BOUNDS)
    histogram.observe_many(np.full(times, bound))
    assert histogram.snapshot().counts.tolist() == [times if other == bound else 0 for other in (*BOUNDS, math.inf)]


def test_one_value_and_plain_lists() -> None:
    histogram = Histogram(BOUNDS)
    histogram.observe(0.5)
    histogram.observe_many([0.5, 400.0])
    histogram.observe_many([1] * 50)
    assert histogram.snapshot().counts.tolist() == [0, 0, 0, 52, 0, 0, 1]
    assert histogram.snapshot().sum == 451.0


def test_counts_are_int64() -> None:
    histogram = Histogram(BOUNDS)
    histogram.observe_many(np.ones(1000))
    assert histogram.snapshot().counts.dtype == np.int64


@pytest.mark.parametrize("size", [1, 100])
def test_a_snapshot_does_not_change(size: int) -> None:
    histogram = Histogram(BOUNDS)
    histogram.observe(1.0)
    before = histogram.snapshot()
    histogram.observe_many(np.ones(size))
    assert (before.count, before.sum) == (1, 1.0)


def test_a_snapshot_taken_in_another_thread_belongs_together() -> None:
    histogram, done = Histogram(BOUNDS), threading.Event()
    states = []

    def scrape() -> None:
        while not done.is_set():
            states.append(histogram.snapshot())

    reader = threading.Thread(target=scrape)
    reader.start()
    for size in (1, FEW + 1) * 2000:
        histogram.observe_many(np.ones(size))
    done.set()
    reader.join()
    assert all(state.sum == state.count for state in states)
    assert all(one.count <= other.count for one, other in pairwise(states))
    assert histogram.snapshot().count == 2000 * (FEW + 2)


@pytest.mark.parametrize("bounds", [(), (2.0, 1.0), (1.0, 1.0), (1.0, math.inf), (math.nan,)])
def test_bounds_that_make_no_sense_are_refused(bounds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="finite and ascending"):
        Histogram(bounds)
