"""Counts by size: what a histogram needs, as plain integers."""

from bisect import bisect_left
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class TallyState(NamedTuple):
    """`counts[i]` values were at most `bounds[i]` and above the bound before; the last count is of those above all."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


class Tally:
    """Counts values into buckets with these upper bounds, ascending."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._edges = np.array(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        """One more."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def add_many(self, values: NDArray[np.float64]) -> None:
        """One more for each of `values`."""
        for bucket in self._edges.searchsorted(values).tolist():
            self._counts[bucket] += 1
        self._total += float(np.add.reduce(values))

    def copy(self) -> "Tally":
        """The same counts, to go on counting apart."""
        tally = Tally(self._bounds)
        tally._counts, tally._total = self._counts.copy(), self._total
        return tally

    def state(self) -> TallyState:
        """An immutable copy."""
        return TallyState(self._bounds, tuple(self._counts), self._total)
