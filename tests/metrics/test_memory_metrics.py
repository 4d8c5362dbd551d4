"""Pages and prefix cache of a real engine under pressure: small pools, a window, a cache, and the host."""

import random
from dataclasses import replace
from functools import partial

import anyio
import pytest

from kvloom.allocator import KVMemory, PoolSpec, RadixPrefixCache
from kvloom.allocator.prefix import KeptPrefixCache, NullPrefixCache
from kvloom.metrics import instrument
from kvloom.scheduler import Engine, SamplingParams, SchedulerConfig
from kvloom.scheduler.request import Finished
from kvloom.scheduler.runners import ToyRunner
from kvloom.scheduler.runners.shadow import SHADOW_POOL, ShadowRunner
from tests.metrics.made import Series, series, value
from tests.metrics.test_engine_metrics import ask, require_idle, scrape_elsewhere, together, total

FULL, SWA = SHADOW_POOL, replace(SHADOW_POOL, name="swa", window=11)
SHARED = [token * 31 % 97 for token in range(40)]  # what some prompts begin with
STATES = ("free", "cached", "active", "reserved", "pending_free", "in_transfer")
HISTOGRAMS = ("page_lifetime_seconds", "page_idle_before_evict_seconds", "page_reuse_gap_seconds", "free_group_pages")

both_pools = pytest.mark.parametrize("pools", [(FULL,), (FULL, SWA), (SWA,)], ids=["full", "both", "swa"])


def engine_of(
    pools: tuple[PoolSpec, ...], *, tokens: int = 120, depth: int = 1, host_bytes: int = 0, host_prefix_bytes: int = 0
) -> Engine:
    runner = ShadowRunner(max_seq=100, pools=pools)
    memory = KVMemory.for_runner(
        runner,
        capacity_tokens=dict.fromkeys((pool.name for pool in pools), tokens),
        page_size=4,
        host_bytes=host_bytes,
        host_prefix_bytes=host_prefix_bytes,
    )
    return Engine(runner, memory, SchedulerConfig(max_running=6, prefill_chunk=16, steps_in_flight_max=depth))


async def say(engine: Engine, prompt: list[int], output: int, leave_after: int | None = None) -> Finished | None:
    """One request, left after some deltas if wished."""
    async with engine.open(prompt, SamplingParams(max_new_tokens=output)) as stream:
        deltas = 0
        async for _ in stream:
            deltas += 1
            if deltas == leave_after:
                break
    return stream.final


async def crowd(engine: Engine, draw: random.Random, people: int) -> int:
    """Many at once, some with what others have said before; how many prompt tokens they had."""
    prompts = [
        [*SHARED[: draw.choice([0, 0, 20, 40])], *(draw.randrange(97) for _ in range(draw.randint(1, 30)))]
        for _ in range(people)
    ]
    leaves = [draw.choice([None, None, 3]) for _ in prompts]
    await together(
        *(
            partial(say, engine, prompt, draw.randint(1, 25), leave)
            for prompt, leave in zip(prompts, leaves, strict=True)
        )
    )
    return sum(map(len, prompts))


def pages(found: Series, pool: str, family: str, *wanted: str) -> float:
    """The sum over the other labels, where one of them has one of the values `wanted`, if any are given."""
    name, here = f"kvloom_kv_{family}", ("pool", pool)
    return sum(
        count
        for (sample, labels), count in found.items()
        if sample == name and here in labels and (not wanted or {text for _, text in labels} & set(wanted))
    )


def require_conserved(found: Series, pool: str) -> None:
    """What holds of each pool in every scrape."""
    states = {state: value(found, "kvloom_kv_pages", pool=pool, state=state) for state in STATES}
    capacity = value(found, "kvloom_kv_capacity_pages", pool=pool)
    assert sum(states.values()) == capacity
    assert states["reserved"] == states["in_transfer"] == 0
    assert value(found, "kvloom_kv_used_ratio", pool=pool) == states["active"] / capacity
    assert states["active"] <= value(found, "kvloom_kv_peak_active_pages", pool=pool) <= capacity
    # What was taken and not given back is held or cached: active and cached pages.
    taken, freed = pages(found, pool, "allocated_pages_total"), pages(found, pool, "freed_pages_total")
    assert taken - freed == states["active"] + states["cached"]
    assert pages(found, pool, "freed_pages_total", "evict") == sum(
        count
        for (sample, labels), count in found.items()
        if sample == "kvloom_prefix_cache_evicted_pages_total" and ("pool", pool) in labels
    )
    groups = value(found, "kvloom_kv_free_groups_total", pool=pool)
    assert value(found, "kvloom_kv_free_group_pages_count", pool=pool) == groups
    # Groups are counted when they are given back, evictions are none.
    given_back = freed - pages(found, pool, "freed_pages_total", "evict")
    assert value(found, "kvloom_kv_free_group_pages_sum", pool=pool) == given_back
    assert all(value(found, f"kvloom_kv_{name}_sum", pool=pool) >= 0 for name in HISTOGRAMS)


def require_sound(found: Series, pools: tuple[PoolSpec, ...]) -> None:
    """What holds in every scrape."""
    for pool in pools:
        require_conserved(found, pool.name)
    assert total(found, "kv_invariant_violations_total") == 0
    queried = value(found, "kvloom_prefix_cache_query_tokens_total")
    hit = value(found, "kvloom_prefix_cache_hit_tokens_total", tier="device")
    loaded = value(found, "kvloom_prompt_tokens_total", source="host_hit")
    assert queried >= hit + loaded + value(found, "kvloom_prefix_cache_regret_tokens_total")
    assert value(found, "kvloom_prefix_cache_hit_tokens_total", tier="host") >= loaded
    assert value(found, "kvloom_prompt_tokens_total", source="device_hit") == hit


def timed(found: Series, pool: str) -> list[float]:
    """How many pages were sampled, by histogram."""
    return [value(found, f"kvloom_kv_{name}_count", pool=pool) for name in HISTOGRAMS]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("host_bytes", [0, 1 << 20], ids=["recompute", "offload"])
@both_pools
async def test_under_pressure_everything_adds_up(pools: tuple[PoolSpec, ...], host_bytes: int, depth: int) -> None:
    """B41, B44: in each scrape, from wherever it is made, and when all is over."""
    async with engine_of(pools, depth=depth, host_bytes=host_bytes) as engine:
        collector = instrument(engine, model="m")
        draw, asked = random.Random(depth), 0
        before: Series = {}

        async def scrape() -> None:
            nonlocal before
            while True:
                for found in (series(collector.render()), await scrape_elsewhere(collector)):
                    require_sound(found, pools)
                found = series(collector.render())
                counters = {key for key in found if key[0].endswith(("_total", "_count", "_bucket"))}
                assert all(found[key] >= before.get(key, 0) for key in counters), "a counter went down"
                before = found
                await anyio.sleep(0.01)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(scrape)
            for _ in range(3):
                asked += await crowd(engine, draw, 20)
            tasks.cancel_scope.cancel()
        found = series(collector.render())
    require_sound(found, pools)
    assert total(found, "requests") == 0
    for pool in pools:
        name = pool.name
        assert value(found, "kvloom_kv_pages", pool=name, state="active") == 0
        # Everybody is gone, and so every page that was ever taken is free or idle in the cache.
        assert all(count > 0 for count in timed(found, name))
        assert value(found, "kvloom_kv_page_sample_ratio", pool=name) == 1.0
        assert value(found, "kvloom_kv_page_lifetime_seconds_count", pool=name) == pages(
            found, name, "freed_pages_total"
        )
        assert value(found, "kvloom_kv_page_idle_before_evict_seconds_count", pool=name) == pages(
            found, name, "freed_pages_total", "evict"
        )
    first = pools[0].name
    assert value(found, "kvloom_kv_allocated_pages_total", pool=first, op="prefill") > 0
    assert pages(found, first, "allocation_failures_total") > 0
    assert value(found, "kvloom_prefix_cache_hit_tokens_total", tier="device") > 0
    assert value(found, "kvloom_prefix_cache_query_tokens_total") <= asked
    assert value(found, "kvloom_prefix_cache_eviction_seconds_count") > 0
    inserted = value(found, "kvloom_prefix_cache_inserted_pages_total")
    cached = sum(value(found, "kvloom_kv_pages", pool=pool.name, state="cached") for pool in pools)
    assert inserted == cached + total(found, "prefix_cache_evicted_pages_total")
    assert value(found, "kvloom_prefix_cache_entries") > 0


async def test_decode_takes_pages_and_the_host_gives_back() -> None:
    """Four who outgrow the pool together: each page is counted for what it was taken for."""
    async with engine_of((FULL,), tokens=100, host_bytes=1 << 20) as engine:
        collector = instrument(engine, model="m")
        ends = await together(*(partial(say, engine, [n] * 20, 25) for n in range(1, 5)))
        found = series(collector.render())
    preempted = sum(end.usage.preemptions for end in ends)
    assert preempted > 0, "the pool is too large for this test"
    ops = {op: value(found, "kvloom_kv_allocated_pages_total", pool="full", op=op) for op in ("decode", "restore")}
    assert all(ops.values())
    assert value(found, "kvloom_kv_allocation_failures_total", pool="full", op="decode") >= preempted
    restored = value(found, "kvloom_prefix_cache_hit_tokens_total", tier="host")
    assert value(found, "kvloom_prefix_cache_offload_bytes_total", direction="in") == restored * FULL.bytes_per_token
    # Whoever comes back from the host has had his prompt counted before.
    assert value(found, "kvloom_prompt_tokens_total", source="host_hit") == 0
    assert value(found, "kvloom_prompt_tokens_total", source="computed") == 80
    require_sound(found, (FULL,))


@pytest.mark.parametrize("host_bytes", [0, 1 << 20], ids=["recompute", "offload"])
async def test_evicted_prefixes_come_back_from_the_host(host_bytes: int) -> None:
    """Each prompt token is counted once, from where it came; who was preempted is counted as a hit of the host only."""
    async with engine_of((FULL,), host_bytes=host_bytes, host_prefix_bytes=1 << 20) as engine:
        collector = instrument(engine, model="m")
        ends: list[Finished] = []
        for _ in range(3):
            for n in range(1, 4):
                ends += await together(*(partial(say, engine, [n] * 40 + [m] * 5, 9) for m in (n, n + 1)))
        found = series(collector.render())
    require_sound(found, (FULL,))
    names = ("computed", "device_hit", "host_hit")
    sources = {source: value(found, "kvloom_prompt_tokens_total", source=source) for source in names}
    assert sources["host_hit"] >= 200
    assert sum(sources.values()) == 45 * len(ends)
    assert sources["device_hit"] + sources["host_hit"] == sum(end.usage.cached_tokens for end in ends)
    hits = value(found, "kvloom_prefix_cache_hit_tokens_total", tier="host")
    assert value(found, "kvloom_prefix_cache_offload_bytes_total", direction="in") >= hits * FULL.bytes_per_token
    assert value(found, "kvloom_prefix_cache_offload_bytes_total", direction="out") > 0


@pytest.mark.parametrize("cache", [RadixPrefixCache, NullPrefixCache], ids=["cached", "plain"])
async def test_totals_are_those_of_the_requests_with_a_cache_and_without(cache: type[KeptPrefixCache]) -> None:
    """B40: nothing is counted twice for who was preempted, nor lost for who found his prompt cached."""
    runner = ToyRunner()
    memory = KVMemory.for_runner(runner, capacity_tokens=64, page_size=1, prefix_cache=cache())
    async with Engine(runner, memory, SchedulerConfig(max_running=8)) as engine:
        collector = instrument(engine, model="m")
        ends = await together(*(partial(ask, engine, n, 5) for n in (10, 20, 30)))
        ends += await together(*(partial(ask, engine, n, 5) for n in (10, 20, 30)))
        found = series(collector.render())
    require_idle(found)
    assert sum(end.usage.preemptions for end in ends) > 0, "the pool is too large for this test"
    sources = {
        source: value(found, "kvloom_prompt_tokens_total", source=source)
        for source in ("computed", "device_hit", "host_hit", "storage_hit")
    }
    assert sum(sources.values()) == 120
    assert (sources["device_hit"] > 0) == (cache is RadixPrefixCache)
    assert sources["device_hit"] == sum(end.usage.cached_tokens for end in ends)
    assert value(found, "kvloom_output_tokens_total") == 30
    assert total(found, "preemptions_total") == sum(end.usage.preemptions for end in ends)


async def test_idle_is_at_once_what_the_cache_keeps() -> None:
    """B41: after the last token, after an abort of all, and again later; no page of it is active."""
    async with engine_of((FULL, SWA), tokens=400) as engine:
        collector = instrument(engine, model="m")
        await crowd(engine, random.Random(5), 24)
        for found in (series(collector.render()), await scrape_elsewhere(collector)):
            require_sound(found, (FULL, SWA))
            for pool in ("full", "swa"):
                assert value(found, "kvloom_kv_used_ratio", pool=pool) == 0
                assert value(found, "kvloom_kv_slack_tokens", pool=pool) == 0
                assert value(found, "kvloom_kv_pages", pool=pool, state="cached") > 0
        async with anyio.create_task_group() as tasks:
            for number in range(6):
                tasks.start_soon(partial(say, engine, [number] * 20, 60))
            await anyio.sleep(0.01)
            tasks.cancel_scope.cancel()
        await anyio.sleep(0.05)
        found = series(collector.render())
    require_sound(found, (FULL, SWA))
    assert total(found, "requests") == total(found, "kv_used_ratio") == 0
    assert total(found, "kv_peak_active_pages") > 0


async def test_series_do_not_grow_with_what_is_served() -> None:
    """B43: also not by namespaces of the cache, which clients may choose."""
    async with engine_of((FULL, SWA)) as engine:
        collector = instrument(engine, model="m")
        before = series(collector.render()).keys()
        await crowd(engine, random.Random(7), 30)
        assert series(collector.render()).keys() == before
