"""Immutable reports about memory, cheap enough to take after every step."""

from collections.abc import Mapping
from typing import NamedTuple


class Shortfall(NamedTuple):
    """Why an allocation was refused: `pool` has `free` pages (and `evictable` cached ones) where `need` are needed.

    `fits` of the rows asked for, from the first on, would have fitted.
    """

    pool: str
    need: int
    free: int
    evictable: int = 0
    fits: int = 0


class PoolStatistics(NamedTuple):
    """The pages of one pool by state; free + held + cached + quarantined = capacity, always.

    `quarantined` pages are given back and wait for a step in flight that may still read them.  `allocated` counts
    pages taken since start, `freed` pages given back, by reason: sum(freed) = allocated - held - cached (what waits in
    an open free group is neither held nor given back yet).
    """

    pool: str
    page_size: int
    capacity: int
    free: int
    held: int
    cached: int
    quarantined: int
    peak_held: int
    allocated: int
    freed: Mapping[str, int]
    failures: int
    groups: int
    sorts: int
    slack_tokens: int = 0

    @property
    def fragmentation(self) -> float:
        """The part of the slots in held pages that holds no token, 0 to 1: what pages cost against single slots."""
        return self.slack_tokens / (self.held * self.page_size) if self.held else 0.0

    def __str__(self) -> str:
        """Who has the pages, in one line."""
        return (
            f"pool {self.pool!r} of {self.capacity} pages of {self.page_size}: {self.free} free, {self.held} held by "
            f"requests (at most {self.peak_held} so far; {self.slack_tokens} slots unused), {self.cached} by the "
            f"prefix cache, {self.quarantined} waiting for a step in flight"
        )


class MemoryStatistics(NamedTuple):
    """All pools, and the request table's rows; `evicted` counts prefix-cache pages by (pool, reason)."""

    pools: Mapping[str, PoolStatistics]
    rows_capacity: int
    rows_held: int
    rows_quarantined: int
    evicted: Mapping[tuple[str, str], int]

    def __str__(self) -> str:
        """Who has what, a line for each pool and one for the rows."""
        rows = f"{self.rows_held} of {self.rows_capacity} rows held, {self.rows_quarantined} waiting"
        return "; ".join((*map(str, self.pools.values()), rows))
