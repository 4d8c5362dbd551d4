"""From one snapshot to the numbers of the catalogue: what each counter and gauge says."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvloom.metrics import catalogue

if TYPE_CHECKING:
    from kvloom.allocator.reports import PoolStatistics
    from kvloom.scheduler.plan import SchedulerStatistics
    from kvloom.scheduler.status import EngineStatistics

Values = dict[tuple[str, ...], float]  # by label values, in the order of the family's labels


def readings(statistics: "EngineStatistics") -> dict[str, Values]:
    """The value of every counter and gauge, by family; label values that have not occurred are there with 0."""
    # The loop runs on any memory that meets its ports; one that reports no pools has no page metrics.
    pools: Mapping[str, PoolStatistics] = getattr(statistics.memory, "pools", {})
    evicted: Mapping[tuple[str, str], int] = getattr(statistics.memory, "evicted", {})
    return {
        "oldest_waiting_timestamp_seconds": {(): statistics.oldest_waiting_at or 0.0},
        "last_step_timestamp_seconds": {(): statistics.last_step_at},
        "engine_state": {(state,): state == statistics.state for state in catalogue.ENGINE_STATES},
        "errors_total": _split(statistics.errors, catalogue.ERROR_PLACES),
        **_scheduling(statistics.scheduler),
        **_paging(pools),
        "prefix_cache_evicted_pages_total": _per_pool(
            {name: {reason: pages for (pool, reason), pages in evicted.items() if pool == name} for name in pools},
            catalogue.EVICT_REASONS,
        ),
    }


def _scheduling(scheduler: "SchedulerStatistics") -> dict[str, Values]:
    states = {
        "waiting": scheduler.waiting,
        "prefilling": scheduler.prefilling,
        "decoding": scheduler.decoding,
        "preempted": scheduler.preempted,
    }
    sources = {
        "computed": scheduler.prompt_tokens_computed,
        "device_hit": scheduler.prompt_tokens_cached,
        "recomputed": scheduler.prompt_tokens_recomputed,
    }
    return {
        "requests_received_total": {(): scheduler.received},
        "requests_rejected_total": _split(scheduler.rejected, catalogue.REJECT_REASONS),
        "requests_finished_total": _split(scheduler.finished, catalogue.FINISH_REASONS),
        "requests": _split(states, catalogue.REQUEST_STATES),
        "waiting_prompt_tokens": {(): scheduler.waiting_prompt_tokens},
        "prompt_tokens_total": _split(sources, catalogue.PROMPT_SOURCES),
        "output_tokens_total": {(): scheduler.output_tokens},
        "wasted_tokens_total": _split(scheduler.wasted_tokens, catalogue.WASTE_REASONS),
        "steps_total": _split(scheduler.steps, catalogue.STEP_KINDS),
        "preemptions_total": _split({"kv": scheduler.preemptions}, catalogue.PREEMPT_REASONS),
    }


def _paging(pools: Mapping[str, "PoolStatistics"]) -> dict[str, Values]:
    states = {
        name: {"free": pool.free, "cached": pool.cached, "active": pool.held, "pending_free": pool.quarantined}
        for name, pool in pools.items()
    }
    return {
        "kv_pages": _per_pool(states, catalogue.PAGE_STATES),
        "kv_capacity_pages": {(name,): pool.capacity for name, pool in pools.items()},
        "kv_used_ratio": {(name,): pool.held / pool.capacity if pool.capacity else 0.0 for name, pool in pools.items()},
        "kv_peak_active_pages": {(name,): pool.peak_held for name, pool in pools.items()},
        "kv_slack_tokens": {(name,): pool.slack_tokens for name, pool in pools.items()},
        "kv_freed_pages_total": _per_pool({name: pool.freed for name, pool in pools.items()}, catalogue.FREE_REASONS),
        "kv_free_groups_total": {(name,): pool.groups for name, pool in pools.items()},
        "kv_free_list_sorts_total": {(name,): pool.sorts for name, pool in pools.items()},
    }


def _per_pool(counts: Mapping[str, Mapping[str, int]], closed: tuple[str, ...]) -> Values:
    return {(pool, *value): count for pool, split in counts.items() for value, count in _split(split, closed).items()}


def _split(counts: Mapping[str, int], closed: tuple[str, ...]) -> Values:
    """One count per value of the closed set; strangers together are "other", and only when there are any."""
    values: Values = {(value,): counts.get(value, 0) for value in closed}
    strangers = sum(count for value, count in counts.items() if value not in closed)
    return {**values, (catalogue.OTHER,): strangers} if strangers else values
