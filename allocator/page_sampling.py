"""PageSampling: for how long pages are held, lie idle in the cache, and lie free, told by some of them.

Each `every`-th page of a pool is watched, always the same ones: which page somebody gets says nothing about what is
done with it.  Of a batch of pages that holds none of them, which most are, one look-up is the whole cost.
"""

import numpy as np
from numpy.typing import NDArray

from kvloom.allocator.reports import PageTimes
from kvloom.allocator.tally import Tally

# Upper bounds of the buckets, in seconds.
RESIDENCY_SECONDS = (0.01, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)
WATCHED_MIN = 64  # so many pages at least are watched, in a pool that has as many
STRIDES = (256, 64, 8)

PageIds = NDArray[np.int32] | NDArray[np.intp]


class PageSampling:
    """The times of the watched ones among pages 1 to `pages`, in seconds of whatever clock `tick` is told.

    lifetime           from being taken to being free, whoever had the page in between, the cache included; a page
                       that was taken for nothing, since another pool was short, has lived for 0 s
    idle_before_evict  of pages that the cache gives up: since a row last gave up using it
    reuse_gap          from being free to being taken again

    Nothing is counted before the first tick, nor of what began before it.
    """

    def __init__(self, pages: int) -> None:
        self.every = next((every for every in STRIDES if pages // every >= WATCHED_MIN), 1)
        watched = pages // self.every
        self._ratio = watched / pages
        self._is_watched = np.zeros(pages + 1, np.bool_)
        self._is_watched[self.every :: self.every] = True
        self._now: float | None = None
        self._taken_at, self._freed_at, self._used_at = np.full((3, watched + 1), np.nan)
        self._lifetime, self._idle, self._gap = (Tally(RESIDENCY_SECONDS) for _ in range(3))

    def tick(self, now: float) -> None:
        """It is `now`; time that goes back stands still."""
        if self._now is None or now > self._now:
            self._now = now

    def taken(self, pages: PageIds) -> None:
        """Free pages belong to somebody now."""
        if self._now is not None and (watched := self._watched(pages)) is not None:
            self._count(self._gap, self._freed_at, watched)
            self._taken_at[watched] = self._now

    def freed(self, pages: PageIds) -> None:
        """Pages are free now."""
        if self._now is not None and (watched := self._watched(pages)) is not None:
            self._count(self._lifetime, self._taken_at, watched)
            self._freed_at[watched] = self._now

    def used(self, pages: PageIds) -> None:
        """Pages of the cache have been used until now."""
        if self._now is not None and (watched := self._watched(pages)) is not None:
            self._used_at[watched] = self._now

    def evicted(self, pages: PageIds) -> None:
        """The cache gives up pages."""
        if self._now is not None and (watched := self._watched(pages)) is not None:
            self._count(self._idle, self._used_at, watched)

    def times(self) -> PageTimes:
        """An immutable report."""
        return PageTimes(self._ratio, self._lifetime.state(), self._idle.state(), self._gap.state())

    def _watched(self, pages: PageIds) -> PageIds | None:
        """The watched ones among `pages`, numbered from 1 up; None when there are none."""
        hit = self._is_watched[pages]
        if np.count_nonzero(hit):
            return pages[hit] // self.every
        return None

    def _count(self, tally: Tally, since: NDArray[np.float64], watched: PageIds) -> None:
        """Each page's time ends now; a page whose time has begun before the first tick has none."""
        if self._now is not None:
            seconds = self._now - since[watched]
            seconds = seconds[seconds >= 0]  # what has no beginning is no number
            if len(seconds):
                tally.add_many(seconds)
                since[watched] = np.nan
