"""Snapshot and rollback lose no page and duplicate none (case B11, trap D27); nested ones at random: `conformance`."""

import doctest

import pytest
import torch

from kvloom.allocator import (
    AllocatorError,
    AllocatorState,
    BaseTokenToKVPoolAllocator,
    GroupMisuse,
    StaleState,
    SWATokenToKVPoolAllocator,
)
from tests.allocator.books import books
from tests.allocator.conformance.kinds import KINDS, WRAPPINGS, Kind
from tests.allocator.test_cases import both_ways, drain, paged, per_token, taken

each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def everything(allocator: BaseTokenToKVPoolAllocator) -> list[object]:
    """All that an allocator knows, the open group included: what is queued is quarantined, in an order."""
    known: list[object] = [books(ledger) for ledger in allocator._ledgers()]
    known += [[pages.tolist() for pages in ledger._books.queued] for ledger in allocator._ledgers()]
    if isinstance(allocator, SWATokenToKVPoolAllocator):
        known += [allocator.full_to_swa_index_mapping.tolist(), allocator._peer.tolist()]
    return known


def refuses(allocator: BaseTokenToKVPoolAllocator, state: object, error: type[AllocatorError], match: str) -> None:
    """The restore raises exactly that, and changes nothing."""
    before = everything(allocator)
    with pytest.raises(error, match=match) as caught:
        allocator.restore_state(state)  # type: ignore[arg-type]
    assert type(caught.value) is error
    assert everything(allocator) == before
    allocator.check()


@both_ways
def test_what_was_taken_since_is_free_again(need_sort: bool) -> None:
    pool = paged(8, 4, need_sort)
    state = pool.backup_state()
    assert pool.available_size() == 32
    taken(pool.alloc_extend([0], [10], [-1], 10))
    assert pool.available_size() == 20
    pool.restore_state(state)
    assert pool.available_size() == 32
    drain(pool)


@both_ways
@each_kind
def test_everything_is_restored(kind: Kind, need_sort: bool) -> None:
    """D27 too: free order, released list, open group, holders, counters, and the window's mapping."""
    size = kind.page_size
    pool = kind.make(9, 9, need_sort)
    pages = [taken(pool.alloc(size)) for _ in range(8)]
    pool.free(torch.cat((pages[6], pages[2])))
    pool.free_group_begin()
    pool.free(pages[4])
    before, state = everything(pool), pool.backup_state()
    pool.free_group_end()
    taken(pool.alloc(4 * size))  # merges the lists if they are two
    assert pool.alloc(9 * size) is None
    pool.free(taken(pool.alloc(0)))
    assert everything(pool) != before
    pool.restore_state(state)
    assert everything(pool) == before
    pool.free(pages[0])  # in the group, which is open again
    assert pool.available_size() == 3 * size
    pool.free_group_end()
    assert pool.available_size() == 5 * size


@both_ways
@each_kind
def test_a_page_given_back_since_makes_it_void(kind: Kind, need_sort: bool) -> None:
    """The free is kept, whether or not somebody has taken the page again, or waits in a group."""
    for in_group in (False, True):
        pool = kind.make(8, 8, need_sort)
        b = taken(pool.alloc(2 * kind.page_size))
        state = pool.backup_state()
        if in_group:
            pool.free_group_begin()
        pool.free(b[: kind.page_size])
        pool.free_group_end()
        refuses(pool, state, StaleState, r"1 pages .*\[1\]")
        everyone = taken(pool.alloc(7 * kind.page_size))
        refuses(pool, state, StaleState, r"\[1\]")
        pool.free(everyone)
        refuses(pool, state, StaleState, r"\[1\]")
        assert pool.available_size() == 7 * kind.page_size


@each_kind
def test_pages_taken_since_may_be_freed_or_not(kind: Kind) -> None:
    pool = kind.make(8, 8, False)
    live = taken(pool.alloc(2 * kind.page_size))
    state = pool.backup_state()
    before = everything(pool)
    first, second = (taken(pool.alloc(2 * kind.page_size)) for _ in range(2))
    pool.free(first)
    pool.restore_state(state)
    assert everything(pool) == before
    with pytest.raises(AllocatorError):
        pool.free(second)
    pool.free(live)
    assert pool.available_size() == 8 * kind.page_size


def test_two_nested_ones_oldest_first() -> None:
    pool = paged(8, 4)
    older = pool.backup_state()
    pool.alloc(4)
    younger = pool.backup_state()
    pool.alloc(4)
    pool.restore_state(older)
    refuses(pool, younger, StaleState, "taken before this one has been restored")
    drain(pool)


def test_two_nested_ones_youngest_first() -> None:
    pool = paged(8, 4)
    older = pool.backup_state()
    a = taken(pool.alloc(4))
    younger = pool.backup_state()
    pool.alloc(8)
    pool.restore_state(younger)
    assert pool.available_size() == 28
    pool.free(a)  # taken after the older one
    pool.restore_state(older)
    drain(pool)


def test_twice() -> None:
    pool = per_token(8)
    state = pool.backup_state()
    pool.restore_state(state)
    pool.alloc(2)
    refuses(pool, state, StaleState, "restored already")


@each_kind
def test_inside_a_group_that_was_not_open(kind: Kind) -> None:
    pool = kind.make(8, 8, False)
    state = pool.backup_state()
    a = taken(pool.alloc(2 * kind.page_size))
    with pool.free_group():
        pool.free(a)
        refuses(pool, state, GroupMisuse, "end it first")
    pool.restore_state(state)  # it was refused, not used up
    assert pool.available_size() == 8 * kind.page_size


def test_inside_another_group_than_the_one_that_was_open() -> None:
    pool = per_token(8)
    pool.free_group_begin()
    state = pool.backup_state()
    pool.free_group_end()
    pool.free_group_begin()
    refuses(pool, state, GroupMisuse, "not open when")
    pool.free_group_end()
    pool.restore_state(state)
    refuses(pool, None, StaleState, "not a state")
    with pytest.raises(GroupMisuse):  # open again
        pool.free_group_begin()


def test_inside_the_group_that_was_open() -> None:
    pool = paged(4, 4)
    a = taken(pool.alloc(16))
    with pool.free_group():
        pool.free(a[:4])
        state = pool.backup_state()
        pool.free(a[4:8])
        refuses(pool, state, StaleState, r"\[2\]")
        again = pool.backup_state()
        pool.restore_state(again)
        assert pool.available_size() == 0
    assert pool.available_size() == 8


@each_kind
def test_from_before_a_clear(kind: Kind) -> None:
    pool = kind.make(4, 4, False)
    state = pool.backup_state()
    pool.clear()
    refuses(pool, state, StaleState, "clear")


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_of_another_allocator_or_no_state_at_all(wrapping: str) -> None:
    pools = [per_token(8), per_token(8), paged(4, 4)]
    wrapped = WRAPPINGS[wrapping](pools[0])
    foreign_states: list[object] = [*(pool.backup_state() for pool in pools[1:]), None, 3, "state", []]
    for foreign in foreign_states:
        with pytest.raises(StaleState, match="not a state"):
            wrapped.restore_state(foreign)
    assert wrapped.available_size() == 8


def test_swa_a_window_that_has_slid_since() -> None:
    pool = SWATokenToKVPoolAllocator(32, 16, torch.float16, "cpu", None, page_size=4)
    a = taken(pool.alloc(8))
    state = pool.backup_state()
    pool.free_swa(a[:4])
    refuses(pool, state, StaleState, "'swa'")
    fresh = pool.backup_state()
    pool.free_swa(a[:4])  # gone already: nothing is given back
    pool.restore_state(fresh)


def test_swa_both_pools_and_the_mapping() -> None:
    pool = SWATokenToKVPoolAllocator(32, 16, torch.float16, "cpu", None, page_size=4)
    mapping = pool.full_to_swa_index_mapping
    state, before = pool.backup_state(), everything(pool)
    slots = taken(pool.alloc_extend([0], [10], [-1], 10))
    assert mapping[slots].all()
    pool.free_swa(slots[:4])
    pool.restore_state(state)
    assert not mapping.any()
    assert pool.full_to_swa_index_mapping is mapping
    assert everything(pool) == before


def test_a_state_that_nobody_remembers_costs_nothing() -> None:
    pool = per_token(8)
    states: list[AllocatorState] = [pool.backup_state() for _ in range(3)]
    snapshots = pool.ledger._snapshots
    assert len(snapshots.outstanding) == 3
    del states[1]
    assert len(snapshots.outstanding) == 2
    pool.restore_state(states[1])
    assert len(snapshots.outstanding) == 1
    states.clear()
    assert not snapshots.outstanding


def test_the_docstrings_example() -> None:
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner()
    examples = finder.find(BaseTokenToKVPoolAllocator.backup_state, "backup_state", globs={})
    assert sum(runner.run(example).attempted for example in examples) > 5
    assert runner.failures == 0
