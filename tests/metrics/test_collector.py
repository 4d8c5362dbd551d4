"""The exposition, read back with the client library's own parser."""

import threading
import time
from itertools import product
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from kvloom.metrics.catalogue import CATALOGUE, Kind
from kvloom.metrics.collector import KVLoomCollector
from kvloom.metrics.timings import TimingObserver
from kvloom.scheduler.request import Usage
from kvloom.scheduler.status import EngineStatistics
from tests.metrics.made import busy, committed, ended, idle, memory, plan, pool, series, value

STORED = Path(__file__).parent / "families.txt"


NEVER_ALL_ZERO = ("kv_pages", "kv_capacity_pages", "kv_page_sample_ratio", "engine_state")


def collector_of(statistics: EngineStatistics, timings: TimingObserver | None = None) -> KVLoomCollector:
    return KVLoomCollector(lambda: statistics, timings or TimingObserver(), model="m")


def families(exposition: bytes) -> list[str]:
    """Name, type and labels of each family, as a scraper sees them."""
    lines = []
    for family in text_string_to_metric_families(exposition.decode()):
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        lines.append(f"{name} {family.type} {','.join(sorted(labels))}")
    return lines


def test_names_types_and_labels_are_those_of_the_stored_list() -> None:
    """B45: they are API.  Adding a line is a feature, changing one breaks dashboards."""
    assert families(collector_of(idle()).render()) == STORED.read_text(encoding="utf-8").splitlines()


def test_everything_is_there_before_anything_happened() -> None:
    """Every closed label value, at 0: else the first increment is lost to `rate()`."""
    found = series(collector_of(idle()).render())
    for family in CATALOGUE:
        if family.kind is Kind.INFO or family.name in NEVER_ALL_ZERO:
            continue
        name = f"kvloom_{family.name}" + ("_count" if family.kind is Kind.HISTOGRAM else "")
        for values in product(*(closed or ("full",) for closed in family.labels.values())):
            assert value(found, name, **dict(zip(family.labels, values, strict=True))) == 0
    assert value(found, "kvloom_kv_pages", pool="full", state="free") == 100
    assert value(found, "kvloom_engine_state", state="starting") == 1


def test_every_series_has_the_base_labels() -> None:
    for _, labels in series(collector_of(busy()).render()):
        assert {("engine", "0"), ("model", "m")} <= labels


def test_numbers_of_the_snapshot() -> None:
    found = series(collector_of(busy()).render())
    states = ("free", "cached", "active", "reserved", "pending_free", "in_transfer")
    pages = [value(found, "kvloom_kv_pages", pool="full", state=state) for state in states]
    assert pages == [41, 17, 35, 0, 7, 0]
    assert sum(pages) == value(found, "kvloom_kv_capacity_pages", pool="full")
    assert value(found, "kvloom_requests_received_total") == 60
    assert value(found, "kvloom_engine_state", state="running") == 1


def test_a_histogram_is_cumulative_and_its_bounds_are_floats() -> None:
    timings = TimingObserver({"time_to_first_token_seconds": (0.5, 120.0)})
    timings.on_step(plan(), committed(first=[0.5, 0.75, 1000.0]), 0.01)
    text = collector_of(idle(), timings).render().decode()
    lines = [line.split("{")[1] for line in text.splitlines() if line.startswith("kvloom_time_to_first_token_seconds")]
    assert lines == [
        'engine="0",le="0.5",model="m"} 1.0',
        'engine="0",le="120.0",model="m"} 2.0',
        'engine="0",le="+Inf",model="m"} 3.0',
        'engine="0",model="m"} 3.0',
        'engine="0",model="m"} 1001.25',
    ]


def test_a_histogram_that_the_memory_counts() -> None:
    found = series(collector_of(busy()).render())
    family = "kvloom_kv_page_lifetime_seconds"
    buckets = [value(found, f"{family}_bucket", pool="full", le=le) for le in ("0.01", "0.1", "0.5", "86400.0", "+Inf")]
    assert buckets == [0, 51, 52, 52, 52]
    assert value(found, f"{family}_count", pool="full") == 52
    assert value(found, f"{family}_sum", pool="full") == 65.5
    assert value(found, "kvloom_kv_free_group_pages_count", pool="full") == value(
        found, "kvloom_kv_free_groups_total", pool="full"
    )
    assert value(found, "kvloom_prefix_cache_eviction_seconds_count") == 6


def test_pool_info_has_a_series_for_each_pool() -> None:
    found = series(collector_of(busy(memory=memory(pool(), pool("swa")))).render())
    infos = [dict(labels) for name, labels in found if name == "kvloom_kv_pool_info"]
    facts = {"page_tokens": "16", "page_bytes": "24576", "dtype": "bfloat16", "layers": "24"}
    assert sorted(infos, key=lambda info: info["pool"]) == [
        {"engine": "0", "model": "m", "pool": name, **facts} for name in ("full", "swa")
    ]


def test_a_memory_without_a_report_has_no_page_metrics() -> None:
    names = {name for name, _ in series(collector_of(busy(memory=object())).render())}
    assert not [name for name in names if name.startswith(("kvloom_kv_", "kvloom_prefix_"))]
    assert "kvloom_build_info" in names


def test_build_info_says_what_this_is_made_of() -> None:
    labels = next(dict(labels) for name, labels in series(collector_of(idle()).render()) if name == "kvloom_build_info")
    assert labels.keys() == {"engine", "model", "version", "torch", "python", "backend"}
    assert all(labels[name] for name in ("version", "torch", "python", "backend"))


def test_a_scrape_is_of_now() -> None:
    pictures = iter([idle(), busy()])
    collector = KVLoomCollector(lambda: next(pictures), TimingObserver(), model="m")
    assert value(series(collector.render()), "kvloom_output_tokens_total") == 0
    assert value(series(collector.render()), "kvloom_output_tokens_total") == 2004


def test_a_scrape_reads_one_snapshot() -> None:
    reads = []
    collector = KVLoomCollector(lambda: reads.append(1) or busy(), TimingObserver())  # type: ignore[func-returns-value]
    assert not reads, "registration collects nothing"
    collector.render()
    assert len(reads) == 1


def test_series_are_as_many_whatever_the_requests_are_called() -> None:
    """B43: 1,000 requests of 1,000 clients, and neither their ids nor their tokens are in the scrape."""
    timings = TimingObserver()
    collector = collector_of(busy(), timings)
    before = series(collector.render()).keys()
    for number in range(1000):
        timings.on_finished(committed(ended(request_id=f"secret-{number}", usage=Usage(number, number))), 104.0)
    text = collector.render()
    assert series(text).keys() == before
    assert b"secret" not in text
    assert b"4711" not in text


def test_series_are_few() -> None:
    """Two pools, default buckets."""
    statistics = busy(memory=memory(pool(), pool("swa")))
    assert len(series(collector_of(statistics).render())) < 700


def test_large_numbers_stay_exact_and_cheap() -> None:
    scheduler = busy().scheduler._replace(output_tokens=2**53 - 1, received=10**15)
    timings = TimingObserver()
    for _ in range(100):
        timings.on_finished(committed(*[ended()] * 1000), 104.0)
    collector = collector_of(busy(scheduler=scheduler), timings)
    text, durations = b"", []
    for _ in range(5):
        started = time.perf_counter()
        text = collector.render()
        durations.append(time.perf_counter() - started)
    assert value(series(text), "kvloom_output_tokens_total") == 2**53 - 1
    assert value(series(text), "kvloom_request_duration_seconds_count", reason="stop") == 100_000
    assert min(durations) < 0.1  # 5 ms on an idle machine


def test_scrapes_from_other_threads() -> None:
    timings = TimingObserver()
    collector, texts = collector_of(busy(), timings), []
    threads = [threading.Thread(target=lambda: texts.append(collector.render())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(2000):
        timings.on_step(plan(), committed(gaps=[0.25] * 20), 0.01)
    for thread in threads:
        thread.join()
    for text in texts:
        found = series(text)
        count = value(found, "kvloom_inter_token_seconds_count")
        assert value(found, "kvloom_inter_token_seconds_sum") == 0.25 * count
        assert value(found, "kvloom_inter_token_seconds_bucket", le="0.5") == count


def test_openmetrics_accepts_it_too() -> None:
    text = openmetrics.generate_latest(collector_of(busy()).registry).decode()  # type: ignore[no-untyped-call]
    kinds = {family.name: family.type for family in parse_openmetrics(text)}  # type: ignore[no-untyped-call]
    assert kinds["kvloom_build"] == "info"
    assert kinds["kvloom_requests_received"] == "counter"


def test_a_namespace_of_ones_own() -> None:
    collector = KVLoomCollector(busy, TimingObserver(), namespace="mine")
    assert all(name.startswith("mine_") for name, _ in series(collector.render()))


@pytest.mark.parametrize("namespace", ["", "a:b", "a-b", "9a", "a b"])
def test_a_namespace_that_is_no_plain_name_is_refused(namespace: str) -> None:
    with pytest.raises(ValueError, match="namespace"):
        KVLoomCollector(busy, TimingObserver(), namespace=namespace)


def test_a_second_collector_of_the_same_families_is_refused() -> None:
    registry = CollectorRegistry()
    KVLoomCollector(busy, TimingObserver(), registry=registry)
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        KVLoomCollector(busy, TimingObserver(), engine="1", registry=registry)


def test_engines_come_and_go() -> None:
    collector = collector_of(busy())
    collector.add(idle, TimingObserver(), engine="1", model="m")
    found = series(collector.render())
    assert value(found, "kvloom_output_tokens_total") == 2004
    assert value(found, "kvloom_output_tokens_total", engine="1") == 0
    with pytest.raises(ValueError, match="engine '1'"):
        collector.add(idle, TimingObserver(), engine="1")
    collector.remove("0")
    collector.remove("never there")
    assert collector.engines == ("1",)
    assert all(("engine", "1") in labels for _, labels in series(collector.render()))
