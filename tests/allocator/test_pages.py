"""PageLedger against a naive twin, under random verbs; then what it refuses, and what its check finds."""

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvloom.allocator import (
    AllocatorError,
    BrokenInvariant,
    DoubleFree,
    ForeignPage,
    InvalidArgument,
    PageLedger,
    StaleState,
)
from kvloom.allocator.pages import CACHED, CALLER, FREE, QUARANTINED
from kvloom.allocator.snapshots import LedgerState
from tests.allocator.books import books, ints, refused
from tests.allocator.twins import TwinLedger, TwinState


class LedgerMachine(RuleBasedStateMachine):
    """Every legal verb on both, and every kind of misuse, which must change nothing."""

    @initialize(pages=st.integers(1, 12), need_sort=st.booleans(), count=st.integers(0, 12))
    def make(self, pages: int, need_sort: bool, count: int) -> None:
        self.twin = TwinLedger(pages, need_sort)
        self.states: list[tuple[LedgerState, TwinState]] = []
        self.ledger = PageLedger(pages, need_sort=need_sort)
        self.take(min(count, pages), 0, each=True)

    def some_held(self, data: st.DataObject) -> tuple[list[int], int | np.ndarray[tuple[int], np.dtype[np.int32]]]:
        """Distinct held pages in any order, and their holders: one number each, or one for all."""
        pages = data.draw(st.lists(st.sampled_from(sorted(self.twin.held())), unique=True, min_size=1))
        holders = [self.twin.holder[page] for page in pages]
        if len(set(holders)) == 1 and data.draw(st.booleans()):
            return pages, holders[0]
        return pages, ints(*holders)

    @rule(count=st.integers(0, 13), holder=st.integers(0, 3), each=st.booleans())
    def take(self, count: int, holder: int, each: bool) -> None:
        holders = [(holder + i) % 4 if each else holder for i in range(count)]
        taken = self.ledger.take(count, ints(*holders) if each else holder)
        assert (None if taken is None else taken.tolist()) == self.twin.take(holders)

    @rule(holder=st.integers(0, 3))
    def take_all(self, holder: int) -> None:
        self.take(self.twin.free_pages(), holder, each=False)

    @precondition(lambda self: self.twin.held())
    @rule(
        data=st.data(),
        reason=st.sampled_from(["finish", "abort"]),
        ahead=st.integers(-3, 3),
        front=st.booleans(),
    )
    def release(self, data: st.DataObject, reason: str, ahead: int, front: bool) -> None:
        pages, holders = self.some_held(data)
        fence = self.twin.settled + ahead
        self.ledger.release(ints(*pages), holders, reason=reason, fence=fence, front=front)
        self.twin.release(pages, reason, fence, front)

    @rule(ahead=st.integers(-2, 3))
    def settle(self, ahead: int) -> None:
        step = self.twin.settled + ahead
        self.ledger.settle(step)
        self.twin.settle(step)

    @precondition(lambda self: self.twin.held())
    @rule(data=st.data())
    def queue(self, data: st.DataObject) -> None:
        pages, holders = self.some_held(data)
        self.ledger.queue(ints(*pages), holders)
        self.twin.queue(pages)

    @precondition(lambda self: self.twin.queued)
    @rule(front=st.booleans(), ascending=st.booleans())
    def free_queued(self, front: bool, ascending: bool) -> None:
        counted = self.ledger.free_queued(reason="abort", front=front, ascending=ascending)
        assert counted == self.twin.free_queued("abort", front, ascending)

    @precondition(lambda self: self.twin.held())
    @rule(data=st.data())
    def cache(self, data: st.DataObject) -> None:
        pages, holders = self.some_held(data)
        self.ledger.cache(ints(*pages), holders)
        self.twin.cache(pages)

    @precondition(lambda self: self.twin.in_state(CACHED))
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(self.twin.in_state(CACHED)), unique=True, min_size=1))
        self.ledger.evict(ints(*pages))
        self.twin.evict(pages)

    @rule()
    def backup_state(self) -> None:
        self.states.append((self.ledger.backup_state(), self.twin.backup()))

    @precondition(lambda self: self.states)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        _, twin_state = self.states.pop(data.draw(st.integers(0, len(self.states) - 1)))
        if twin_state in self.twin.states:
            self.twin.states.remove(twin_state)

    @precondition(lambda self: self.states)
    @rule(data=st.data())
    def restore_state(self, data: st.DataObject) -> None:
        """Any that was ever taken, in any order, stale ones too."""
        state, twin_state = data.draw(st.sampled_from(self.states))
        if self.twin.can_restore(twin_state):
            self.ledger.restore_state(state)
            self.twin.restore(twin_state)
        else:
            with refused(self.ledger, StaleState):
                self.ledger.restore_state(state)

    @precondition(lambda self: len(self.states) > 2)
    @rule()
    def clear(self) -> None:
        self.ledger.clear()
        self.twin.clear()

    @rule(data=st.data(), verb=st.sampled_from(["release", "queue", "cache", "evict"]))
    def misuse(self, data: st.DataObject, verb: str) -> None:
        """One page that is wrong for the verb, at any place among pages that are right for it."""
        own = self.twin.in_state(CACHED) if verb == "evict" else sorted(self.twin.held())
        pages = data.draw(st.lists(st.sampled_from(own), unique=True)) if own else []
        outside = [-2, -1, 0, self.twin.pages + 1, 10**6]
        others = [page for page in self.twin.holder if page not in own]
        culprit = data.draw(st.sampled_from([*outside, *others, *pages]))
        at = data.draw(st.integers(0, len(pages)))
        given = [*pages[:at], culprit, *pages[at:]]
        again = culprit in pages or self.twin.holder.get(culprit) in (FREE, QUARANTINED)
        with refused(self.ledger, DoubleFree if again else ForeignPage):
            if verb == "evict":
                self.ledger.evict(ints(*given))
            else:
                holders = ints(*(max(self.twin.holder.get(page, 0), 0) for page in given))
                getattr(self.ledger, verb)(ints(*given), holders)

    @precondition(lambda self: self.twin.held())
    @rule(data=st.data())
    def steal(self, data: st.DataObject) -> None:
        """A page is held, but by somebody else."""
        page = data.draw(st.sampled_from(sorted(self.twin.held())))
        with refused(self.ledger, ForeignPage):
            self.ledger.release(ints(page), self.twin.holder[page] + 1)

    @invariant()
    def same_books(self) -> None:
        self.ledger.check()
        twin, statistics = self.twin, self.ledger.statistics()
        assert self.ledger.free_list().tolist() == twin.free + twin.released
        assert self.ledger.holders_of(ints(*twin.holder)).tolist() == list(twin.holder.values())
        assert statistics.free == self.ledger.free_pages == twin.free_pages()
        assert statistics.held == self.ledger.held_pages == len(twin.held())
        assert statistics.cached == len(twin.in_state(CACHED))
        assert statistics.quarantined == len(twin.in_state(QUARANTINED))
        assert Counter(statistics.freed) == twin.freed
        assert sum(statistics.freed.values()) == (
            statistics.allocated - statistics.held - statistics.cached - len(twin.queued)
        )
        counts = (statistics.allocated, statistics.failures, statistics.groups, statistics.sorts, statistics.peak_held)
        assert counts == (twin.allocated, twin.failures, twin.groups, twin.sorts, twin.peak)


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def used() -> PageLedger:
    """Pages 1 to 4 held by 0, 5 and 6 by 1, 7 quarantined, 8 queued, 9 cached, 10 to 12 free, 2 of them released."""
    ledger = PageLedger(12, need_sort=True)
    ledger.take(6, ints(0, 0, 0, 0, 1, 1))
    ledger.take(5, 2)
    ledger.release(ints(7), 2, fence=3)
    ledger.queue(ints(8), 2)
    ledger.cache(ints(9), 2)
    ledger.release(ints(11, 10), 2)
    ledger.check()
    return ledger


@pytest.mark.parametrize(
    "misuse",
    [
        lambda ledger: ledger.take(-1),
        lambda ledger: ledger.take(2.0),
        lambda ledger: ledger.take(1, -1),
        lambda ledger: ledger.take(2, ints(0, CACHED)),
        lambda ledger: ledger.take(2, ints(0)),
        lambda ledger: ledger.take(2, ints(0, 1, 2)),
        lambda ledger: ledger.release(ints(12), FREE),
        lambda ledger: ledger.release(ints(7), QUARANTINED),
        lambda ledger: ledger.release(ints(9), CACHED),
        lambda ledger: ledger.release(ints(1, 12), ints(0, FREE)),
        lambda ledger: ledger.release(ints(1, 2), ints(0)),
        lambda ledger: ledger.queue(ints(8), QUARANTINED),
        lambda ledger: ledger.cache(ints(1, 2), ints(0, 0, 0)),
        lambda ledger: ledger.cache(ints(12), FREE),
    ],
)  # fmt: skip
def test_a_count_or_holder_that_makes_no_sense(misuse: Callable[[PageLedger], object]) -> None:
    ledger = used()
    with refused(ledger, InvalidArgument):
        misuse(ledger)


@pytest.mark.parametrize(("pages", "page_size"), [(0, 1), (-3, 1), (2**31 - 1, 1), (4, 0), (4, -1)])
def test_a_pool_that_makes_no_sense(pages: int, page_size: int) -> None:
    with pytest.raises(InvalidArgument, match="'swa'"):
        PageLedger(pages, pool="swa", page_size=page_size)


def test_pages_behind_a_fence_are_not_there_until_it_is_settled() -> None:
    ledger = PageLedger(4)
    pages = ledger.take(4)
    assert pages is not None
    ledger.release(pages[:2], fence=7)
    ledger.release(pages[2:], fence=6)
    assert ledger.take(1) is None
    ledger.settle(5)
    assert ledger.free_pages == 0
    ledger.settle(6)
    assert ledger.free_list().tolist() == [3, 4]
    with refused(ledger, DoubleFree):
        ledger.release(ints(1))
    ledger.settle(3)  # a step that is long over
    assert ledger.free_pages == 2
    ledger.settle(9)
    assert ledger.free_list().tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("pages", [[1, 2, 1], [4, 4], [1, 2, 3, 4, 2]])
@pytest.mark.parametrize("verb", [PageLedger.release, PageLedger.queue, PageLedger.cache])
def test_a_page_named_twice_in_one_call(verb: Callable[..., None], pages: list[int]) -> None:
    ledger = used()
    with refused(ledger, DoubleFree):
        verb(ledger, ints(*pages), 0)
    with refused(ledger, DoubleFree):
        ledger.evict(ints(9, 9))


def test_what_was_given_in_is_copied() -> None:
    ledger = PageLedger(6)
    ledger.take(6)
    fenced, queued = ints(4, 3), ints(2, 1)
    ledger.release(fenced, fence=1)
    ledger.queue(queued)
    fenced[:], queued[:] = 5, 6
    ledger.settle(1)
    ledger.free_queued()
    assert ledger.free_list().tolist() == [2, 1, 4, 3]


@pytest.mark.parametrize(("given", "distinct"), [([3, 1, 3, 2, 1, 1], [3, 1, 2]), ([4, 2], [4, 2]), ([], [])])
def test_distinct_keeps_the_order_of_first_naming(given: list[int], distinct: list[int]) -> None:
    assert PageLedger(4).distinct(ints(*given)).tolist() == distinct
    with pytest.raises(ForeignPage):
        PageLedger(4).distinct(ints(*given, 5))


def test_the_default_holder_is_nobodys_row() -> None:
    ledger = PageLedger(2)
    ledger.take(1)
    assert ledger.holders_of(ints(1, 2)).tolist() == [CALLER, FREE]


def test_as_new_after_clear() -> None:
    ledger = used()
    ledger.clear()
    ledger.check()
    assert books(ledger) == books(PageLedger(12, need_sort=True))
    ledger.settle(5)
    assert ledger.free_queued() == 0
    assert ledger.free_pages == 12


def test_a_report_does_not_change_afterwards() -> None:
    ledger = PageLedger(3)
    pages = ledger.take(3)
    before = ledger.statistics()
    assert pages is not None
    ledger.release(pages)
    assert (before.free, before.held, before.freed) == (0, 3, {})


def overwrite(name: str, at: int, value: int) -> Callable[[PageLedger], None]:
    def damage(ledger: PageLedger) -> None:
        array = getattr(ledger._books, name)
        array[at] = value

    return damage


def miscount(name: str) -> Callable[[PageLedger], None]:
    return lambda ledger: setattr(ledger._books, name, getattr(ledger._books, name) + 1)


@pytest.mark.parametrize(
    "damage",
    [
        *(overwrite("holder", page, state) for page, state in [
            (1, FREE), (1, CACHED), (1, QUARANTINED), (12, 0), (7, 0), (7, FREE), (8, FREE), (9, FREE), (9, 5),
            (0, FREE), (1, -7),
        ]),
        *(lambda ledger, page=page: ledger._books.free.push_back(ints(page)) for page in (12, 1, 7, 8, 0, 99)),
        lambda ledger: ledger._books.released.push_back(ints(12)),
        lambda ledger: ledger._books.released.take(1),
        *(lambda ledger, page=page: ledger._books.free._ids.__setitem__(ledger._books.free._head, page)
          for page in (-1, 0, 10, 11, 13, 99)),
        miscount("held"), miscount("cached"), miscount("quarantined"),
        lambda ledger: ledger._books.waiting.clear(),
        lambda ledger: ledger._books.waiting.append((4, ints(7), True)),
        lambda ledger: ledger._books.waiting.append((4, ints(12), True)),
        lambda ledger: ledger._books.queued.clear(),
        lambda ledger: ledger._books.queued.append(ints(8)),
        lambda ledger: ledger._books.queued.append(ints(1)),
    ],
)  # fmt: skip
def test_check_finds_damaged_books(damage: Callable[[PageLedger], None]) -> None:
    ledger = used()
    damage(ledger)
    with pytest.raises(BrokenInvariant, match="'full'"):
        ledger.check()


@pytest.mark.parametrize("error", [DoubleFree, ForeignPage, InvalidArgument, BrokenInvariant])
def test_every_error_has_one_base(error: type[Exception]) -> None:
    assert issubclass(error, AllocatorError)
