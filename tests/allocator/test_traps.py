"""What goes wrong in known allocators, and does not here: traps D1 to D36.

Each has a test that names it, here or where its subject is; the last test finds them all.
"""

import ast
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import kvloom.allocator
from kvloom.allocator import (
    DoubleFree,
    ForeignPage,
    GroupMisuse,
    KVMemory,
    Match,
    PagedTokenToKVPoolAllocator,
    PageLedger,
    PoolSpec,
    Shortfall,
)
from tests.allocator.books import ints, refused
from tests.allocator.test_cases import Pool, both_ways, drain, paged, per_token, taken

Make = Callable[[bool], Pool]

both_pools = pytest.mark.parametrize(
    "make",
    [lambda need_sort: per_token(16, need_sort), lambda need_sort: paged(4, 4, need_sort)],
    ids=["token", "paged"],
)


@both_ways
@both_pools
def test_d13_clear_inside_an_open_group(make: Make, need_sort: bool) -> None:
    pool = make(need_sort)
    a = taken(pool.alloc(8))
    pool.free_group_begin()
    pool.free(a)
    pool.clear()
    assert pool.available_size() == 16
    pool.free(taken(pool.alloc(8)))  # not in a group any more
    assert pool.available_size() == 16
    with pool.free_group():  # and a new one can be opened
        pool.free(taken(pool.alloc(4)))
        assert pool.available_size() == 12
    drain(pool)


@both_ways
@both_pools
def test_d13_clear_inside_the_block_of_a_group(make: Make, need_sort: bool) -> None:
    pool = make(need_sort)
    with pool.free_group():
        pool.free(taken(pool.alloc(8)))
        pool.clear()
    drain(pool)


@both_ways
@both_pools
def test_d14_a_group_inside_a_group(make: Make, need_sort: bool) -> None:
    pool = make(need_sort)
    a = taken(pool.alloc(16))
    pool.free_group_begin()
    pool.free(a[:4])
    with refused(pool.ledger, GroupMisuse):
        pool.free_group_begin()
    pool.free(a[4:8])
    pool.free_group_end()
    assert pool.available_size() == 8
    b = taken(pool.alloc(4))
    pool.free_group_end()  # a second end
    assert pool.available_size() == 4
    drain(pool, kept=[*b.tolist(), *a[8:].tolist()])


@both_ways
@both_pools
def test_d15_an_exception_inside_a_group(make: Make, need_sort: bool) -> None:
    pool = make(need_sort)
    a = taken(pool.alloc(16))

    def interrupted() -> None:
        with pool.free_group():
            pool.free(a[:4])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert pool.available_size() == 4
    pool.free(a[4:8])
    assert pool.available_size() == 8
    drain(pool, kept=a[8:].tolist())


@both_ways
@pytest.mark.parametrize("in_group", [False, True])
def test_d19_two_halves_of_a_page_in_two_calls(in_group: bool, need_sort: bool) -> None:
    """In a group or not, it means the same: the first call frees the page, the second is refused."""
    pool = paged(4, 4, need_sort)
    a = taken(pool.alloc(16))
    if in_group:
        pool.free_group_begin()
    pool.free(a[:2])
    with refused(pool.ledger, DoubleFree):
        pool.free(a[2:4])
    with refused(pool.ledger, DoubleFree):
        pool.free(a[2:12])  # nor are the pages beside it freed
    pool.free_group_end()
    assert pool.available_size() == 4
    drain(pool, kept=a[4:].tolist())


@both_ways
def test_d19_a_row_whose_page_was_freed_by_its_tail_cannot_go_on(need_sort: bool) -> None:
    pool = paged(4, 4, need_sort)
    row = taken(pool.alloc_extend([0], [6], [-1], 6))
    pool.free(row[-1:])
    with refused(pool.ledger, ForeignPage):
        pool.alloc_decode([7], row[-1:])
    with refused(pool.ledger, ForeignPage):
        pool.alloc_extend([6], [12], row[-1:], 6)
    drain(pool, kept=row[:4].tolist())


@both_pools
def test_d20_a_double_free_among_released_pages(make: Make) -> None:
    pool = make(True)
    a = taken(pool.alloc(12))
    pool.free(a[:8])
    with refused(pool.ledger, DoubleFree):
        pool.free(a[4:8])
    b = taken(pool.alloc(8))  # merges the lists
    assert pool.statistics().sorts == 1
    pool.free(b)
    with refused(pool.ledger, DoubleFree):
        pool.free(torch.cat((a[8:], b[:4])))
    drain(pool, kept=a[8:].tolist())


@both_ways
@both_pools
def test_d21_legal_exhaustion_is_none_and_misuse_raises_whatever_the_mode(make: Make, need_sort: bool) -> None:
    """With all checks on the one is still no error; the other does not hang on asserts, which `python -O` removes."""
    pool = make(need_sort)
    a = taken(pool.alloc(16))
    assert pool.alloc(4) is None
    if isinstance(pool, PagedTokenToKVPoolAllocator):
        assert pool.alloc_decode([5], a[3:4]) is None
        assert pool.alloc_extend([4, 0], [16, 1], [int(a[3]), -1], 13) is None
    pool.free(a)
    with refused(pool.ledger, DoubleFree):
        pool.free(a)
    sources = list(Path(kvloom.allocator.__path__[0]).rglob("*.py"))
    assert len(sources) > 10
    for source in sources:
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            assert not isinstance(node, ast.Assert), f"{source}:{node.lineno}"
            assert not (isinstance(node, ast.Name) and node.id == "__debug__"), source


def test_d22_lists_are_merged_only_when_the_free_one_is_really_short() -> None:
    """An estimate of one page per row would see 8 pages needed, and sort, where one is."""
    pool = paged(20, 4, need_sort=True)
    slots = taken(pool.alloc_extend([0] * 8, [5] * 7 + [4], [-1] * 8, 39)).tolist()
    pool.free(taken(pool.alloc(12)))
    assert pool.ledger.free_list().tolist() == [19, 20, 16, 17, 18]
    last = [*slots[4:35:5], slots[38]]
    assert taken(pool.alloc_decode([6] * 7 + [5], last))[-1] == 19 * 4
    assert taken(pool.alloc_extend([6] * 7, [8] * 7, [slot + 1 for slot in last[:7]], 14)).shape == (14,)
    assert taken(pool.alloc_extend([0] * 2, [1, 0], [-1] * 2, 1)).tolist() == [20 * 4]
    assert pool.statistics().sorts == 0
    assert pool.ledger.free_list().tolist() == [16, 17, 18]
    pool.alloc(4)
    assert pool.statistics().sorts == 1


def peak_bytes(action: Callable[[], object]) -> int:
    """Most memory that Python and numpy asked for during `action`."""
    tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        action()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


@both_ways
@pytest.mark.parametrize("page_size", [1, 4])
def test_d23_what_a_call_moves_does_not_grow_with_the_pool(page_size: int, need_sort: bool) -> None:
    pages = 500_000
    pool = per_token(pages, need_sort) if page_size == 1 else paged(pages, page_size, need_sort)
    a = taken(pool.alloc(8 * page_size))
    assert peak_bytes(pool.ledger.free_list) > 4 * (pages - 8)  # so a copy of the list would show
    small = 100_000

    def in_a_group() -> None:
        with pool.free_group():
            pool.free(a[4 * page_size : 6 * page_size])

    assert peak_bytes(lambda: pool.free(a[: 4 * page_size])) < small
    assert peak_bytes(in_a_group) < small
    assert peak_bytes(lambda: pool.alloc(2 * page_size)) < small
    if isinstance(pool, PagedTokenToKVPoolAllocator):
        assert peak_bytes(lambda: pool.alloc_extend([0, 0], [5, 6], [-1, -1], 11)) < small


def test_d23_nor_does_what_a_fence_or_the_prefix_cache_moves() -> None:
    ledger = PageLedger(500_000)
    ledger.take(8, 3)
    small = 100_000
    assert peak_bytes(lambda: ledger.release(ints(1, 2), 3, fence=4)) < small
    assert peak_bytes(lambda: ledger.settle(4)) < small
    assert peak_bytes(lambda: ledger.cache(ints(3, 4), 3)) < small
    assert peak_bytes(lambda: ledger.evict(ints(3))) < small
    assert peak_bytes(ledger.statistics) < small


@both_ways
@both_pools
def test_d24_results_are_the_callers_own(make: Make, need_sort: bool) -> None:
    """They hold no memory of the pool, and what is written to them changes nothing."""
    pool = make(need_sort)
    results = [taken(pool.alloc(4)) for _ in range(3)]
    if isinstance(pool, PagedTokenToKVPoolAllocator):
        results += [taken(pool.alloc_extend([0], [2], [-1], 2)), taken(pool.alloc_decode([3], [4 * 4 + 1]))]
    kept = []
    for slots in results:
        assert slots.untyped_storage().nbytes() == slots.numel() * 8
        kept += slots.tolist()
        slots.fill_(0)
    held_to_the_end = -len(kept) % pool.page_size
    kept += [kept[-1] + 1 + i for i in range(held_to_the_end)]
    drain(pool, kept=kept)


def test_d24_what_was_given_in_is_the_callers_own() -> None:
    pool = paged(4, 4)
    last = torch.tensor([-1])
    lengths = torch.tensor([5])
    pool.alloc_extend(torch.tensor([0]), lengths, last, 5)
    freed = torch.tensor([4, 8])
    pool.free(freed)
    assert (last.tolist(), lengths.tolist(), freed.tolist()) == ([-1], [5], [4, 8])
    freed.zero_()
    drain(pool)


def test_d33_a_shortage_has_a_pool_and_numbers() -> None:
    """The row verbs say what is missing; the public ones say None, and which pool it was is counted."""
    memory = KVMemory([PoolSpec("global")], capacity_tokens=64, page_size=16)
    rows = ints(*(row for row in (memory.admit(Match(0, {}), 16) for _ in range(2)) if row is not None))
    assert memory.reserve(rows, ints(32, 49)) == Shortfall(pool="global", need=4, free=2, evictable=0, fits=1, upto=32)
    assert memory.allocators["global"].alloc(64) is None
    report = memory.statistics().pools["global"]
    assert (report.pool, report.failures, report.free) == ("global", 2, 2)


def test_d32_pages_have_owners_and_watermarks_and_are_counted() -> None:
    memory = KVMemory(capacity_tokens=64, page_size=16)
    row = memory.admit(Match(0, {}), 20, spare=2)
    assert row is not None
    assert memory.admit(Match(0, {}), 16, spare=2) is None  # it would fit, but for what is kept back
    ledger = memory.allocators["full"].ledger
    assert ledger.holders_of(ints(1, 2, 3)).tolist() == [row, row, -1]
    memory.release([row], [-1], "abort")
    report = memory.statistics().pools["full"]
    assert (report.allocated, report.freed, report.peak_held) == (2, {"abort": 2}, 2)


def test_d32_allocators_share_nothing() -> None:
    """One that works, on the same device, in the middle of another's batch."""
    first, second = paged(8, 4), paged(8, 4)
    a = taken(first.alloc_extend([0], [6], [-1], 6))
    b = taken(second.alloc_extend([0, 0], [9, 1], [-1, -1], 10))
    assert taken(first.alloc_decode([7], a[-1:])).tolist() == [10]
    assert taken(second.alloc_decode([10, 2], b[[8, 9]])).tolist() == [13, 17]
    assert (a.tolist(), b.tolist()) == ([4, 5, 6, 7, 8, 9], [4, 5, 6, 7, 8, 9, 10, 11, 12, 16])


def test_d34_the_order_of_reuse_is_the_documented_one() -> None:
    """By class, as their users know them: the token allocator first in, first out; the paged one last in, first out."""
    tokens, pages = per_token(4), paged(4, 4)
    for pool in (tokens, pages):
        size = pool.page_size
        pool.alloc(4 * size)
        pool.free([3 * size, size])
        pool.free([2 * size])
    assert taken(tokens.alloc(3)).tolist() == [3, 1, 2]
    assert taken(pages.alloc(12))[::4].tolist() == [8, 4, 12]


def test_every_trap_has_a_test() -> None:
    """That has its number in its name or in its docstring."""
    tests = Path(__file__).parent.parent
    named: dict[str, set[str]] = {}
    for folder in ("allocator", "gpu"):
        for path in (tests / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                    words = re.findall(r"\bd[0-9]+\b", node.name.replace("_", " "))
                    words += re.findall(r"\bD[0-9]+\b", ast.get_docstring(node) or "")
                    for word in words:
                        named.setdefault(word.upper(), set()).add(path.name)
    assert sorted(named, key=lambda name: int(name[1:])) == [f"D{number}" for number in range(1, 37)]
    of_the_window = {"D13", "D17", "D26", "D29", "D35"}
    assert all("test_swa_cases.py" in named[trap] for trap in of_the_window)
