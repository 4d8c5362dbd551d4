"""Random numbers that depend on a seed and a place, on nothing else."""

import numpy as np
from hypothesis import given, strategies as st

from kvloom.scheduler.randomness import uniforms

SEEDS = st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20)
PLACES = st.integers(0, 2**31 - 1)


def draw(seeds: list[int], places: list[int]) -> list[float]:
    numbers: list[float] = uniforms(np.array(seeds, np.int64), np.array(places, np.int32)).tolist()
    return numbers


@given(SEEDS, st.data())
def test_in_range_and_independent_of_who_else_is_in_the_batch(seeds: list[int], data: st.DataObject) -> None:
    places = data.draw(st.lists(PLACES, min_size=len(seeds), max_size=len(seeds)))
    numbers = draw(seeds, places)
    assert all(0 <= number < 1 for number in numbers)
    assert numbers == [draw([seed], [place])[0] for seed, place in zip(seeds, places, strict=True)]
    assert numbers[::-1] == draw(seeds[::-1], places[::-1])


def test_single_precision() -> None:
    assert uniforms(np.array([1]), np.array([2], np.int32)).dtype == np.float32
    assert uniforms(np.empty(0, np.int64), np.empty(0, np.int32)).shape == (0,)


def require_uniform(numbers: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> None:
    """Chi square over 64 bins: mean 63, standard deviation 11; fixed seeds, so no luck is involved."""
    counts = np.histogram(numbers, bins=64, range=(0, 1))[0]
    expected = numbers.size / 64
    chi = float(((counts - expected) ** 2 / expected).sum())
    assert 30 < chi < 110, chi
    assert abs(float(numbers.mean()) - 0.5) < 4 * 0.2887 / numbers.size**0.5


def test_uniform_along_one_request() -> None:
    places = np.arange(100_000, dtype=np.int32)
    for seed in (0, 1, -1, 2**62 + 5):
        require_uniform(uniforms(np.full(len(places), seed, np.int64), places))


def test_uniform_across_requests_whose_seeds_follow_each_other() -> None:
    seeds = np.arange(100_000, dtype=np.int64) + 2**61
    for place in (0, 1, 1000):
        require_uniform(uniforms(seeds, np.full(len(seeds), place, np.int32)))


def test_neighbours_have_nothing_to_do_with_each_other() -> None:
    seeds, places = (grid.ravel() for grid in np.meshgrid(np.arange(300), np.arange(300)))
    numbers = uniforms(seeds.astype(np.int64), places.astype(np.int32)).reshape(300, 300)
    assert len(np.unique(numbers)) > 0.99 * numbers.size
    for other in (np.roll(numbers, 1, 0), np.roll(numbers, 1, 1), np.roll(np.roll(numbers, 1, 0), -1, 1), numbers.T):
        correlation = float(np.corrcoef(numbers.ravel(), other.ravel())[0, 1])
        assert abs(correlation) < 0.03, correlation  # 1/300 is one standard deviation; .T shares the diagonal
