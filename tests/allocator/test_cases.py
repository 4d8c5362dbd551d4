"""Failures that people met in page allocators (cases B01 .. B10), as scenarios with their right results.

Each is a class of failures, not one input, so most run with several page sizes and both ways to keep freed pages.
"""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from kvloom.allocator import (
    DoubleFree,
    ForeignPage,
    InvalidArgument,
    PagedTokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from tests.allocator.books import refused
from tests.allocator.watched import WatchedKernels

Pool = PagedTokenToKVPoolAllocator | TokenToKVPoolAllocator

both_ways = pytest.mark.parametrize("need_sort", [False, True], ids=["at_once", "need_sort"])


def paged(pages: int, page_size: int, need_sort: bool = False) -> PagedTokenToKVPoolAllocator:
    return PagedTokenToKVPoolAllocator(pages * page_size, page_size, torch.float16, "cpu", None, need_sort)


def per_token(size: int, need_sort: bool = False) -> TokenToKVPoolAllocator:
    return TokenToKVPoolAllocator(size, torch.float16, "cpu", None, need_sort)


def taken(slots: torch.Tensor | None) -> torch.Tensor:
    assert slots is not None
    return slots


def drain(pool: Pool, *, kept: Sequence[int] = ()) -> None:
    """What is left, with what is still held, is every slot of the pool exactly once."""
    pool.ledger.check()
    left = taken(pool.alloc(pool.available_size())).tolist()
    first = pool.page_size
    assert sorted([*left, *kept]) == list(range(first, first + pool.num_pages * pool.page_size))
    assert pool.alloc(pool.page_size) is None


# ---- B01: a page freed twice is later owned by two requests ----


@both_ways
def test_b01_slots_freed_in_two_calls(need_sort: bool) -> None:
    pool = paged(8, 4, need_sort)
    a = taken(pool.alloc(8))
    assert pool.available_size() == 24
    pool.free(a)
    with refused(pool.ledger, DoubleFree):
        pool.free(a)
    assert pool.available_size() == 32
    drain(pool)


@both_ways
def test_b01_slots_named_twice_in_one_call(need_sort: bool) -> None:
    pool = paged(8, 4, need_sort)
    a = taken(pool.alloc(8))
    pool.free(torch.cat((a, a[:3])))
    assert pool.available_size() == 32
    drain(pool)


@both_ways
def test_b01_slots_named_twice_in_one_call_page_size_1(need_sort: bool) -> None:
    pool = per_token(16, need_sort)
    a = taken(pool.alloc(4))
    pool.free(a[[0, 0, 1, 2, 3]])
    assert pool.available_size() == 16
    with refused(pool.ledger, DoubleFree):
        pool.free(a[:1])
    drain(pool)


def test_b01_repeats_do_not_change_the_order_in_which_slots_come_back() -> None:
    pool = per_token(4)
    pool.alloc(4)
    pool.free([3, 1, 3, 2, 1])
    assert taken(pool.alloc(3)).tolist() == [3, 1, 2]


@both_ways
@pytest.mark.parametrize("in_group", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
def test_b01_ids_that_nobody_was_given(page_size: int, in_group: bool, need_sort: bool) -> None:
    """D18 too: never allocated, the padding slots, negative, past the pool; alone and among good ones."""
    pool = per_token(16, need_sort) if page_size == 1 else paged(4, 4, need_sort)
    a = taken(pool.alloc(8))
    if in_group:
        pool.free_group_begin()
    for wrong, error in (
        (15, DoubleFree),  # free already: it was never handed out
        (0, ForeignPage),
        (page_size - 1, ForeignPage),
        (-1, ForeignPage),
        (-(2**40), ForeignPage),
        (16 + page_size, ForeignPage),
        (10**6, ForeignPage),
        (2**32 + page_size, ForeignPage),
    ):
        for given in ([wrong], [*a.tolist(), wrong], [wrong, *a.tolist()]):
            with refused(pool.ledger, error):
                pool.free(given)
    pool.free(a)
    pool.free_group_end()
    assert pool.available_size() == 16
    drain(pool)


# ---- B03: a free group keeps the caller's view, which changes before the flush ----


@both_ways
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("as_array", [False, True])
def test_b03_a_row_that_is_overwritten_before_the_group_ends(page_size: int, as_array: bool, need_sort: bool) -> None:
    """D16 too."""
    pool = per_token(16, need_sort) if page_size == 1 else paged(4, 4, need_sort)
    block_table = torch.stack((taken(pool.alloc(4)), taken(pool.alloc(4))))
    first, second = block_table[0].tolist(), block_table[1].tolist()
    assert pool.available_size() == 8
    shadow = dict.fromkeys(second, "R2")
    pool.free_group_begin()
    pool.free(block_table.numpy()[0, 0:4] if as_array else block_table[0, 0:4])
    block_table[0] = block_table[1]
    pool.free_group_end()
    assert pool.available_size() == 12
    others = taken(pool.alloc(12)).tolist()
    shadow |= dict.fromkeys(others, "R3")
    assert [shadow[slot] for slot in second] == ["R2"] * 4
    assert set(first) <= set(others)
    drain(pool, kept=[*others, *second])


# ---- B04: the allocation kernel reads past the free list when the pool is short; empty and ragged batches ----


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> WatchedKernels:
    """Kernels that count their launches, and fail one whose arguments reach beyond what belongs to it."""
    kernels = WatchedKernels()
    monkeypatch.setattr("kvloom.allocator.base.kernels_for", lambda _: kernels)
    return kernels


@both_ways
def test_b04_short_of_pages(watched: WatchedKernels, need_sort: bool) -> None:
    """D1 too: nothing is launched, so nothing is read."""
    pool = paged(4, 16, need_sort)
    pool.alloc(48)
    with refused_for_want_of_pages(pool):
        assert pool.alloc_extend([0, 0], [17, 16], [-1, -1], 33) is None
    assert watched.launches == 0
    assert pool.available_size() == 16
    assert taken(pool.alloc(16)).tolist() == list(range(64, 80))


@both_ways
def test_b04_no_page_at_all(watched: WatchedKernels, need_sort: bool) -> None:
    """D2 too: the list is exactly empty.  A row that stays in its page is served, one that needs a page is not."""
    pool = paged(3, 16, need_sort)
    full = taken(pool.alloc_extend([0], [16], [-1], 16))
    partly = taken(pool.alloc_extend([0], [17], [-1], 17))
    launches = watched.launches
    assert pool.available_size() == 0
    with refused_for_want_of_pages(pool):
        assert pool.alloc_decode([17], full[-1:]) is None
        assert pool.alloc_decode([18, 17], [int(partly[-1]), int(full[-1])]) is None
    assert watched.launches == launches
    before = pool.ledger.free_list().tolist()
    assert taken(pool.alloc_decode([18], partly[-1:])).tolist() == [int(partly[-1]) + 1]
    assert taken(pool.alloc_extend([18], [32], partly[-1:] + 1, 14)).tolist() == list(range(50, 64))
    assert pool.ledger.free_list().tolist() == before == []


class refused_for_want_of_pages:  # noqa: N801 - reads as a statement
    """None, and nothing has changed but the count of failures."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    def look(self) -> tuple[object, ...]:
        ledger = self.pool.ledger
        everyone = np.arange(1, ledger.pages + 1, dtype=np.int32)
        statistics = ledger.statistics()._replace(failures_by_op={})
        return statistics, ledger.free_list().tolist(), ledger.holders_of(everyone).tolist()

    def __enter__(self) -> None:
        self.before, self.failures = self.look(), self.pool.statistics().failures

    def __exit__(self, *_: object) -> None:
        assert self.look() == self.before
        assert self.pool.statistics().failures > self.failures
        self.pool.ledger.check()


@both_ways
def test_b04_empty_batches(watched: WatchedKernels, need_sort: bool) -> None:
    """D11 too: also right after a batch that was not empty."""
    pool = paged(4, 16, need_sort)
    pool.alloc_extend([0, 0], [17, 5], [-1, -1], 22)
    launches = watched.launches
    before = pool.ledger.statistics(), pool.ledger.free_list().tolist()
    for empty in (pool.alloc_extend([], [], [], 0), pool.alloc_decode([], []), pool.alloc(0)):
        assert taken(empty).shape == (0,)
        assert taken(empty).dtype == torch.int64
    pool.free([])
    pool.free(torch.empty(0, dtype=torch.int64))
    assert (pool.ledger.statistics(), pool.ledger.free_list().tolist()) == before
    assert watched.launches == launches


def test_b04_a_row_with_nothing_to_add(watched: WatchedKernels) -> None:
    pool = paged(8, 4)
    first, second = taken(pool.alloc(8)), taken(pool.alloc(16))
    last = [int(first[-1]), int(second[-1])]
    assert taken(pool.alloc_extend([8, 16], [8, 20], last, 4)).tolist() == [28, 29, 30, 31]
    assert pool.available_size() == 4
    assert taken(pool.alloc_extend([8, 16], [8, 16], last, 0)).tolist() == []
    assert watched.launches == 1


@pytest.mark.parametrize(
    ("prefix", "seq", "extend"),
    [
        ([4], [8, 9], 9),  # lengths of different lengths
        ([4, 4], [8], 8),
        ([4, 4], [8, 9], 8),  # too few tokens: the kernel would write past the output (D12)
        ([4, 4], [8, 9], 10),  # too many: the output would end in garbage (D12)
        ([4, 4], [8, 9], 0),
        ([4, 4], [8, 3], 3),  # shrinks
        ([4, -1], [8, 3], 8),
        ([4, 4], [8, -9], 4),
    ],
)
def test_b04_arguments_that_contradict_each_other(
    watched: WatchedKernels, prefix: list[int], seq: list[int], extend: int
) -> None:
    """D12 too."""
    pool = paged(8, 4)
    last = taken(pool.alloc(8))[[3, 7]][: len(prefix)]
    for make in (list, np.array, torch.tensor):
        with refused(pool.ledger, InvalidArgument):
            pool.alloc_extend(make(prefix), make(seq), last, extend)
    assert watched.launches == 0


# ---- B10: page_size 1 and page sizes that are no power of two ----


@pytest.mark.parametrize("page_size", [1, 3, 6, 24, 48, 100])
def test_b10_a_request_at_any_page_size(page_size: int) -> None:
    """D10 too."""
    pool = paged(60 // page_size + 2, page_size)
    slots = taken(pool.alloc_extend([0], [13], [-1], 13)).tolist()
    for length in range(14, 50):
        before = pool.available_size()
        slots += taken(pool.alloc_decode([length], slots[-1:])).tolist()
        # A new page exactly when the others are full.
        assert before - pool.available_size() == (page_size if length % page_size == 1 % page_size else 0)
    assert slots == list(range(page_size, page_size + 49))
    pool.free(slots)
    drain(pool)


def test_b10_page_size_6() -> None:
    pool = paged(10, 6)
    slots = taken(pool.alloc_extend([0], [13], [-1], 13)).tolist()
    assert pool.available_size() == 42
    for length in range(14, 19):
        slots += taken(pool.alloc_decode([length], slots[-1:])).tolist()
        assert pool.available_size() == 42
    slots += taken(pool.alloc_decode([19], slots[-1:])).tolist()
    assert pool.available_size() == 36
    assert slots == list(range(6, 25))


def test_b10_page_size_1() -> None:
    pool = paged(40, 1)
    prompts = taken(pool.alloc_extend([0, 0, 0], [4, 4, 4], [-1, -1, -1], 12)).tolist()
    last, new = [prompts[3], prompts[7], prompts[11]], []
    for length in (5, 6, 7, 8):
        before = pool.available_size()
        last = taken(pool.alloc_decode([length] * 3, last)).tolist()
        assert before - pool.available_size() == 3
        new += last
    assert len(set(prompts + new)) == 24


@both_ways
@pytest.mark.parametrize("need", [5, 3, 1, 10, -1, -4])
def test_b10_what_is_no_whole_number_of_pages(need: int, need_sort: bool) -> None:
    """D25 too."""
    pool = paged(8, 4, need_sort)
    with refused(pool.ledger, InvalidArgument):
        pool.alloc(need)
