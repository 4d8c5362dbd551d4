"""Every number of a snapshot arrives under its own name."""

from kvloom.metrics.catalogue import BY_NAME, CATALOGUE, Kind
from kvloom.metrics.readings import readings
from kvloom.metrics.values import Values
from tests.metrics.made import busy, idle, memory, pool

# Every number of the busy engine that is not 0: each is in its place, and in no other.
NOT_ZERO: dict[str, Values] = {
    "requests_received_total": {(): 60},
    "requests_rejected_total": {("queue_full",): 4, ("too_long",): 1},
    "requests_finished_total": {("stop",): 20, ("length",): 11, ("abort",): 6, ("error",): 1},
    "requests": {("waiting",): 5, ("prefilling",): 3, ("decoding",): 7, ("preempted",): 2},
    "waiting_prompt_tokens": {(): 811},
    "oldest_waiting_timestamp_seconds": {(): 1.6e9},
    "prompt_tokens_total": {("computed",): 4001, ("device_hit",): 503, ("host_hit",): 48, ("recomputed",): 302},
    "output_tokens_total": {(): 2004},
    "wasted_tokens_total": {("preempted",): 305, ("aborted",): 16},
    "steps_total": {("prefill",): 21, ("decode",): 212, ("mixed",): 33},
    "last_step_timestamp_seconds": {(): 1.7e9},
    "kv_pages": {("full", "free"): 41, ("full", "cached"): 17, ("full", "active"): 35, ("full", "pending_free"): 7},
    "kv_capacity_pages": {("full",): 100},
    "kv_used_ratio": {("full",): 0.35},
    "kv_peak_active_pages": {("full",): 66},
    "kv_slack_tokens": {("full",): 113},
    "kv_allocated_pages_total": {("full", "prefill"): 300, ("full", "decode"): 260, ("full", "restore"): 30},
    "kv_freed_pages_total": {
        ("full", "finish"): 400, ("full", "abort"): 28, ("full", "preempt"): 20, ("full", "evict"): 90,
    },
    "kv_allocation_failures_total": {("full", "prefill"): 3, ("full", "decode"): 12},
    "kv_free_groups_total": {("full",): 38},
    "kv_free_list_sorts_total": {("full",): 2},
    "kv_invariant_violations_total": {("double_free",): 2, ("conservation",): 1},
    "kv_page_sample_ratio": {("full",): 0.125},
    "prefix_cache_query_tokens_total": {(): 6001},
    "prefix_cache_hit_tokens_total": {("device",): 503, ("host",): 59 + 48},
    "prefix_cache_evicted_pages_total": {("full", "capacity"): 90},
    "prefix_cache_entries": {(): 13},
    "prefix_cache_inserted_pages_total": {(): 120},
    "prefix_cache_duplicate_pages_total": {(): 19},
    "prefix_cache_regret_tokens_total": {(): 77},
    "prefix_cache_offload_bytes_total": {("out",): 12288, ("in",): 8192},
    "preemptions_total": {("kv",): 9},
    "engine_state": {("running",): 1},
    "errors_total": {("runner",): 1, ("emit",): 2},
}  # fmt: skip


def test_there_is_a_reading_for_every_row_of_the_catalogue() -> None:
    plain = {family.name for family in CATALOGUE if family.kind in (Kind.COUNTER, Kind.GAUGE)}
    assert readings(busy()).keys() == plain


def test_label_values_match_the_labels() -> None:
    for name, values in readings(busy()).items():
        closed = tuple(BY_NAME[name].labels.values())
        for labels in values:
            assert len(labels) == len(closed)
            assert all(known is None or label in known for label, known in zip(labels, closed, strict=True))


def test_each_number_has_its_place() -> None:
    found = {
        name: {labels: value for labels, value in values.items() if value} for name, values in readings(busy()).items()
    }
    assert {name: values for name, values in found.items() if values} == NOT_ZERO


def test_page_states_sum_to_the_capacity() -> None:
    swa = pool("swa", capacity=50, free=1, held=40, cached=0, quarantined=9, evictable=0)
    statistics = busy(memory=memory(pool(), swa))
    pages = readings(statistics)["kv_pages"]
    assert {name: sum(value for (one, _), value in pages.items() if one == name) for name in ("full", "swa")} == {
        "full": 100,
        "swa": 50,
    }


def test_conservation_of_requests() -> None:
    """B44: everyone who came is somewhere."""
    numbers = readings(busy())
    rejected, finished, in_flight = (
        sum(numbers[name].values()) for name in ("requests_rejected_total", "requests_finished_total", "requests")
    )
    assert numbers["requests_received_total"][()] == rejected + finished + in_flight


def test_states_are_one_hot() -> None:
    assert sum(readings(idle())["engine_state"].values()) == 1


def test_strangers_are_counted_together() -> None:
    """B43: whatever a caller puts in, one more series at most, and the total is whole."""
    rejected = {"queue_full": 4} | {f"model-{number}": 1 for number in range(1000)}
    scheduler = busy().scheduler._replace(rejected=rejected)
    values = readings(busy(scheduler=scheduler))["requests_rejected_total"]
    assert len(values) == len(BY_NAME["requests_rejected_total"].labels["reason"] or ()) + 1
    assert values["other",] == 1000
    assert sum(values.values()) == 1004


def test_each_pool_has_its_own_evictions() -> None:
    statistics = busy(memory=memory(pool(), pool("swa"), evicted={("full", "ttl"): 3, ("swa", "ttl"): 5}))
    values = readings(statistics)["prefix_cache_evicted_pages_total"]
    assert (values["full", "ttl"], values["swa", "ttl"], sum(values.values())) == (3, 5, 8)


def test_an_empty_pool_is_unused() -> None:
    nothing = pool(capacity=0, free=0, held=0, cached=0, quarantined=0, evictable=0)
    assert readings(busy(memory=memory(nothing)))["kv_used_ratio"] == {("full",): 0.0}


def test_a_memory_without_a_report_has_no_page_metrics() -> None:
    numbers = readings(busy(memory=object()))
    assert not [name for name in numbers if name.startswith(("kv_", "prefix_"))]
    assert numbers["requests_received_total"] == {(): 60}
