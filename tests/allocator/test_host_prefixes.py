"""Evicted prefixes on the host: their KV comes back bit for bit, within bounds, and only where it is missing."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvloom.allocator import InvalidArgument, KVMemory, Match, NullPrefixCache, PoolSpec, RadixPrefixCache
from kvloom.allocator.step_binding import HostStepBinding
from tests.allocator.books import ints, memory_books, memory_refuses
from tests.allocator.memories import NOTHING

FULL = PoolSpec("full", (0, 2), kv_heads=2, head_dim=3)  # 96 bytes a token
OTHER = PoolSpec("other", (1,), kv_heads=1, head_dim=5)  # 40
PAGE = 4
PAGES = 12
TOKENS = PAGE * PAGES
PAGE_BYTES = PAGE * 96
Tokens = NDArray[np.int32]


def made(
    host_prefix_bytes: int, pools: tuple[PoolSpec, ...] = (FULL,), cache: RadixPrefixCache | None = None
) -> KVMemory:
    return KVMemory(
        pools, capacity_tokens={pool.name: TOKENS for pool in pools}, page_size=PAGE, max_rows=4,
        prefix_cache=cache, host_prefix_bytes=host_prefix_bytes, watermarks=(0.0, 0.0),
    )  # fmt: skip


def prompt(first: int, count: int) -> Tokens:
    return np.arange(first, first + count, dtype=np.int32)


def run(memory: KVMemory, tokens: Tokens, fence: int = -1) -> Match:
    """A request of these tokens: looks up, enters, "computes" the rest, is cached, and leaves."""
    match = memory.match(tokens)
    row = memory.admit(match, len(tokens))
    assert row is not None
    memory.looked_up(tokens, match)
    for pool in memory.specs:
        positions = np.arange(match.tokens + match.host_tokens, len(tokens))
        write(memory, pool, row, positions, tokens)
    require_kv(memory, row, tokens)
    memory.publish(ints(row), ints(len(tokens)), lambda _, start, stop: tokens[start:stop])
    require_kv(memory, row, tokens)
    memory.release([row], [fence])
    memory.check()
    return match


def slots(memory: KVMemory, pool: PoolSpec, row: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    pages: NDArray[np.int32] = memory.tables[pool.name].pages[row, positions // PAGE]
    found: NDArray[np.int64] = pages.astype(np.int64) * PAGE + positions % PAGE
    assert (found >= PAGE).all()
    return found


def kv_of(tokens: Tokens, positions: NDArray[np.int64]) -> torch.Tensor:
    """A number for each position, of all tokens up to it."""
    return torch.from_numpy(np.cumsum(tokens.astype(np.int64) ** 2 % 1009)[positions]).to(torch.float32)


def write(memory: KVMemory, pool: PoolSpec, row: int, positions: NDArray[np.int64], tokens: Tokens) -> None:
    where, numbers = slots(memory, pool, row, positions), kv_of(tokens, positions)
    for layer in pool.layers:
        for i, buffer in enumerate(memory.pools[pool.name].get_kv_buffer(layer)):
            shape = (len(where), *buffer.shape[1:])
            buffer[where] = (numbers + layer + i / 2)[:, None, None].expand(shape).to(buffer.dtype)


def require_kv(memory: KVMemory, row: int, tokens: Tokens) -> None:
    positions = np.arange(len(tokens))
    for pool in memory.specs:
        where, numbers = slots(memory, pool, row, positions), kv_of(tokens, positions)
        for layer in pool.layers:
            for i, buffer in enumerate(memory.pools[pool.name].get_kv_buffer(layer)):
                expected = (numbers + layer + i / 2)[:, None, None].expand(buffer[where].shape).to(buffer.dtype)
                assert torch.equal(buffer[where], expected)


def flood(memory: KVMemory) -> None:
    """Somebody needs all pages, writes to them, and leaves nothing behind."""
    row = memory.admit(NOTHING, TOKENS)
    assert row is not None
    for pool in memory.specs:
        write(memory, pool, row, np.arange(TOKENS), prompt(500, TOKENS))
    memory.release([row], [-1])
    memory.check()


@pytest.mark.parametrize("pools", [(FULL,), (FULL, OTHER)], ids=["one", "two"])
def test_what_comes_back_is_what_went(pools: tuple[PoolSpec, ...]) -> None:
    memory = made(10**6, pools)
    tokens = prompt(0, 22)
    run(memory, tokens)
    flood(memory)
    page_bytes = sum(pool.bytes_per_token for pool in pools) * PAGE
    host = memory.statistics().host
    assert (host.prefix_limit, host.prefix_used, host.bytes_out, host.bytes_in) == (10**6, *[5 * page_bytes] * 2, 0)
    match = run(memory, tokens)
    assert (match.tokens, match.host_tokens) == (0, 20)
    report = memory.statistics()
    assert (report.host.prefix_used, report.host.bytes_in) == (0, 5 * page_bytes), "it is on the device again"
    assert (report.host.used, report.restored_tokens) == (0, 0), "that is for preempted rows"
    counts = report.prefix
    assert (counts.query_tokens, counts.hit_tokens, counts.host_hit_tokens, counts.regret_tokens) == (44, 0, 20, 0)
    again = run(memory, tokens)
    assert (again.tokens, again.host_tokens) == (20, 0), "not while the device has it"


def test_the_host_goes_on_where_the_device_ends() -> None:
    memory = made(10**6)
    tokens = prompt(0, 41)
    run(memory, tokens)
    row = memory.admit(NOTHING, 5 * PAGE)  # three pages go
    assert row is not None
    assert memory.statistics().host.prefix_used == 3 * PAGE_BYTES
    memory.release([row], [-1])
    match = run(memory, tokens)
    assert (match.tokens, match.host_tokens) == (28, 12)


def test_part_of_a_copy_serves_who_begins_alike() -> None:
    memory = made(10**6)
    tokens = prompt(0, 40)
    run(memory, tokens)
    flood(memory)
    other = np.concatenate((tokens[:14], prompt(900, 8)))
    match = run(memory, other)
    assert (match.tokens, match.host_tokens) == (0, 12)
    assert memory.statistics().host.bytes_in == 3 * PAGE_BYTES
    match = run(memory, tokens)
    assert (match.tokens, match.host_tokens) == (12, 24), "a token is left to compute"
    flood(memory)
    assert run(memory, other).host_tokens == 20
    assert run(memory, tokens).host_tokens == 24


def test_a_token_is_left_to_compute() -> None:
    memory = made(10**6)
    run(memory, prompt(0, 16))
    flood(memory)
    assert memory.match(prompt(0, 16)).host_tokens == 12
    assert memory.match(prompt(0, 17)).host_tokens == 16
    assert memory.match(prompt(0, 17), "other").host_tokens == 0


def test_the_bound_holds_and_the_oldest_go_first() -> None:
    memory = made(5 * PAGE_BYTES + 7)
    for first in (0, 100, 200):
        run(memory, prompt(first, 9))
        flood(memory)
        assert memory.statistics().host.prefix_used <= 5 * PAGE_BYTES
    assert [memory.match(prompt(first, 9)).host_tokens for first in (0, 100, 200)] == [0, 8, 8]
    run(memory, prompt(300, 40))
    flood(memory)
    assert memory.match(prompt(300, 40)).host_tokens == 0, "too large as it is"
    assert [memory.match(prompt(first, 9)).host_tokens for first in (100, 200)] == [8, 8]
    for first in (0, 100, 200, 300):
        run(memory, prompt(first, 9))
    before = memory.statistics().host.bytes_out
    flood(memory)
    report = memory.statistics().host
    assert report.bytes_out - before == report.prefix_used == 4 * PAGE_BYTES, "what would be dropped at once stays"
    assert [memory.match(prompt(first, 9)).host_tokens for first in (0, 100, 200, 300)] == [0, 0, 8, 8]


def test_a_copy_ends_with_its_ghost() -> None:
    memory = made(10**6, cache=RadixPrefixCache(ghost_pages=3))
    run(memory, prompt(0, 9))
    flood(memory)
    run(memory, prompt(100, 9))
    flood(memory)
    assert memory.statistics().host.prefix_used == 2 * PAGE_BYTES
    assert [memory.match(prompt(first, 9)).host_tokens for first in (0, 100)] == [0, 8]
    memory.reset_prefix_cache()
    assert memory.statistics().host.prefix_used == 0
    assert memory.match(prompt(100, 9)).host_tokens == 0


def test_who_cannot_enter_now_loads_and_drops_nothing() -> None:
    memory = made(10**6)
    tokens = prompt(0, 21)
    run(memory, tokens)
    flood(memory)
    held = memory.admit(NOTHING, 8 * PAGE)
    assert held is not None
    match = memory.match(tokens)
    before = memory_books(memory)
    assert memory.admit(match, len(tokens)) is None
    assert memory_books(memory) == before
    with memory_refuses(memory, InvalidArgument):
        memory.admit(match, 19)
    with memory_refuses(memory, InvalidArgument):
        memory.admit(match._replace(host_tokens=16), 40)
    with memory_refuses(memory, InvalidArgument):
        memory.admit(match._replace(parts=()), 40)
    memory.release([held], [-1])
    assert run(memory, tokens).host_tokens == 20


def test_what_is_pushed_out_by_its_own_admission_is_loaded_all_the_same() -> None:
    memory = made(5 * PAGE_BYTES)
    tokens = prompt(0, 21)
    run(memory, tokens)
    flood(memory)
    run(memory, prompt(200, 41))
    match = run(memory, tokens)  # four pages of the other go, and there is room for five
    assert match.host_tokens == 20
    assert memory.match(prompt(200, 41)).host_tokens == 16


def test_pages_that_wait_for_a_step_are_not_copied_before() -> None:
    memory = made(10**6)
    tokens = prompt(0, 41)
    run(memory, tokens, fence=3)
    assert memory.admit(NOTHING, TOKENS) is None, "a step in flight names them"
    assert memory.statistics().host.bytes_out == 0
    memory.settle(3)
    flood(memory)
    assert memory.statistics().host.prefix_used == 10 * PAGE_BYTES
    assert run(memory, tokens, fence=4).host_tokens == 40
    memory.settle(4)
    assert run(memory, tokens).tokens == 40


def test_who_left_before_its_load_was_published_leaves_the_copy_to_others() -> None:
    memory = made(10**6)
    tokens = prompt(0, 21)
    run(memory, tokens)
    flood(memory)
    rows = [memory.admit(memory.match(tokens), 21) for _ in range(2)]
    for row in rows:
        assert row is not None
        require_kv(memory, row, tokens[:20])
        memory.release([row], [-1])
    assert memory.statistics().host.prefix_used == 5 * PAGE_BYTES
    assert run(memory, tokens).host_tokens == 20


def test_a_device_would_hear_of_the_pages_that_were_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = made(10**6)
    run(memory, prompt(0, 21))
    flood(memory)
    heard: list[tuple[str, int, slice]] = []
    monkeypatch.setattr(HostStepBinding, "changed", lambda _, pool, row, places: heard.append((pool, row, places)))
    row = memory.admit(memory.match(prompt(0, 14)), 14)
    assert heard == [("full", row, slice(0, 3))]


def test_below_the_watermark_too() -> None:
    memory = KVMemory((FULL,), capacity_tokens=TOKENS, page_size=PAGE, host_prefix_bytes=10**6, watermarks=(0.5, 1.0))
    run(memory, prompt(0, 41))
    memory.tick(0.0)
    assert memory.statistics().host.prefix_used == 10 * PAGE_BYTES
    assert run(memory, prompt(0, 41)).host_tokens == 40


def test_off_unless_asked_for() -> None:
    memory = made(0)
    run(memory, prompt(0, 22))
    flood(memory)
    assert memory.match(prompt(0, 22)).host_tokens == 0
    assert memory.statistics().host.bytes_out == 0
    assert memory.statistics().prefix.ghost_pages == 5
    with pytest.raises(InvalidArgument, match="host_prefix_bytes"):
        made(-1)
    with pytest.raises(InvalidArgument, match="windows"):
        made(1, (FULL, replace(OTHER, window=6)))
    with pytest.raises(InvalidArgument, match="NullPrefixCache"):
        KVMemory((FULL,), capacity_tokens=TOKENS, prefix_cache=NullPrefixCache(), host_prefix_bytes=1)
    empty = made(10**6, (replace(FULL, layers=()),))
    run(empty, prompt(0, 22))
    flood(empty)
    assert empty.match(prompt(0, 22)).host_tokens == 0, "there is nothing to keep"
