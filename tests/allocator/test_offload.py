"""KV of rows on the host: it comes back as it was, within bounds, and not when there is no room."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvloom.allocator import DoubleFree, InvalidArgument, KVMemory, PoolSpec
from tests.allocator.books import ints, memory_books, memory_refuses
from tests.allocator.memories import NOTHING

FULL = PoolSpec("full", (0, 2), kv_heads=2, head_dim=3)  # 96 bytes a token
SWA = PoolSpec("swa", (1,), kv_heads=2, head_dim=3, window=6)  # 48
PAGE = 4


def made(host_bytes: int, pools: tuple[PoolSpec, ...] = (FULL, SWA)) -> KVMemory:
    memory = KVMemory(
        pools, capacity_tokens={pool.name: 12 * PAGE for pool in pools}, page_size=PAGE, max_rows=4,
        host_bytes=host_bytes,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    for pool in pools:
        for layer in pool.layers:
            for buffer in memory.pools[pool.name].get_kv_buffer(layer):
                buffer.copy_(torch.rand(buffer.shape, generator=generator))
    return memory


def grown(memory: KVMemory, tokens: int, more: int = 0) -> int:
    """A row with that many settled tokens, trimmed."""
    row = memory.admit(NOTHING, tokens + more)
    assert row is not None
    assert memory.reserve(ints(row), ints(tokens)) is None
    memory.trim(ints(row), ints(tokens), lambda _, start, stop: np.arange(start, stop, dtype=np.int32))
    return row


def kv(memory: KVMemory, row: int, tokens: int) -> list[torch.Tensor]:
    """What the token behind `tokens` others reads, buffer by buffer."""
    read = []
    for pool in memory.specs:
        first = 0 if pool.window is None else max(0, tokens + 1 - pool.window)
        positions = np.arange(first, tokens)
        slots = memory.tables[pool.name].pages[row, positions // PAGE] * PAGE + positions % PAGE
        assert (slots >= PAGE).all()
        for layer in pool.layers:
            read += [buffer[slots].clone() for buffer in memory.pools[pool.name].get_kv_buffer(layer)]
    return read


@pytest.mark.parametrize("tokens", [1, 4, 5, 6, 13, 24])
@pytest.mark.parametrize("pools", [(FULL,), (FULL, SWA), (SWA,)], ids=["full", "both", "swa"])
def test_what_comes_back_is_what_went(pools: tuple[PoolSpec, ...], tokens: int) -> None:
    memory = made(10**6, pools)
    row = grown(memory, tokens)
    before = kv(memory, row, tokens)
    kept = memory.offload(row, tokens)
    assert kept is not None
    memory.release([row], [-1], "preempt")
    memory.check()
    host = memory.statistics().host
    assert host.used == host.bytes_out == kept.nbytes
    for storage, pool in zip(memory.pools.values(), pools, strict=True):
        for layer in pool.layers:
            for buffer in storage.get_kv_buffer(layer):
                buffer.zero_()  # somebody else has had the pages
    other = grown(memory, 5)  # and it comes back to other ones
    row_again = memory.restore(kept, tokens + 3)
    assert row_again is not None
    assert row_again != other
    memory.check()
    for now, then in zip(kv(memory, row_again, tokens), before, strict=True):
        assert torch.equal(now, then)
    host = memory.statistics().host
    assert (host.used, host.bytes_in) == (0, kept.nbytes)
    if len(pools) == 1 and pools[0].window is None:
        assert kept.nbytes == 96 * tokens


def test_the_host_is_bounded() -> None:
    memory = made(20 * 96, (FULL,))
    first, second = grown(memory, 12), grown(memory, 9)
    kept = memory.offload(first, 12)
    assert kept is not None
    before = memory_books(memory)
    assert memory.offload(second, 9) is None, "21 tokens where 20 fit"
    assert memory_books(memory) == before
    memory.forget(kept)
    assert memory.offload(second, 9) is not None


def test_without_host_memory_nothing_is_kept() -> None:
    memory = made(0)
    assert memory.offload(grown(memory, 9), 9) is None
    with pytest.raises(InvalidArgument, match="host_bytes"):
        made(-1)
    empty = made(10**6, (replace(FULL, layers=()),))
    assert empty.offload(grown(empty, 9), 9) is None, "there is nothing to keep"


def test_who_cannot_come_back_now_stays_where_it_is() -> None:
    memory = made(10**6)
    row = grown(memory, 20)
    kept = memory.offload(row, 20)
    assert kept is not None
    memory.release([row], [-1], "preempt")
    others = [grown(memory, 16) for _ in range(2)]
    before = memory_books(memory)
    assert memory.restore(kept, 24) is None
    assert memory_books(memory) == before
    with memory_refuses(memory, InvalidArgument):
        memory.restore(kept, 19)
    memory.release(others, [-1, -1], "finish")
    assert memory.restore(kept, 24) is not None


def test_what_came_back_or_was_forgotten_is_gone() -> None:
    memory = made(10**6, (FULL,))
    row = grown(memory, 9)
    kept, other = memory.offload(row, 9), memory.offload(row, 5)
    assert kept is not None
    assert other is not None
    assert memory.restore(kept, 9) is not None
    memory.forget(other)
    with memory_refuses(memory, DoubleFree):
        memory.restore(kept, 9)
    for gone in (kept, other):
        with memory_refuses(memory, DoubleFree):
            memory.forget(gone)
    assert memory.statistics().host.used == 0


def test_rows_that_are_none_and_tokens_that_are_not_there() -> None:
    memory = made(10**6, (FULL,))
    row = grown(memory, 9)
    with memory_refuses(memory, InvalidArgument):
        memory.offload(row, 10)
    with memory_refuses(memory, InvalidArgument):
        memory.offload(99, 1)
    with memory_refuses(memory, DoubleFree):
        memory.offload(row + 1, 1)
    with memory_refuses(memory, DoubleFree):
        memory.publish(ints(row + 1), ints(4), lambda *_: ints(1, 2, 3, 4))
