"""States of a ledger: what the rows, the fences and the prefix cache do meanwhile."""

from collections.abc import Callable

import pytest

from kvloom.allocator import PageLedger, StaleState
from tests.allocator.books import books, ints, refused


def test_time_goes_on() -> None:
    """What was fenced then, and has been settled since, is free after the restore; the rest waits on."""
    ledger = PageLedger(6)
    ledger.take(5)
    ledger.release(ints(1, 2), fence=3)
    ledger.release(ints(3), fence=5)
    state = ledger.backup_state()
    ledger.settle(3)
    ledger.take(3)
    assert ledger.free_pages == 0
    ledger.restore_state(state)
    ledger.check()
    assert ledger.free_list().tolist() == [1, 2, 6]
    ledger.settle(5)
    assert ledger.free_list().tolist() == [3, 1, 2, 6]


def test_what_was_waiting_then_waits_again() -> None:
    ledger = PageLedger(4)
    ledger.take(2)
    ledger.release(ints(1), fence=3)
    before, state = books(ledger), ledger.backup_state()
    ledger.take(2)
    ledger.release(ints(3), fence=9)
    ledger.restore_state(state)
    assert books(ledger) == before
    ledger.settle(9)
    assert ledger.free_list().tolist() == [1, 3, 4]


@pytest.mark.parametrize(
    ("cached", "leave"),
    [
        (False, lambda ledger: ledger.release(ints(2, 3), 5)),
        (False, lambda ledger: ledger.release(ints(2, 3), 5, fence=8)),
        (False, lambda ledger: ledger.queue(ints(3, 2), 5)),
        (False, lambda ledger: ledger.cache(ints(2, 3), 5)),
        (False, lambda ledger: ledger.hand_over(ints(2, 3), 5, 6)),
        (True, lambda ledger: ledger.evict(ints(2, 3))),
    ],
)
def test_every_way_to_leave_a_holder_is_noticed(cached: bool, leave: Callable[[PageLedger], None]) -> None:
    ledger = PageLedger(6)
    ledger.take(3, 5)
    if cached:
        ledger.cache(ints(2, 3), 5)
    state = ledger.backup_state()
    leave(ledger)
    with refused(ledger, StaleState):
        ledger.restore_state(state)
    with pytest.raises(StaleState, match=r"2 pages .*\[2, 3\]"):
        ledger.require_restorable(state)


def test_what_is_only_asked_about_has_not_left() -> None:
    ledger = PageLedger(6)
    ledger.take(3, 5)
    state = ledger.backup_state()
    ledger.require_held(ints(2, 3), 5)
    ledger.holders_of(ints(1))
    ledger.restore_state(state)


def test_pages_that_change_hands_are_held_by_the_new_holder() -> None:
    ledger = PageLedger(6)
    ledger.take(3, 5)
    ledger.hand_over(ints(3, 1), 5, 7)
    ledger.check()
    assert ledger.holders_of(ints(1, 2, 3)).tolist() == [7, 5, 7]
    assert (ledger.held_pages, ledger.free_pages) == (3, 3)


def test_of_another_ledger() -> None:
    ours, theirs = PageLedger(4), PageLedger(4)
    state = theirs.backup_state()
    with refused(ours, StaleState):
        ours.restore_state(state)
    theirs.restore_state(state)
