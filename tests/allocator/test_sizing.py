"""How large the pools of a memory become: by tokens, by bytes, by what is free."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvloom.allocator import InvalidArgument, KVMemory, NullPrefixCache, PoolSpec, RadixPrefixCache
from kvloom.allocator.sizing import pages_of_mix, tokens_for_bytes
from kvloom.scheduler.runners import ShadowRunner

FULL = PoolSpec("full", (0,), kv_heads=2, head_dim=8)  # 128 bytes a token
SWA = PoolSpec("swa", (1, 2, 3, 4, 5), kv_heads=2, head_dim=8, window=64)  # 640
PAGE = 16


def pages(memory: KVMemory) -> dict[str, int]:
    return {name: pool.capacity for name, pool in memory.statistics().pools.items()}


def test_one_number_is_for_the_pool_that_keeps_most() -> None:
    memory = KVMemory((FULL, SWA), capacity_tokens=160 * PAGE, page_size=PAGE, lengths=[40 * PAGE])
    assert pages(memory) == {"full": 160, "swa": 4 * 5}  # four such requests, each with a window across five pages
    memory = KVMemory((FULL, SWA), capacity_tokens=160 * PAGE, page_size=PAGE, lengths=[PAGE])
    assert pages(memory) == {"full": 160, "swa": 160}  # none outgrows its window
    memory = KVMemory((SWA,), capacity_tokens=160 * PAGE, page_size=PAGE)
    assert pages(memory) == {"swa": 160}


def test_a_number_for_each_pool() -> None:
    memory = KVMemory((FULL, SWA), capacity_tokens={"swa": 7 * PAGE + 3, "full": 9 * PAGE}, page_size=PAGE)
    assert pages(memory) == {"full": 9, "swa": 7}
    for wrong in ({"full": 99}, {"full": 99, "swa": 99, "other": 99}, {"full": 99, "swa": 15}):
        with pytest.raises(InvalidArgument):
            KVMemory((FULL, SWA), capacity_tokens=wrong, page_size=PAGE)


@pytest.mark.parametrize("lengths", [[100], [2000], [30, 300, 3000], [10_000]])
def test_bytes_are_split_so_that_all_pools_fill_together(lengths: list[int]) -> None:
    """No other split lets more requests of this mix in."""
    nbytes = 3_000_000
    tokens = tokens_for_bytes((FULL, SWA), PAGE, nbytes, lengths)
    mean = pages_of_mix((FULL, SWA), PAGE, lengths)
    fit = {name: tokens[name] // PAGE / mean[name] for name in tokens}
    spent = (tokens["full"] + PAGE) * 128 + (tokens["swa"] + PAGE) * 640  # with the dump pages
    assert nbytes - PAGE * (128 + 640) - 1 <= spent <= nbytes
    assert abs(fit["full"] - fit["swa"]) <= 1 / min(mean.values()) + 1e-9
    best = max(
        min(full / mean["full"], (nbytes // PAGE - 6 * 128 - full * 128) // 640 / mean["swa"])
        for full in range(1, nbytes // PAGE // 128)
    )
    assert min(fit.values()) >= best - 1 / min(mean.values())


def test_memory_for_a_runner_in_bytes() -> None:
    runner = ShadowRunner(max_seq=500, pools=(FULL, SWA))
    memory = KVMemory.for_runner(runner, memory_bytes=1_000_000, page_size=PAGE)
    assert sum(storage.nbytes for storage in memory.pools.values()) <= 1_000_000
    assert sum(storage.nbytes for storage in memory.pools.values()) >= 980_000


def test_one_measure_at_a_time() -> None:
    runner = ShadowRunner(pools=(FULL,))
    for wrong in (
        {},
        {"capacity_tokens": 160, "memory_bytes": 10**6},
        {"memory_fraction": 0.0},
        {"memory_fraction": 1.1},
        {"memory_bytes": 1000},
        {"memory_bytes": -1},
    ):
        with pytest.raises(InvalidArgument):
            KVMemory.for_runner(runner, page_size=PAGE, **wrong)
    nothing = ShadowRunner(pools=(replace(FULL, layers=()),))
    with pytest.raises(InvalidArgument, match="keeps no KV"):
        KVMemory.for_runner(nothing, memory_bytes=10**6)
    if not torch.cuda.is_available():
        with pytest.raises(InvalidArgument, match="for CUDA devices, not for cpu"):
            KVMemory.for_runner(runner, memory_fraction=0.5)


def test_pins_are_taken_off_what_a_row_can_count_on() -> None:
    memory = KVMemory(capacity_tokens=64, page_size=4, prefix_cache=RadixPrefixCache(pin_budget_pages=3))
    assert memory.max_seq == 64 - 3 * 4
    assert KVMemory(capacity_tokens=64, page_size=4, prefix_cache=NullPrefixCache()).max_seq == 64
    with pytest.raises(InvalidArgument, match="all of a pool"):
        KVMemory(capacity_tokens=64, page_size=4, prefix_cache=RadixPrefixCache(pin_budget_pages=16))


@pytest.mark.parametrize(
    "wrong",
    [{"lengths": 5}, {"lengths": ["a"]}, {"lengths": "12"}, {"lengths": [0]}, {"watermarks": 0.1},
     {"watermarks": (0.1,)}, {"watermarks": ("a", "b")}, {"watermarks": (0.5, 0.2)},
     {"watermarks": (0.0, float("nan"))}],
)  # fmt: skip
def test_nonsense_has_a_typed_error_and_leaves_the_cache_to_others(wrong: dict[str, Any]) -> None:
    cache = RadixPrefixCache()
    with pytest.raises(InvalidArgument):
        KVMemory((FULL, SWA), capacity_tokens=160 * PAGE, page_size=PAGE, prefix_cache=cache, **wrong)
    KVMemory((FULL, SWA), capacity_tokens=160 * PAGE, page_size=PAGE, prefix_cache=cache)
