"""Statistics, steps and requests made by hand, with every number different from the others."""

import inspect
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from kvloom.allocator.books import GROUP_PAGES
from kvloom.allocator.page_sampling import RESIDENCY_SECONDS
from kvloom.allocator.prefix import PrefixStatistics
from kvloom.allocator.reports import HostStatistics, MemoryStatistics, PageTimes, PoolGeometry, PoolStatistics
from kvloom.allocator.reuse import EVICTION_SECONDS
from kvloom.allocator.tally import TallyState
from kvloom.scheduler.plan import Committed, Plan, SchedulerStatistics
from kvloom.scheduler.request import Finished, FinishReason, Request, Sequence, Timings, Usage
from kvloom.scheduler.status import EngineState, EngineStatistics

Made = TypeVar("Made", Plan, Sequence)
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]

IDLE_SCHEDULER = SchedulerStatistics(
    waiting=0, preempted=0, prefilling=0, decoding=0, steps_in_flight=0, waiting_prompt_tokens=0,
    oldest_waiting_at=None, received=0, rejected={}, finished={}, preemptions=0, prompt_tokens_computed=0,
    prompt_tokens_recomputed=0, prompt_tokens_cached=0, prompt_tokens_loaded=0, output_tokens=0, wasted_tokens={},
    steps={}, failed_steps=0,
)  # fmt: skip
BUSY_SCHEDULER = SchedulerStatistics(
    waiting=5, preempted=2, prefilling=3, decoding=7, steps_in_flight=1, waiting_prompt_tokens=811,
    oldest_waiting_at=12.5, received=60, rejected={"queue_full": 4, "too_long": 1},
    finished={FinishReason.STOP: 20, FinishReason.LENGTH: 11, FinishReason.ABORT: 6, FinishReason.ERROR: 1},
    preemptions=9, prompt_tokens_computed=4001, prompt_tokens_recomputed=302, prompt_tokens_cached=503,
    prompt_tokens_loaded=48, output_tokens=2004, wasted_tokens={"preempted": 305, "aborted": 16},
    steps={"prefill": 21, "decode": 212, "mixed": 33}, failed_steps=1,
)  # fmt: skip


def pool(name: str = "full", **changes: Any) -> PoolStatistics:
    busy = PoolStatistics(
        pool=name, page_size=16, capacity=100, free=41, held=30, cached=22, quarantined=7, peak_held=64, peak_active=66,
        allocated_by_op={"prefill": 300, "decode": 260, "restore": 30},
        freed={"finish": 400, "abort": 28, "preempt": 20, "evict": 90}, failures_by_op={"prefill": 3, "decode": 12},
        groups=38, group_pages=tally(GROUP_PAGES, 448.0, 31, 7), sorts=2, slack_tokens=113, evictable=17,
        times=PageTimes(
            0.125,
            lifetime=tally(RESIDENCY_SECONDS, 65.5, 0, 51, 1), idle_before_evict=tally(RESIDENCY_SECONDS, 9.5, 14),
            reuse_gap=tally(RESIDENCY_SECONDS, 18.5, 37),
        ),
    )  # fmt: skip
    return busy._replace(**changes)


def tally(bounds: tuple[float, ...], total: float, *counts: int) -> TallyState:
    """With these counts in the first buckets."""
    return TallyState(bounds, (*counts, *[0] * (len(bounds) + 1 - len(counts))), total)


BUSY_PREFIX = PrefixStatistics(
    entries=13, pages={"full": 22}, locked={"full": 5}, inserted=120, duplicates=19, evicted={("full", "capacity"): 90},
    query_tokens=6001, hit_tokens=503, regret_tokens=77, host_hit_tokens=48,
)  # fmt: skip


def memory(*pools: PoolStatistics, evicted: Mapping[tuple[str, str], int] | None = None) -> MemoryStatistics:
    by_name = {one.pool: one for one in pools or (pool(),)}
    return MemoryStatistics(
        by_name,
        rows_capacity=16,
        rows_held=10,
        rows_quarantined=1,
        prefix=BUSY_PREFIX if evicted is None else BUSY_PREFIX._replace(evicted=evicted),
        host=HostStatistics(limit=1 << 20, used=4096, bytes_out=12288, bytes_in=8192),
        eviction_seconds=tally(EVICTION_SECONDS, 0.004, 5, 0, 1),
        geometry={name: PoolGeometry(one.page_size, 24_576, "bfloat16", 24) for name, one in by_name.items()},
        restored_tokens=59,
        violations={"double_free": 2, "conservation": 1},
    )


def idle() -> EngineStatistics:
    never = tally(RESIDENCY_SECONDS, 0.0)
    fresh = pool(
        free=100, held=0, cached=0, quarantined=0, peak_held=0, peak_active=0, allocated_by_op={}, freed={},
        failures_by_op={}, groups=0, group_pages=tally(GROUP_PAGES, 0.0), sorts=0, slack_tokens=0, evictable=0,
        times=PageTimes(0.125, never, never, never),
    )  # fmt: skip
    nothing = memory(fresh)._replace(
        prefix=PrefixStatistics(), host=HostStatistics(0, 0, 0, 0), eviction_seconds=tally(EVICTION_SECONDS, 0.0),
        restored_tokens=0, violations={},
    )  # fmt: skip
    return EngineStatistics(EngineState.STARTING, False, IDLE_SCHEDULER, nothing, 0.0, 0.0, {})


def busy(**changes: Any) -> EngineStatistics:
    made = EngineStatistics(
        EngineState.RUNNING, False, BUSY_SCHEDULER, memory(), 1.7e9, 1.6e9, {"runner": 1, "emit": 2}
    )
    return made._replace(**changes)


def plan(rows: int = 3, decode_rows: int = 2, step: int = 0) -> Plan:
    numbers = np.arange(rows, dtype=np.int32)
    return _only(Plan, step=step, rows=numbers, decode_rows=decode_rows, token_ids=numbers)


def _only(kind: type[Made], **used: Any) -> Made:
    """With these fields and the others empty: what the metrics never look at may change without us."""
    return kind(**{**dict.fromkeys(inspect.signature(kind).parameters), **used})


def ended(
    reason: FinishReason = FinishReason.STOP,
    request_id: str = "r",
    usage: Usage | None = None,
    error: Exception | None = None,
    **timings: Any,
) -> tuple[Sequence, Finished]:
    """A request that arrived at 100 and, unless said otherwise, was admitted at 101 and ended at 104."""
    times = Timings(
        **{"arrived_at": 100.0, "admitted_at": 101.0, "finished_at": 104.0, "queue_seconds": 1.0, **timings}
    )
    request = Request(id=request_id, prompt=np.array([4711, 4712], np.int32))
    sequence = _only(Sequence, request=request)
    return sequence, Finished(request_id, reason, usage or Usage(10, 5), times, error)


def committed(*finished: tuple[Sequence, Finished], first: Any = (), gaps: Any = (), tokens: Any = ()) -> Committed:
    return Committed((), tokens, finished, first, np.asarray(gaps, np.float64))


def series(exposition: bytes) -> Series:
    """Every sample of a scrape; fails when one is there twice."""
    found: Series = {}
    for family in text_string_to_metric_families(exposition.decode()):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found, f"{key} is exported twice"
            found[key] = sample.value
    return found


def value(found: Series, name: str, **labels: str) -> float:
    """One sample of the engine "0" of model "m", unless said otherwise."""
    return found[name, frozenset({"engine": "0", "model": "m", **labels}.items())]
