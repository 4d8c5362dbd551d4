"""Times of sampled pages, compared with a twin that remembers what happened to each page."""

import math
import random

import numpy as np
import pytest

from kvloom.allocator import KVMemory, PageLedger
from kvloom.allocator.page_sampling import RESIDENCY_SECONDS, PageSampling
from kvloom.allocator.reports import PageTimes
from kvloom.allocator.tally import Tally, TallyState
from tests.allocator.books import ints


def tallied(seconds: list[float]) -> TallyState:
    tally = Tally(RESIDENCY_SECONDS)
    for one in seconds:
        tally.add(one)
    return tally.state()


def same(found: TallyState, wanted: TallyState) -> bool:
    return found.counts == wanted.counts and math.isclose(found.total, wanted.total, abs_tol=1e-6)


class Twin:
    """A row, and the cache, that take and give back pages of one ledger at random."""

    def __init__(self, pages: int, seed: int) -> None:
        self.ledger = PageLedger(pages)
        self.draw = random.Random(seed)
        self.now = 1000.0
        self.held: list[int] = []
        self.cached: list[int] = []
        self.taken_at: dict[int, float] = {}
        self.freed_at: dict[int, float] = {}
        self.used_at: dict[int, float] = {}
        self.lifetimes: list[float] = []
        self.idle: list[float] = []
        self.gaps: list[float] = []

    def watched(self, pages: list[int]) -> list[int]:
        return [page for page in pages if page % self.ledger.sampling.every == 0]

    def turn(self) -> None:
        self.now += self.draw.choice([0.0, 0.004, 2.0, 400.0])
        self.ledger.sampling.tick(self.now)
        verb = self.draw.choice([self.take, self.release, self.cache, self.use, self.evict])
        verb(self.draw.randint(0, 40))

    def take(self, count: int) -> None:
        pages = self.ledger.take(count, 0)
        if pages is not None:
            self.held += pages.tolist()
            for page in self.watched(pages.tolist()):
                self.taken_at[page] = self.now
                if page in self.freed_at:
                    self.gaps.append(self.now - self.freed_at[page])

    def some(self, of: list[int], count: int) -> list[int]:
        self.draw.shuffle(of)
        some, of[:] = of[:count], of[count:]
        return some

    def release(self, count: int) -> None:
        pages = self.some(self.held, count)
        self.ledger.release(ints(*pages), 0)
        self.free(pages)

    def cache(self, count: int) -> None:
        pages = self.some(self.held, count)
        self.ledger.cache(ints(*pages), 0)
        self.cached += pages
        self.used_at |= dict.fromkeys(pages, self.now)

    def use(self, count: int) -> None:
        pages = self.cached[:count]
        self.ledger.sampling.used(ints(*pages))
        self.used_at |= dict.fromkeys(pages, self.now)

    def evict(self, count: int) -> None:
        pages = self.some(self.cached, count)
        self.ledger.evict(ints(*pages))
        self.idle += [self.now - self.used_at[page] for page in self.watched(pages)]
        self.free(pages)

    def free(self, pages: list[int]) -> None:
        for page in self.watched(pages):
            self.lifetimes.append(self.now - self.taken_at[page])
            self.freed_at[page] = self.now


@pytest.mark.parametrize("pages", [40, 600, 5000])
@pytest.mark.parametrize("seed", range(3))
def test_equals_its_twin(pages: int, seed: int) -> None:
    twin = Twin(pages, seed)
    for _ in range(600):
        twin.turn()
    times = twin.ledger.statistics().times
    assert same(times.lifetime, tallied(twin.lifetimes))
    assert same(times.idle_before_evict, tallied(twin.idle))
    assert same(times.reuse_gap, tallied(twin.gaps))
    assert min(len(twin.lifetimes), len(twin.idle), len(twin.gaps)) > 0


@pytest.mark.parametrize(
    ("pages", "every"), [(1, 1), (64, 1), (511, 1), (512, 8), (4095, 8), (4096, 64), (16_383, 64), (1_000_000, 256)]
)
def test_how_many_are_sampled(pages: int, every: int) -> None:
    """The share that is exported is that of the pages which are watched, to the page."""
    sampling = PageSampling(pages)
    sampling.tick(0.0)
    everyone = np.arange(1, pages + 1, dtype=np.int32)
    sampling.taken(everyone)
    sampling.freed(everyone)
    assert sampling.every == every
    assert sum(sampling.times().lifetime.counts) == round(sampling.times().sample_ratio * pages) == pages // every


def times_of(ledger: PageLedger) -> PageTimes:
    return ledger.statistics().times


def test_nothing_is_timed_before_the_first_tick() -> None:
    ledger = PageLedger(8)
    before = times_of(ledger)
    pages = ledger.take(4)
    assert pages is not None
    ledger.release(pages[:2])
    ledger.sampling.tick(5.0)
    ledger.release(pages[2:])
    ledger.take(2)
    ledger.sampling.tick(6.0)
    assert times_of(ledger).lifetime == before.lifetime
    assert sum(times_of(ledger).reuse_gap.counts) == 2  # freed after the tick


def test_a_quarantined_page_lives_until_its_step_is_settled() -> None:
    ledger = PageLedger(8)
    ledger.sampling.tick(10.0)
    pages = ledger.take(1)
    assert pages is not None
    ledger.release(pages, fence=3)
    ledger.sampling.tick(30.0)
    ledger.settle(3)
    assert times_of(ledger).lifetime.total == 20.0


def test_time_that_goes_back_stands_still() -> None:
    ledger = PageLedger(8)
    ledger.sampling.tick(10.0)
    pages = ledger.take(1)
    assert pages is not None
    ledger.sampling.tick(4.0)
    ledger.release(pages)
    assert (times_of(ledger).lifetime.counts[0], times_of(ledger).lifetime.total) == (1, 0.0)


def test_a_cleared_ledger_begins_anew() -> None:
    ledger = PageLedger(8)
    fresh = times_of(ledger)
    ledger.sampling.tick(10.0)
    pages = ledger.take(4)
    assert pages is not None
    ledger.release(pages)
    assert times_of(ledger) != fresh
    ledger.clear()
    assert times_of(ledger) == fresh


def test_the_memory_tells_the_time_and_the_last_use() -> None:
    """Two rows use a cached page until 20 and 50; it goes at 53."""
    memory = KVMemory(capacity_tokens=16, page_size=4, max_rows=4)
    tokens = ints(*range(5))
    memory.tick(0.0)
    first = memory.admit(memory.match(tokens), 5)
    assert first is not None
    memory.publish(ints(first), ints(4), lambda _, start, stop: tokens[start:stop])
    memory.tick(10.0)
    second = memory.admit(memory.match(tokens), 5)
    assert second is not None
    memory.tick(20.0)
    memory.release([first], [-1])
    memory.tick(50.0)
    memory.release([second], [-1])
    memory.tick(53.0)
    assert memory.admit(memory.match(ints(*range(50, 66))), 16) is not None
    times = memory.statistics().pools["full"].times
    assert (sum(times.idle_before_evict.counts), times.idle_before_evict.total) == (1, 3.0)
    assert times.lifetime.total == 20.0 + 40.0 + 53.0  # two pages of a row's own, and the one that was shared


def test_a_tally_counts_many_as_one_by_one() -> None:
    values = np.array([0.0, 0.01, 0.011, 1.0, 1e9])
    many, single = Tally(RESIDENCY_SECONDS), Tally(RESIDENCY_SECONDS)
    many.add_many(values)
    for value in values.tolist():
        single.add(value)
    assert many.state() == single.state()
    other = many.copy()
    other.add(1.0)
    assert many.state() == single.state() != other.state()
