"""Failures that people met with two pools (cases B12, B14, B16, B17 and traps D13 .. D17, D26, D29, D35)."""

from collections.abc import Callable

import pytest
import torch

from kvloom.allocator import (
    DoubleFree,
    GroupMisuse,
    InvalidArgument,
    MHATokenToKVPool,
    SWAKVPool,
    SWATokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from tests.allocator.swa_books import balanced, make, refused, swa_books, taken

both_ways = pytest.mark.parametrize("need_sort", [False, True], ids=["at_once", "need_sort"])
every_size = pytest.mark.parametrize("page_size", [1, 3, 4, 16])


def window(allocator: SWATokenToKVPoolAllocator, slots: list[int]) -> list[int]:
    found: list[int] = allocator.translate_loc_from_full_to_swa(torch.tensor(slots)).tolist()
    return found


# ---- B12: freeing part of a page leaves stale mapping entries, then a double free ----


@both_ways
@pytest.mark.parametrize("in_group", [False, True])
def test_b12_part_of_a_page_leaves_the_window(in_group: bool, need_sort: bool) -> None:
    """The whole page goes with its first token, and its mapping with it."""
    pool = make(8, 8, 4, need_sort)
    slots = taken(pool.alloc(8))
    assert pool.swa_available_size() == 24
    if in_group:
        pool.free_group_begin()
    pool.free_swa(slots[:1])
    assert window(pool, slots) == [0, 0, 0, 0, 8, 9, 10, 11]
    assert pool.swa_available_size() == (24 if in_group else 28)
    pool.free_swa(slots[1:4])
    assert pool.swa_available_size() == (24 if in_group else 28)
    pool.free(slots)
    pool.free_group_end()
    assert (pool.full_available_size(), pool.swa_available_size()) == (32, 32)
    balanced(pool)


@every_size
def test_b12_tokens_leave_one_by_one(page_size: int) -> None:
    """A window that slides token by token frees each page exactly once."""
    pool = make(8, 8, page_size)
    slots = taken(pool.alloc(3 * page_size))
    for i, slot in enumerate(slots):
        pool.free_swa([slot])
        pool.free_swa(slots[: i + 1])
        assert pool.swa_available_size() == (5 + i // page_size + 1) * page_size
    pool.free(slots)
    balanced(pool)


# ---- B14: 'no window page' read as slot 0, and pages that keep their previous owner's mapping ----

FreePath = Callable[[SWATokenToKVPoolAllocator, list[int]], None]


def by_token(pool: SWATokenToKVPoolAllocator, slots: list[int]) -> None:
    pool.free(slots)


def by_page(pool: SWATokenToKVPoolAllocator, slots: list[int]) -> None:
    for start in range(0, len(slots), pool.page_size):
        pool.free(slots[start : start + 1])


def window_first(pool: SWATokenToKVPoolAllocator, slots: list[int]) -> None:
    pool.free_swa(slots)
    pool.free(slots)


@both_ways
@every_size
@pytest.mark.parametrize("in_group", [False, True])
@pytest.mark.parametrize("path", [by_token, by_page, window_first])
def test_b14a_pages_that_have_lost_their_window_come_back(
    path: FreePath, in_group: bool, page_size: int, need_sort: bool
) -> None:
    pool = make(3, 3, page_size, need_sort)
    slots = taken(pool.alloc(3 * page_size))
    pool.free_swa(slots[: 2 * page_size])
    if in_group:
        pool.free_group_begin()
    path(pool, slots)
    pool.free_group_end()
    assert pool.swa_available_size() == 3 * page_size
    balanced(pool)
    drained = taken(pool.alloc(3 * page_size))
    assert sorted(window(pool, drained)) == sorted(drained) == list(range(page_size, 4 * page_size))


@both_ways
@every_size
def test_b14b_a_recycled_page_does_not_know_its_previous_owners_window(page_size: int, need_sort: bool) -> None:
    pool = make(4, 2, page_size, need_sort)
    aside = taken(pool.alloc(2 * page_size))
    pool.free_swa(aside)
    a = taken(pool.alloc(2 * page_size))
    peers = window(pool, a)
    pool.free(a)
    b = taken(pool.alloc(2 * page_size))
    assert sorted(b) == sorted(a)
    pool.free_swa(b)  # a part of B that needs no window side
    pool.free(aside)
    c = taken(pool.alloc(2 * page_size))
    kept, before = window(pool, c), swa_books(pool)
    assert sorted(kept) == sorted(peers)  # what A had, behind the pages that are B's now
    pool.free_swa(b)  # B's window slides over them
    assert swa_books(pool) == before
    assert window(pool, b) == [0] * len(b)
    pool.free(b)
    assert window(pool, c) == kept
    pool.free(c)
    balanced(pool)


def test_b14_a_page_in_the_group_keeps_no_mapping() -> None:
    pool = make(4, 4)
    slots = taken(pool.alloc(8))
    with pool.free_group():
        pool.free(slots[:4])
        assert window(pool, slots) == [0] * 4 + [8, 9, 10, 11]
        with refused(pool, DoubleFree):
            pool.free_swa(slots[:4])
    assert pool.swa_available_size() == 12


# ---- B17: only one of the two pools runs short ----


@both_ways
def test_b17_the_window_pool_runs_short(need_sort: bool) -> None:
    """None, named as the window pool's failure; nothing has changed in the other; what a window gives back serves."""
    pool = make(16, 4, 4, need_sort)
    first = taken(pool.alloc_extend([0], [12], [-1], 12))
    assert (pool.full_available_size(), pool.swa_available_size(), pool.available_size()) == (52, 4, 4)
    before = swa_books(pool)
    assert pool.alloc_extend([0], [12], [-1], 12) is None
    assert pool.alloc(8) is None
    assert (pool.statistics().failures, pool.swa_statistics().failures) == (0, 2)
    full, swa, mapping = swa_books(pool)
    assert (full, swa[1:], mapping) == (before[0], before[1][1:], before[2])
    pool.free_swa(first[:8])
    second = taken(pool.alloc_extend([0], [12], [-1], 12))
    assert pool.full_available_size() == 64 - 24
    pool.free(first + second)
    balanced(pool)


@both_ways
def test_b17_three_requests_take_turns_in_a_small_window_pool(need_sort: bool) -> None:
    """Three prompts of 12 with 4 tokens to come, window 8: as many as fit run, the others wait, all get through."""
    pool = make(16, 4, 4, need_sort)
    waiting, running, finished, rounds = 3, [], 0, 0
    while finished < 3:
        rounds += 1
        assert rounds < 60
        if waiting and (prompt := pool.alloc_extend([0], [12], [-1], 12)) is not None:
            waiting -= 1
            running.append(taken(prompt))
        for row in list(running):
            pool.free_swa(row[: max(len(row) - 8, 0) // 4 * 4])
            if len(row) == 16:
                pool.free(row)
                running.remove(row)
                finished += 1
            elif (new := pool.alloc_decode([len(row) + 1], row[-1:])) is not None:
                row.extend(taken(new))
    balanced(pool)


@both_ways
def test_b17_the_full_pool_runs_short(need_sort: bool) -> None:
    """D35 too: what the window pool could give stays there."""
    pool = make(2, 8, 4, need_sort)
    slots = taken(pool.alloc(8))
    pool.free_swa(slots)
    assert (pool.full_available_size(), pool.swa_available_size()) == (0, 32)
    for short in (
        pool.alloc(4),
        pool.alloc_extend([8, 0], [8, 1], [slots[-1], -1], 1),
        pool.alloc_decode([9], slots[-1:]),
    ):
        assert short is None
    assert (pool.statistics().failures, pool.swa_statistics().failures) == (3, 0)
    assert (pool.full_available_size(), pool.swa_available_size()) == (0, 32)
    pool.free(slots)
    balanced(pool)


# ---- traps ----


@both_ways
def test_d13_clear_inside_an_open_group(need_sort: bool) -> None:
    pool = make(4, 4, 4, need_sort)
    mapping = pool.full_to_swa_index_mapping
    pool.free_group_begin()
    pool.free(taken(pool.alloc(8)))
    pool.alloc(4)
    pool.clear()
    balanced(pool)
    assert pool.full_to_swa_index_mapping is mapping
    pool.free(taken(pool.alloc(8)))  # not in a group any more
    balanced(pool)


@both_ways
def test_d14_d15_groups_do_not_nest_and_end_in_any_case(need_sort: bool) -> None:
    pool = make(4, 4, 4, need_sort)
    slots = taken(pool.alloc(16))

    def interrupted() -> None:
        with pool.free_group():
            pool.free(slots[:4])
            pool.free_swa(slots[4:8])
            with refused(pool, GroupMisuse):
                pool.free_group_begin()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (pool.full_available_size(), pool.swa_available_size()) == (4, 8)
    pool.free_group_end()  # a second end
    pool.free(slots[4:])
    balanced(pool)


def test_d16_a_row_that_is_overwritten_before_the_group_ends() -> None:
    pool = make(4, 4)
    table = torch.tensor([taken(pool.alloc(8)), taken(pool.alloc(8))])
    others = table[1].tolist()
    pool.free_group_begin()
    pool.free(table[0, :4])
    pool.free_swa(table[0, 4:])
    table[0] = table[1]
    pool.free_group_end()
    assert (pool.full_available_size(), pool.swa_available_size()) == (4, 8)
    assert window(pool, others) == others


@both_ways
def test_d17_the_peer_is_the_one_at_the_time_of_the_free(need_sort: bool) -> None:
    """Window pages change hands between a free in a group and its end; nobody's is stranded or stolen."""
    pool = make(3, 3, 4, need_sort)
    a, b = taken(pool.alloc(4)), taken(pool.alloc(4))
    pool.free_group_begin()
    pool.free(a)
    pool.free_swa(b)
    c = taken(pool.alloc(4))
    kept = window(pool, c)
    pool.free_group_end()
    assert (pool.full_available_size(), pool.swa_available_size()) == (4, 8)
    d = taken(pool.alloc(4))
    assert window(pool, c) == kept
    assert set(window(pool, d)).isdisjoint(kept)
    assert window(pool, b) == [0] * 4
    pool.free(b + c + d)
    balanced(pool)


def test_d26_one_interface_for_all() -> None:
    """Whatever a caller may ask of the allocator of single slots, it may ask of this one."""
    verbs = {name for name in dir(TokenToKVPoolAllocator) if not name.startswith("_")}
    assert verbs <= set(dir(SWATokenToKVPoolAllocator))


@pytest.mark.parametrize(("size", "page_size"), [(100, 1), (100, 4), (101, 4)])
def test_d29_the_mapping_has_an_entry_for_each_full_slot_and_no_more(size: int, page_size: int) -> None:
    pool = SWATokenToKVPoolAllocator(size, 20, torch.float16, "cpu", None, page_size=page_size)
    assert pool.full_to_swa_index_mapping.shape == (size + page_size,)
    assert pool.full_to_swa_index_mapping.dtype == torch.int64


def test_orders_are_those_of_the_single_pools() -> None:
    """First in, first out with page size 1; ascending to the front with larger pages; in both pools."""
    tokens = make(6, 6, 1)
    tokens.alloc(5)
    tokens.free([4, 2])
    tokens.free_swa([5, 1])
    assert tokens.ledger.free_list().tolist() == [6, 4, 2]
    assert tokens.swa_ledger.free_list().tolist() == [6, 4, 2, 5, 1]
    paged = make(6, 6, 4)
    paged.alloc(20)
    paged.free([16, 9])
    paged.free_swa([20, 4])
    assert paged.ledger.free_list().tolist() == [2, 4, 6]
    assert paged.swa_ledger.free_list().tolist() == [1, 5, 2, 4, 6]


def test_a_storage_has_one_mapping() -> None:
    full, window = (
        MHATokenToKVPool(size, 4, torch.float32, 1, 1, 1, "cpu", layers=[layer]) for size, layer in ((16, 0), (8, 1))
    )
    storage = SWAKVPool(full, window)
    with pytest.raises(InvalidArgument, match="8 tokens for 12"):
        SWATokenToKVPoolAllocator(16, 12, torch.float32, "cpu", storage, page_size=4)
    SWATokenToKVPoolAllocator(16, 8, torch.float32, "cpu", storage, page_size=4)
    with pytest.raises(InvalidArgument, match="another allocator"):
        SWATokenToKVPoolAllocator(16, 8, torch.float32, "cpu", storage, page_size=4)


@both_ways
def test_b16_a_window_stays_through_chunks(need_sort: bool) -> None:
    """Page 2, window 6, chunk 4, prompt 16: what leaves is left of what the next chunk reads, not of the chunk.

    Which of it a later request may reuse is the prefix cache's to know.
    """
    pool = make(8, 8, 2, need_sort)
    row: list[int] = []
    held: set[int] = set()
    for length in (4, 8, 12, 16):
        first_read = max(len(row) - 5, 0)  # position p reads p - 5 to p
        pool.free_swa(row[: first_read // 2 * 2])
        held = {place for place, slot in enumerate(row) if pool.full_to_swa_index_mapping[slot] > 0}
        assert held == set(range(first_read // 2 * 2, len(row)))
        assert held >= set(range(first_read, len(row)))
        row += taken(pool.alloc_extend([len(row)], [length], row[-1:] or [-1], length - len(row)))
    assert held == set(range(6, 12))
    pool.free(row)
    balanced(pool)
