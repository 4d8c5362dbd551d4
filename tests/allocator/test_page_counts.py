"""Who took pages and what for, who was short, how many were active at once, and what was found wrong."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvloom.allocator import (
    BrokenInvariant,
    DoubleFree,
    ForeignPage,
    KVMemory,
    PagedTokenToKVPoolAllocator,
    PageLedger,
    PoolSpec,
    PoolStatistics,
    Shortfall,
    SWATokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from kvloom.allocator.ports import TokenArray
from tests.allocator.books import ints

SPEC = PoolSpec(layers=(0,), kv_heads=1, head_dim=1, dtype=torch.int64)
NONE_TAKEN = {"prefill": 0, "decode": 0, "restore": 0}


def told(tokens: TokenArray) -> Callable[[int, int, int], TokenArray]:
    return lambda _, start, stop: tokens[start:stop]


def memory_of(pages: int = 8, host_bytes: int = 0) -> KVMemory:
    return KVMemory((SPEC,), capacity_tokens=4 * pages, page_size=4, max_rows=8, host_bytes=host_bytes)


def pool_of(memory: KVMemory, name: str = "full") -> PoolStatistics:
    return memory.statistics().pools[name]


def enter(memory: KVMemory, tokens: TokenArray) -> int:
    row = memory.admit(memory.match(tokens), len(tokens))
    assert row is not None
    return row


def cache(memory: KVMemory, tokens: TokenArray) -> None:
    """Leave these whole pages in the prefix cache, used by nobody."""
    row = enter(memory, tokens)
    memory.publish(ints(row), ints(len(tokens)), told(tokens))
    memory.release([row], [-1])


# ---- what for ----


@pytest.mark.parametrize(
    "pool",
    [
        PagedTokenToKVPoolAllocator(16, 4, torch.float16, "cpu", None),
        SWATokenToKVPoolAllocator(16, 16, torch.float16, "cpu", None, page_size=4),
    ],
    ids=["paged", "swa"],
)
def test_public_verbs_say_what_for(pool: PagedTokenToKVPoolAllocator) -> None:
    assert pool.alloc(4) is not None
    slots = pool.alloc_extend([0], [4], [-1], 4)
    assert slots is not None
    assert pool.alloc_decode([5], slots[-1:]) is not None
    assert pool.statistics().allocated_by_op == {"prefill": 2, "decode": 1, "restore": 0}
    assert pool.alloc(8) is None
    assert pool.alloc_extend([0], [8], [-1], 8) is None
    assert pool.alloc(4) is not None
    assert pool.alloc_decode([1], [-1]) is None
    short = (pool.swa_statistics if isinstance(pool, SWATokenToKVPoolAllocator) else pool.statistics)()
    assert short.failures_by_op == {"prefill": 2, "decode": 1, "restore": 0}


def test_single_slots_are_prefill() -> None:
    pool = TokenToKVPoolAllocator(4, torch.float16, "cpu", None)
    pool.alloc(3)
    assert pool.statistics().allocated_by_op == {"prefill": 3, "decode": 0, "restore": 0}


def test_rows_say_what_for() -> None:
    memory = memory_of(host_bytes=1 << 20)
    row = enter(memory, ints(*range(6)))
    assert memory.reserve(ints(row), ints(9)) is None
    assert memory.reserve(ints(row), ints(17), "prefill") is None
    kept = memory.offload(row, 16)
    assert kept is not None
    memory.release([row], [-1], "preempt")
    assert memory.restore(kept, 17) is not None
    report = memory.statistics()
    assert report.pools["full"].allocated_by_op == {"prefill": 4, "decode": 1, "restore": 5}
    assert report.restored_tokens == 16
    assert report.host.bytes_in == report.host.bytes_out == 16 * SPEC.bytes_per_token


def test_a_fork_takes_pages_to_go_on_in() -> None:
    memory = memory_of()
    row = enter(memory, ints(*range(6)))
    assert not isinstance(memory.fork(row, 3, 6), Shortfall)
    assert pool_of(memory).allocated_by_op == {"prefill": 2, "decode": 3, "restore": 0}


# ---- too few ----


def test_a_shortage_counts_once_whether_or_not_the_cache_helps() -> None:
    memory = memory_of()
    cache(memory, ints(*range(16)))
    row = enter(memory, ints(*range(100, 116)))
    assert pool_of(memory).failures_by_op == NONE_TAKEN
    assert memory.reserve(ints(row), ints(20)) is None  # a page of the cache goes
    assert pool_of(memory).failures_by_op == {"prefill": 0, "decode": 1, "restore": 0}
    other = enter(memory, ints(*range(200, 208)))  # two pages go
    assert pool_of(memory).failures_by_op == {"prefill": 1, "decode": 1, "restore": 0}
    assert memory.reserve(ints(row, other), ints(28, 16)) is not None  # the last one goes, in vain
    assert pool_of(memory).failures_by_op == {"prefill": 1, "decode": 2, "restore": 0}
    assert pool_of(memory).freed["evict"] == 4


def test_who_may_not_enter_or_come_back_was_short() -> None:
    memory = memory_of(host_bytes=1 << 20)
    row = enter(memory, ints(*range(16)))
    kept = memory.offload(row, 16)
    assert kept is not None
    other = enter(memory, ints(*range(100, 116)))
    assert memory.admit(memory.match(ints(1, 2)), 2) is None
    assert memory.restore(kept, 16) is None
    assert pool_of(memory).failures_by_op == {"prefill": 1, "decode": 0, "restore": 1}
    assert memory.reserve(ints(row, other), ints(17, 17), "prefill") is not None
    assert pool_of(memory).failures_by_op == {"prefill": 2, "decode": 0, "restore": 1}
    assert isinstance(memory.fork(row, 1, 15), Shortfall)
    assert pool_of(memory).failures_by_op == {"prefill": 2, "decode": 1, "restore": 1}


# ---- active, and how many at a time ----


def test_active_pages_are_those_held_and_those_of_the_cache_in_use() -> None:
    memory = memory_of()
    tokens = ints(*range(13))
    row = enter(memory, tokens)
    memory.publish(ints(row), ints(12), told(tokens))
    pool = pool_of(memory)
    assert (pool.held, pool.cached, pool.evictable, pool.active, pool.peak_active) == (1, 3, 0, 4, 4)
    again = enter(memory, tokens)
    assert (pool_of(memory).active, pool_of(memory).peak_active) == (5, 5)
    memory.release([row, again], [-1, -1])
    pool = pool_of(memory)
    assert (pool.held, pool.cached, pool.evictable, pool.active, pool.peak_active) == (0, 3, 3, 0, 5)
    assert pool.free + pool.evictable + pool.active + pool.quarantined == pool.capacity


def test_pages_that_are_used_again_count_for_the_peak() -> None:
    """Whoever enters with a whole match and one page of his own has no more active than that."""
    memory = memory_of()
    cache(memory, ints(*range(24)))
    assert pool_of(memory).peak_active == 6
    row = enter(memory, ints(*range(25)))
    assert (pool_of(memory).held, pool_of(memory).active, pool_of(memory).peak_active) == (1, 7, 7)
    assert memory.reserve(ints(row), ints(29)) is None
    memory.release([row], [-1])
    assert (pool_of(memory).active, pool_of(memory).peak_active) == (0, 8)


def test_who_is_refused_was_never_active() -> None:
    memory = memory_of()
    cache(memory, ints(*range(8)))
    enter(memory, ints(*range(100, 124)))
    assert memory.admit(memory.match(ints(*range(12))), 12) is None
    assert (pool_of(memory).active, pool_of(memory).peak_active) == (6, 6)


def test_free_groups_by_size() -> None:
    ledger = PageLedger(40)
    for size in (1, 4, 5):
        pages = ledger.take(size)
        assert pages is not None
        ledger.release(pages)
    pages = ledger.take(20)
    assert pages is not None
    ledger.queue(pages[:3])
    ledger.queue(pages[3:])
    ledger.free_queued()
    report = ledger.statistics()
    assert report.group_pages.counts[:4] == (1, 1, 1, 1)
    assert (sum(report.group_pages.counts), report.group_pages.total) == (report.groups, 30) == (4, 30)


def test_a_restored_state_has_the_counts_of_then() -> None:
    ledger = PageLedger(8)
    ledger.take(2, op="decode")
    before, state = ledger.statistics(), ledger.backup_state()
    pages = ledger.take(3)
    assert pages is not None
    ledger.release(pages)
    ledger.take(9)
    ledger.restore_state(state)
    assert ledger.statistics() == before


def test_what_a_page_is() -> None:
    spec = PoolSpec("swa", layers=(1, 3, 5), kv_heads=2, head_dim=8, dtype=torch.bfloat16, window=9)
    memory = KVMemory((SPEC, spec), capacity_tokens=64, page_size=4, max_rows=2)
    geometry = memory.statistics().geometry
    assert geometry["full"] == (4, 4 * 16, "int64", 1)
    assert geometry["swa"] == (4, 4 * 2 * 3 * 2 * 8 * 2, "bfloat16", 3)


# ---- what must not be ----


def test_refused_moves_are_counted() -> None:
    ledger = PageLedger(8)
    pages = ledger.take(4, 1)
    assert pages is not None
    with pytest.raises(ForeignPage):
        ledger.release(pages, 2)
    with pytest.raises(ForeignPage):
        ledger.evict(pages)
    with pytest.raises(DoubleFree):
        ledger.release(np.repeat(pages[:1], 2), 1)
    ledger.release(pages, 1)
    with pytest.raises(DoubleFree):
        ledger.release_lines(pages, ints(1, 1, 1, 1), reason="finish", fence=-1)
    assert ledger.violations == {"foreign_page": 2, "double_free": 2}


def test_a_memory_counts_what_is_wrong_in_all_its_pools() -> None:
    memory = KVMemory((SPEC, PoolSpec("swa", window=5)), capacity_tokens=64, page_size=4, max_rows=2)
    assert memory.statistics().violations == {}
    row = enter(memory, ints(*range(8)))
    for name in ("full", "swa"):
        with pytest.raises(ForeignPage):
            memory.allocators[name].ledger.release(ints(99))
    memory.check()
    memory.tables["full"].lengths[row] = 99
    with pytest.raises(BrokenInvariant):
        memory.check()
    assert memory.statistics().violations == {"foreign_page": 2, "conservation": 1}
