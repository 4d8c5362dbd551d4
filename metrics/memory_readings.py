"""What the memory says in a snapshot: pages and prefix cache, as numbers, histograms and facts about its pools."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvloom.metrics import catalogue
from kvloom.metrics.values import Values, per_pool, split

if TYPE_CHECKING:
    from kvloom.allocator.reports import MemoryStatistics, PoolStatistics
    from kvloom.allocator.tally import TallyState
    from kvloom.scheduler.status import EngineStatistics


def memory_of(statistics: "EngineStatistics") -> "MemoryStatistics | None":
    """The memory's report.  The loop runs on any memory that meets its ports; one without pools reports nothing."""
    memory: MemoryStatistics = statistics.memory
    return memory if hasattr(memory, "pools") else None


def memory_readings(memory: "MemoryStatistics") -> dict[str, Values]:
    """The value of every counter and gauge that the memory has, by family."""
    return {
        **_pages(memory.pools),
        **_traffic(memory.pools),
        "kv_invariant_violations_total": split(memory.violations, catalogue.VIOLATION_CHECKS),
        **_cache(memory),
    }


def memory_tallies(memory: "MemoryStatistics") -> "dict[str, dict[tuple[str, ...], TallyState]]":
    """The histograms that the memory counts itself, by family and label values."""
    pools = memory.pools.items()
    return {
        "kv_free_group_pages": {(name,): pool.group_pages for name, pool in pools},
        "kv_page_lifetime_seconds": {(name,): pool.times.lifetime for name, pool in pools},
        "kv_page_idle_before_evict_seconds": {(name,): pool.times.idle_before_evict for name, pool in pools},
        "kv_page_reuse_gap_seconds": {(name,): pool.times.reuse_gap for name, pool in pools},
        "prefix_cache_eviction_seconds": {(): memory.eviction_seconds},
    }


def pool_infos(memory: "MemoryStatistics") -> list[dict[str, str]]:
    """What `kv_pool_info` says, a pool each."""
    return [
        {"pool": name, **{fact: str(value) for fact, value in geometry._asdict().items()}}
        for name, geometry in memory.geometry.items()
    ]


def _pages(pools: "Mapping[str, PoolStatistics]") -> dict[str, Values]:
    """Each page counts in one state.  Nothing reserves pages without taking them, or moves them: 0 in these states."""
    states = {
        name: {
            "free": pool.free,
            "cached": pool.evictable,
            "active": pool.active,
            "pending_free": pool.quarantined,
        }
        for name, pool in pools.items()
    }
    used = {name: pool.active / pool.capacity if pool.capacity else 0.0 for name, pool in pools.items()}
    return {
        "kv_pages": per_pool(states, catalogue.PAGE_STATES),
        "kv_capacity_pages": {(name,): pool.capacity for name, pool in pools.items()},
        "kv_used_ratio": {(name,): ratio for name, ratio in used.items()},
        "kv_peak_active_pages": {(name,): pool.peak_active for name, pool in pools.items()},
        "kv_slack_tokens": {(name,): pool.slack_tokens for name, pool in pools.items()},
        "kv_page_sample_ratio": {(name,): pool.times.sample_ratio for name, pool in pools.items()},
    }


def _traffic(pools: "Mapping[str, PoolStatistics]") -> dict[str, Values]:
    ops, reasons = catalogue.ALLOCATION_OPS, catalogue.FREE_REASONS
    return {
        "kv_allocated_pages_total": per_pool({name: pool.allocated_by_op for name, pool in pools.items()}, ops),
        "kv_allocation_failures_total": per_pool({name: pool.failures_by_op for name, pool in pools.items()}, ops),
        "kv_freed_pages_total": per_pool({name: pool.freed for name, pool in pools.items()}, reasons),
        "kv_free_groups_total": {(name,): pool.groups for name, pool in pools.items()},
        "kv_free_list_sorts_total": {(name,): pool.sorts for name, pool in pools.items()},
    }


def _cache(memory: "MemoryStatistics") -> dict[str, Values]:
    prefix, host = memory.prefix, memory.host
    evicted = {
        name: {reason: pages for (pool, reason), pages in prefix.evicted.items() if pool == name}
        for name in memory.pools
    }
    tiers = {"device": prefix.hit_tokens, "host": prefix.host_hit_tokens + memory.restored_tokens}
    return {
        "prefix_cache_query_tokens_total": {(): prefix.query_tokens},
        "prefix_cache_hit_tokens_total": split(tiers, catalogue.CACHE_TIERS),
        "prefix_cache_evicted_pages_total": per_pool(evicted, catalogue.EVICT_REASONS),
        "prefix_cache_entries": {(): prefix.entries},
        "prefix_cache_inserted_pages_total": {(): prefix.inserted},
        "prefix_cache_duplicate_pages_total": {(): prefix.duplicates},
        "prefix_cache_regret_tokens_total": {(): prefix.regret_tokens},
        "prefix_cache_offload_bytes_total": split({"out": host.bytes_out, "in": host.bytes_in}, catalogue.DIRECTIONS),
    }
