"""Immutable reports about memory, cheap enough to take after every step."""

from collections.abc import Mapping
from typing import NamedTuple

from kvloom.allocator.prefix.reports import PrefixStatistics
from kvloom.allocator.tally import TallyState


class Shortfall(NamedTuple):
    """Why an allocation was refused: `pool` has `free` pages (and `evictable` cached ones) where `need` are needed.

    `fits` of the rows asked for, from the first on, would have fitted, and the next one up to `upto` tokens.
    """

    pool: str
    need: int
    free: int
    evictable: int = 0
    fits: int = 0
    upto: int = 0


class PageTimes(NamedTuple):
    """Seconds that pages spent in a state, of `sample_ratio` of the pool's pages; see `PageSampling`."""

    sample_ratio: float
    lifetime: TallyState
    idle_before_evict: TallyState
    reuse_gap: TallyState


class PoolGeometry(NamedTuple):
    """What a page of a pool is: its tokens, its bytes in all `layers` together, and the numbers in it."""

    page_tokens: int
    page_bytes: int
    dtype: str
    layers: int


class PoolStatistics(NamedTuple):
    """The pages of one pool by state; free + held + cached + quarantined = capacity, always.

    `quarantined` pages are given back and wait for a step in flight that may still read them.  `evictable` of the
    cached pages are used by nobody.  `allocated` counts pages taken since start, `freed` pages given back, by reason:
    sum(freed) = allocated - held - cached (what waits in an open free group is neither held nor given back yet).
    `failures` counts the times when there were too few free pages, before anything was done about it.

    peak_held     most pages held at once
    peak_active   most pages `active` at once, seen whenever one is taken, or comes to be used again
    groups        how often pages were given back, `group_pages` how many at a time
    *_by_op       what for: prefill, decode, restore
    """

    pool: str
    page_size: int
    capacity: int
    free: int
    held: int
    cached: int
    quarantined: int
    peak_held: int
    peak_active: int
    allocated_by_op: Mapping[str, int]
    freed: Mapping[str, int]
    failures_by_op: Mapping[str, int]
    groups: int
    group_pages: TallyState
    sorts: int
    times: PageTimes
    slack_tokens: int = 0
    evictable: int = 0

    @property
    def active(self) -> int:
        """Pages that a request needs: those held, and the cached ones in use."""
        return self.held + self.cached - self.evictable

    @property
    def allocated(self) -> int:
        """Pages taken since start."""
        return sum(self.allocated_by_op.values())

    @property
    def failures(self) -> int:
        """Shortages since start."""
        return sum(self.failures_by_op.values())

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


class HostStatistics(NamedTuple):
    """Bytes: what host memory may hold of preempted rows, holds now, and what went there and came back since start.

    prefix_limit, prefix_used: of evicted prefixes, which count in what went there and came back.
    """

    limit: int
    used: int
    bytes_out: int
    bytes_in: int
    prefix_limit: int = 0
    prefix_used: int = 0


class MemoryStatistics(NamedTuple):
    """All pools, the request table's rows, the prefix cache, and the host's memory for preempted rows.

    restored_tokens   of preempted rows, whose KV came back from the host
    violations        mistakes found since start, by check: conservation, double_free, foreign_page; each is a defect
    eviction_seconds  host time of each eviction
    """

    pools: Mapping[str, PoolStatistics]
    rows_capacity: int
    rows_held: int
    rows_quarantined: int
    prefix: PrefixStatistics
    host: HostStatistics
    eviction_seconds: TallyState
    geometry: Mapping[str, PoolGeometry]
    restored_tokens: int
    violations: Mapping[str, int]

    def __str__(self) -> str:
        """Who has what, a line for each pool and one for the rows."""
        rows = f"{self.rows_held} of {self.rows_capacity} rows held, {self.rows_quarantined} waiting"
        return "; ".join((*map(str, self.pools.values()), rows))
