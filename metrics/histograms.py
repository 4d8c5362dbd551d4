"""A histogram in one array: written by the loop's thread, read by any other, without a lock."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Up to here a bisection for each value costs less than the fixed price of the array operations (measured).
FEW = 12


@dataclass(frozen=True, slots=True)
class HistogramState:
    """One moment of a histogram: `counts[i]` observations in bucket i alone (int64; the last is above all bounds)."""

    counts: NDArray[np.int64]
    sum: float

    @property
    def count(self) -> int:
        """Observations."""
        return int(self.counts.sum())

    @property
    def cumulative(self) -> list[int]:
        """Observations in each bucket and those below it, as Prometheus wants them; the last is `count`."""
        cumulative: list[int] = np.cumsum(self.counts).tolist()
        return cumulative


class Histogram:
    """Counts per bucket; a value that equals an upper bound belongs to that bucket (`le`).

    One thread observes.  Every observation replaces the state in one assignment and never writes an array that was
    handed out, so counts and sum of a `snapshot` belong together whatever thread took it, and never change.

    Raises ValueError when the bounds are not finite and ascending.
    """

    __slots__ = ("bounds", "_bounds", "_state")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = np.asarray(bounds, np.float64)
        if not (len(bounds) and np.isfinite(self._bounds).all() and (np.diff(self._bounds) > 0).all()):
            raise ValueError(f"bucket bounds must be finite and ascending, got {list(bounds)}")
        self.bounds: tuple[float, ...] = tuple(self._bounds.tolist())
        self._state = HistogramState(np.zeros(len(bounds) + 1, np.int64), 0.0)

    def observe(self, value: float) -> None:
        """Count one value."""
        self._observe_few([value])

    def observe_many(self, values: NDArray[np.float64] | Sequence[float]) -> None:
        """Count each of `values`: a handful of array operations, whatever their number."""
        if len(values) <= FEW:
            self._observe_few([float(value) for value in values])
            return
        values = np.asarray(values, np.float64)
        buckets = np.searchsorted(self._bounds, values, side="left")
        counts = self._state.counts + np.bincount(buckets, minlength=len(self.bounds) + 1)
        self._state = HistogramState(counts, self._state.sum + float(values.sum()))

    def _observe_few(self, values: list[float]) -> None:
        if not values:
            return
        counts = self._state.counts.copy()
        for value in values:
            counts[bisect_left(self.bounds, value)] += 1
        self._state = HistogramState(counts, self._state.sum + sum(values))

    def snapshot(self) -> HistogramState:
        """The state now; from any thread."""
        return self._state
