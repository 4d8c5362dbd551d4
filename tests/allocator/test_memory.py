"""KVMemory: its verbs, what it refuses, and what its check finds."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kvloom.allocator import (
    AllocatorError,
    BrokenInvariant,
    DoubleFree,
    InvalidArgument,
    KVMemory,
    Match,
    PoolSpec,
    Shortfall,
)
from tests.allocator.books import ints, memory_books, memory_refuses
from tests.allocator.memories import NOTHING, admitted, bound, make

FULL = PoolSpec()


# ---- who may enter, and what shortage looks like ----


def test_a_row_comes_with_the_pages_of_its_length() -> None:
    memory = make()
    rows = [admitted(memory, length) for length in (9, 4, 1)]
    assert len(set(rows)) == 3
    assert [int(memory.tables["full"].page_counts[row]) for row in rows] == [3, 1, 1]
    assert [int(memory.tables["full"].lengths[row]) for row in rows] == [9, 4, 1]
    memory.check()


@pytest.mark.parametrize(("length", "spare"), [(32, 1), (29, 1), (1, 8), (0, 9)])
def test_who_does_not_fit_now_changes_nothing(length: int, spare: int) -> None:
    memory = make(pages=8)
    before = memory_books(memory)
    assert memory.admit(NOTHING, length, spare) is None
    assert memory_books(memory) == before


def test_spare_pages_stay_free() -> None:
    memory = make(pages=8)
    assert memory.admit(NOTHING, 16, 4) is not None
    assert memory.admit(NOTHING, 1, 4) is None
    assert memory.admit(NOTHING, 4, 3) is not None


def test_without_a_row_nobody_enters() -> None:
    memory = make(max_rows=2)
    admitted(memory, 1)
    admitted(memory, 1)
    before = memory_books(memory)
    assert memory.admit(NOTHING, 1) is None
    assert memory_books(memory) == before


def test_a_shortage_is_a_value_with_everything_in_it() -> None:
    memory = make(pages=4)
    rows = ints(admitted(memory, 6), admitted(memory, 4))
    before = memory_books(memory)
    assert memory.reserve(rows, ints(9, 5)) == Shortfall("full", 2, 1, 0, 1, 4)
    assert memory.statistics().pools["full"].failures == 1
    assert memory_books(memory)[3:] == before[3:]
    assert memory.reserve(rows[:1], ints(9)) is None
    memory.check()


def test_what_is_given_back_waits_for_its_step() -> None:
    memory = make(pages=4, max_rows=2)
    first, second = admitted(memory, 8), admitted(memory, 8)
    memory.release([first, second], [3, 4], "abort")
    report = memory.statistics()
    assert (report.pools["full"].quarantined, report.rows_quarantined, report.rows_held) == (4, 2, 0)
    assert memory.admit(NOTHING, 1) is None
    memory.settle(3)
    memory.check()
    assert admitted(memory, 8) == first
    assert memory.admit(NOTHING, 1) is None
    memory.settle(4)
    assert admitted(memory, 8) == second
    assert memory.statistics().pools["full"].freed == {"abort": 4}


def test_statistics_add_up() -> None:
    memory = make(pages=8, page_size=4)
    rows = [admitted(memory, 5), admitted(memory, 4), admitted(memory, 1)]
    memory.release(rows[1:2], [7])
    report = memory.statistics()
    pool = report.pools["full"]
    assert (pool.free, pool.held, pool.cached, pool.quarantined) == (4, 3, 0, 1)
    assert pool.capacity == pool.free + pool.held + pool.cached + pool.quarantined
    assert (pool.page_size, pool.slack_tokens, pool.allocated, pool.peak_held) == (4, 12 - 6, 4, 4)
    assert (report.rows_capacity, report.rows_held, report.rows_quarantined) == (4, 2, 1)


def test_who_fits_in_one_pool_only_takes_nothing_from_the_cache() -> None:
    """The full pool would have room once the cache gives up its pages; the window's has none, and none to give up."""
    memory = KVMemory(
        (FULL, PoolSpec("swa", window=5)), capacity_tokens={"full": 32, "swa": 12}, page_size=4, max_rows=4
    )
    tokens = ints(*range(12))
    row = admitted(memory, 12)
    assert memory.reserve(ints(row), ints(12)) is None
    memory.publish(ints(row), ints(12), lambda _, start, stop: tokens[start:stop])
    memory.release([row], [-1])
    row = admitted(memory, 12)
    assert memory.reserve(ints(row), ints(12)) is None  # the three pages of the window's pool
    pools = memory.statistics().pools
    assert (pools["full"].free, pools["full"].evictable, pools["swa"].free, pools["swa"].evictable) == (2, 3, 0, 0)
    before = memory.statistics()
    assert memory.admit(memory.match(ints(*range(50, 66))), 16) is None
    after = memory.statistics()
    assert after.prefix.evicted == before.prefix.evicted
    assert [(pool.free, pool.evictable) for pool in after.pools.values()] == [(2, 3), (0, 0)]
    memory.check()


# ---- misuse ----


@pytest.mark.parametrize(
    ("misuse", "error"),
    [
        (lambda m: m.admit(NOTHING, -3), InvalidArgument),
        (lambda m: m.admit(NOTHING, 4, -1), InvalidArgument),
        (lambda m: m.admit(NOTHING, 21), InvalidArgument),  # longer than max_seq: never
        (lambda m: m.admit(Match(4, {"full": ints(1)}), 8), InvalidArgument),  # page 1 is not the cache's
        (lambda m: m.admit(Match(8, {"full": ints(1, 2)}), 7), InvalidArgument),  # shorter than what is cached of it
        (lambda m: m.reserve(ints(0, 1), ints(5, 21)), InvalidArgument),
        (lambda m: m.reserve(ints(0, 2), ints(9, 8)), DoubleFree),
        (lambda m: m.reserve(ints(0, -1), ints(9, 8)), InvalidArgument),
        (lambda m: m.reserve(ints(0, 0), ints(9, 9)), DoubleFree),
        (lambda m: m.release([0, 2], [-1, -1]), DoubleFree),
        (lambda m: m.release([0, 1, 0], [-1, -1, -1]), DoubleFree),
        (lambda m: m.release([0, 4], [-1, -1]), InvalidArgument),
        (lambda m: m.release([0, 1], [-1]), InvalidArgument),
        (lambda m: m.release([0], []), InvalidArgument),
    ],
)
def test_misuse_changes_nothing(misuse: Callable[[KVMemory], object], error: type[AllocatorError]) -> None:
    memory = make(max_seq=20)
    for _ in range(3):
        admitted(memory, 5)
    memory.release([2], [8])
    with memory_refuses(memory, error):
        misuse(memory)


@pytest.mark.parametrize(
    "wrong",
    [
        {"page_size": 0},
        {"page_size": -4},
        {"capacity_tokens": 0},
        {"capacity_tokens": 3},
        {"max_rows": 0},
        {"max_seq": 0},
        {"max_seq": -1},
        {"pools": []},
        {"pools": [PoolSpec(), PoolSpec(layers=(1,))]},  # two of one name
        {"pools": [PoolSpec(), PoolSpec("swa", window=8)], "capacity_tokens": {"full": 32}},
        {"capacity_tokens": {"full": 32, "swa": 32}},
        {"capacity_tokens": {}},
        {"capacity_tokens": {"full": 3}},
        {"lengths": [0]},
    ],
)
def test_numbers_that_make_no_sense(wrong: dict[str, Any]) -> None:
    numbers: dict[str, Any] = {"capacity_tokens": 32, "page_size": 4, "max_rows": 4}
    with pytest.raises(InvalidArgument):
        KVMemory(**{**numbers, **wrong})


@pytest.mark.parametrize(
    ("window", "page_size", "least"),
    [(1, 4, 2), (2, 4, 3), (5, 4, 3), (6, 4, 4), (4, 1, 5), (16, 16, 3), (17, 16, 3), (18, 16, 4)],
)
def test_a_window_pool_holds_a_window_and_the_page_that_it_grows_into(window: int, page_size: int, least: int) -> None:
    """The newest token sees `window - 1` others, which may begin with the last slot of a page."""
    pools = (PoolSpec(), PoolSpec("swa", window=window))
    sizes = {"full": 100 * page_size, "swa": least * page_size}
    assert KVMemory(pools, capacity_tokens=sizes, page_size=page_size).statistics().pools["swa"].capacity == least
    with pytest.raises(InvalidArgument, match=f"pool 'swa': {least - 1} pages of {page_size}; a row needs {least}"):
        KVMemory(pools, capacity_tokens={**sizes, "swa": sizes["swa"] - 1}, page_size=page_size)


def swap_holders(memory: KVMemory) -> None:
    pages = memory.tables["full"].pages
    pages[0, 0], pages[1, 0] = pages[1, 0], pages[0, 0]


def write(name: str, value: int) -> Callable[[KVMemory], None]:
    def damage(memory: KVMemory) -> None:
        getattr(memory.tables["full"], name)[1] = value

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        swap_holders,
        lambda memory: memory.allocators["full"].alloc(4),
        lambda memory: memory.allocators["full"].ledger.release(ints(3), 1),
        lambda memory: memory.allocators["full"].ledger.cache(ints(3), 1),
        write("page_counts", 0),
        write("page_counts", 2),
        write("lengths", 5),
        write("lengths", -1),
        lambda memory: memory.tables["full"].close(ints(1), -1),
    ],
)
def test_check_finds_damaged_books(damage: Callable[[KVMemory], None]) -> None:
    memory = make()
    admitted(memory, 8)
    assert admitted(memory, 3) == 1
    memory.check()
    damage(memory)
    with pytest.raises(BrokenInvariant):
        memory.check()


# ---- what a runner gets ----


@dataclass
class Needs:
    pools: tuple[PoolSpec, ...]
    max_seq: int = 24
    device: torch.device = torch.device("cpu")
    needs: frozenset[str] = frozenset()


@dataclass
class Runner:
    spec: Needs


def test_for_a_runner_memory_is_what_its_spec_says() -> None:
    pool = PoolSpec("global", layers=(1, 3), kv_heads=2, head_dim=4, dtype=torch.float16)
    memory = KVMemory.for_runner(Runner(Needs((pool,))), capacity_tokens=35, page_size=8, max_rows=3)
    capacity = memory.statistics().pools["global"].capacity
    assert (memory.specs, capacity * 8, memory.max_rows, memory.max_seq) == ((pool,), 32, 3, 24)
    assert memory.tables["global"].max_pages == 3
    storage = memory.pools["global"]
    assert storage is memory.allocators["global"].get_kvcache()
    assert storage.layers == (1, 3)
    assert storage.get_key_buffer(3).shape == (40, 2, 4)
    assert storage.get_key_buffer(3).dtype == torch.float16
    assert list(memory.statistics().pools) == ["global"]
    assert not bound(memory, prefill={admitted(memory, 3): (0, 3)}).page_table


def test_the_report_says_who_holds_what() -> None:
    memory = KVMemory(capacity_tokens=64, page_size=4, max_rows=8)
    first, second = admitted(memory, 6), admitted(memory, 4)
    memory.release([admitted(memory, 9)], [5])
    report = memory.statistics()
    pool = report.pools["full"]
    assert (pool.held, pool.quarantined, pool.peak_held, pool.slack_tokens) == (3, 3, 6, 2)
    assert pool.fragmentation == 2 / 12
    assert str(report) == (
        "pool 'full' of 16 pages of 4: 10 free, 3 held by requests (at most 6 so far; 2 slots unused), 0 by the prefix "
        "cache, 3 waiting for a step in flight; 2 of 8 rows held, 1 waiting"
    )
    memory.release([first, second], [-1, -1])
    assert memory.statistics().pools["full"].fragmentation == 0
