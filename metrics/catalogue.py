"""Every metric kvloom exports, one row each.  Names, types and labels are API: `tests/metrics/families.txt` pins them.

Rules, from Prometheus' own naming guide: one unit per metric, base units, the unit last; `_total` on counters only;
one quantity per metric, so that a sum over all its series means something; times as timestamps, not as ages; and every
label from a closed set that is exported from the start, because the first increment of a series that was not there
before is lost to `rate()`.  The base labels `engine` and `model` come with every series and are not repeated here.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

BASE_LABELS = ("engine", "model")


class Kind(enum.StrEnum):
    """The Prometheus type of a family."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    INFO = "info"


@dataclass(frozen=True, slots=True)
class Family:
    """One metric.

    name      without the prefix
    labels    label -> its closed set of values; None: the names of the engine's pools, or free text of an info metric
    buckets   upper bounds of a histogram, ascending, without the infinite one
    observed  a histogram that the metrics' observer counts; else the memory has counted it, into buckets of its own
    """

    name: str
    kind: Kind
    help: str
    labels: Mapping[str, tuple[str, ...] | None] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()
    observed: bool = True


# What a metric may be split by.  A value outside its closed set is counted as "other": totals stay whole, and clients
# cannot make series.
OTHER = "other"
PAGE_STATES = ("free", "cached", "active", "reserved", "pending_free", "in_transfer")
REQUEST_STATES = ("waiting", "prefilling", "decoding", "preempted", "paused")
ENGINE_STATES = ("starting", "running", "paused", "draining", "stopped", "failed")
REJECT_REASONS = (
    "queue_full", "queue_tokens", "too_long", "never_fits", "deadline", "draining", "paused", "invalid",
)  # fmt: skip
FINISH_REASONS = ("stop", "length", "abort", "deadline", "error", "shutdown")
FREE_REASONS = ("finish", "abort", "preempt", "window", "evict", "rollback")
ALLOCATION_OPS = ("prefill", "decode", "restore")
# The loop's memory has no table from full to window pages that could go wrong: "swa_map" stays 0.
VIOLATION_CHECKS = ("conservation", "double_free", "foreign_page", "swa_map")
CACHE_TIERS = ("device", "host", "storage")
DIRECTIONS = ("out", "in")
EVICT_REASONS = ("capacity", "watermark", "ttl", "reset", "manual")
PREEMPT_REASONS = ("kv", "priority", "pause")
PROMPT_SOURCES = ("computed", "device_hit", "host_hit", "storage_hit", "recomputed")
WASTE_REASONS = ("preempted", "aborted", "overshoot", "draft_rejected")
STEP_KINDS = ("prefill", "decode", "mixed")
QUEUE_PHASES = ("first", "requeue")
ERROR_PLACES = ("runner", "sampler", "hook", "emit", "allocator")
POOLS = None

# Bounds see a 4 ms decoder as well as an overloaded server: what lies in one bucket, or past the last, shows nothing.
WAIT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
STEP_SECONDS = (
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0,
)  # fmt: skip
DURATION_SECONDS = (
    0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0,
)  # fmt: skip
TOKENS = tuple(4.0**power for power in range(11))  # 1 to 1,048,576
GROUP_PAGES = TOKENS[:10]  # 1 to 262,144
RESIDENCY_SECONDS = (0.01, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)
EVICTION_SECONDS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0)
PREEMPTIONS = (0.0, 1.0, 2.0, 3.0, 5.0, 10.0)  # none has a bucket of its own

C, G, H, I = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM, Kind.INFO  # noqa: E741 - the letters of the table below

CATALOGUE: tuple[Family, ...] = (
    # Requests
    Family("requests_received_total", C, "Requests submitted: rejected, finished or in flight."),
    Family("requests_rejected_total", C, "Requests refused before they were queued.", {"reason": REJECT_REASONS}),
    Family("requests_finished_total", C, "Requests that ended after they were queued.", {"reason": FINISH_REASONS}),
    Family("requests", G, "Requests in flight.", {"state": REQUEST_STATES}),
    Family("waiting_prompt_tokens", G, "Tokens that the waiting requests would have to compute."),
    Family("oldest_waiting_timestamp_seconds", G, "Arrival of the head of the queue, 0 when nothing waits."),
    Family(
        "request_queue_seconds", H, "Time in the queue: until first admitted, and again after preemptions.",
        {"phase": QUEUE_PHASES}, WAIT_SECONDS,
    ),
    Family("time_to_first_token_seconds", H, "From submission to the first token.", buckets=WAIT_SECONDS),
    Family("inter_token_seconds", H, "Between tokens of one request.", buckets=STEP_SECONDS),
    Family(
        "request_duration_seconds", H, "From submission to the end.", {"reason": FINISH_REASONS}, DURATION_SECONDS,
    ),
    Family("request_prompt_tokens", H, "Prompt lengths of ended requests.", buckets=TOKENS),
    Family("request_output_tokens", H, "Output lengths of ended requests.", buckets=TOKENS),
    Family("request_preemptions", H, "How often an ended request was preempted.", buckets=PREEMPTIONS),
    # Tokens and waste
    Family("prompt_tokens_total", C, "Prompt tokens by where their KV came from.", {"source": PROMPT_SOURCES}),
    Family("output_tokens_total", C, "Tokens generated."),
    Family("wasted_tokens_total", C, "Tokens computed and thrown away.", {"reason": WASTE_REASONS}),
    # Steps
    Family("steps_total", C, "Steps by what they held.", {"kind": STEP_KINDS}),
    Family("step_seconds", H, "From plan to result.", {"kind": STEP_KINDS}, STEP_SECONDS),
    Family("last_step_timestamp_seconds", G, "When the last step ended, 0 before the first."),
    # Pools
    Family("kv_pages", G, "Pages by state; sums to the capacity.", {"pool": POOLS, "state": PAGE_STATES}),
    Family("kv_capacity_pages", G, "Pages in the pool.", {"pool": POOLS}),
    Family(
        "kv_pool_info", I, "What a page of the pool is.",
        dict.fromkeys(("pool", "page_tokens", "page_bytes", "dtype", "layers")),
    ),
    Family("kv_used_ratio", G, "Share of pages that requests need: active and reserved.", {"pool": POOLS}),
    Family("kv_peak_active_pages", G, "Most pages active at once since start.", {"pool": POOLS}),
    Family("kv_slack_tokens", G, "Unused slots in partly filled active pages.", {"pool": POOLS}),
    Family("kv_allocated_pages_total", C, "Pages taken.", {"pool": POOLS, "op": ALLOCATION_OPS}),
    Family("kv_freed_pages_total", C, "Pages given back.", {"pool": POOLS, "reason": FREE_REASONS}),
    Family(
        "kv_allocation_failures_total", C, "Too few free pages, before eviction or preemption.",
        {"pool": POOLS, "op": ALLOCATION_OPS},
    ),
    Family("kv_free_groups_total", C, "Groups of pages given back at once.", {"pool": POOLS}),
    Family("kv_free_group_pages", H, "Pages given back at once.", {"pool": POOLS}, GROUP_PAGES, observed=False),
    Family("kv_free_list_sorts_total", C, "Merges of released pages into a sorted free list.", {"pool": POOLS}),
    Family("kv_invariant_violations_total", C, "Checks that failed; each is a defect.", {"check": VIOLATION_CHECKS}),
    Family(
        "kv_page_lifetime_seconds", H, "From taken to free, of sampled pages.",
        {"pool": POOLS}, RESIDENCY_SECONDS, observed=False,
    ),
    Family(
        "kv_page_idle_before_evict_seconds", H, "From last used to evicted, of sampled pages.",
        {"pool": POOLS}, RESIDENCY_SECONDS, observed=False,
    ),
    Family(
        "kv_page_reuse_gap_seconds", H, "From free to taken again, of sampled pages.",
        {"pool": POOLS}, RESIDENCY_SECONDS, observed=False,
    ),
    Family("kv_page_sample_ratio", G, "Share of the pages that are sampled.", {"pool": POOLS}),
    # Prefix cache
    Family("prefix_cache_query_tokens_total", C, "Tokens looked up, by the first look-up of each request."),
    Family(
        "prefix_cache_hit_tokens_total", C, "Tokens found: by first look-ups, or restored after a preemption.",
        {"tier": CACHE_TIERS},
    ),
    Family(
        "prefix_cache_evicted_pages_total", C, "Pages the prefix cache gave up.",
        {"pool": POOLS, "reason": EVICT_REASONS},
    ),
    Family(
        "prefix_cache_eviction_seconds", H, "Host time of an eviction.", buckets=EVICTION_SECONDS, observed=False,
    ),
    Family("prefix_cache_entries", G, "Nodes of the tree."),
    Family("prefix_cache_inserted_pages_total", C, "Pages that the cache took over, of all pools."),
    Family("prefix_cache_duplicate_pages_total", C, "Pages offered that the cache had already, of all pools."),
    Family("prefix_cache_regret_tokens_total", C, "Tokens missed that were cached not long before."),
    Family("prefix_cache_offload_bytes_total", C, "KV moved to the host and back.", {"direction": DIRECTIONS}),
    # Pressure and life
    Family("preemptions_total", C, "Requests sent back to the queue.", {"reason": PREEMPT_REASONS}),
    Family("engine_state", G, "1 for the state the engine is in.", {"state": ENGINE_STATES}),
    Family("errors_total", C, "Failures that the engine contained.", {"where": ERROR_PLACES}),
    Family(
        "build_info", I, "What this process is made of.",
        dict.fromkeys(("version", "torch", "python", "backend")),
    ),
)  # fmt: skip

BY_NAME: Mapping[str, Family] = MappingProxyType({family.name: family for family in CATALOGUE})
