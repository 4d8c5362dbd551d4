"""From an engine to a scrape in one call."""

import subprocess
import sys

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

from kvloom.metrics import KVLoomCollector, instrument
from kvloom.scheduler.ports import Observer
from kvloom.scheduler.status import EngineStatistics
from tests.metrics.made import busy, committed, ended, idle, plan, series, value


class FakeEngine:
    def __init__(self, statistics: EngineStatistics | None = None) -> None:
        self.now = statistics or busy()
        self.observers: list[Observer] = []

    def statistics(self) -> EngineStatistics:
        return self.now

    def add_observer(self, observer: Observer) -> None:
        self.observers.append(observer)


def test_counters_are_read_and_durations_observed() -> None:
    engine = FakeEngine()
    collector = instrument(engine, model="m")
    (observer,) = engine.observers
    observer.on_step(plan(decode_rows=3), committed(gaps=[0.5]), 0.25)
    observer.on_finished(committed(ended()), 104.0)
    found = series(collector.render())
    assert value(found, "kvloom_requests_received_total") == 60
    assert value(found, "kvloom_step_seconds_sum", kind="decode") == 0.25
    assert value(found, "kvloom_request_duration_seconds_sum", reason="stop") == 4.0
    engine.now = idle()
    assert value(series(collector.render()), "kvloom_requests_received_total") == 0


def test_the_registry_is_its_own() -> None:
    collector, other = instrument(FakeEngine()), instrument(FakeEngine())
    assert collector.registry is not other.registry
    assert not any(family.name.startswith("kvloom") for family in REGISTRY.collect())


def test_it_joins_a_registry_of_the_program() -> None:
    registry = CollectorRegistry()
    Counter("app_clicks", "Clicks.", registry=registry)
    collector = instrument(FakeEngine(), registry=registry, model="m")
    assert collector.registry is registry
    found = series(collector.render())
    assert found["app_clicks_total", frozenset()] == 0
    assert value(found, "kvloom_requests_received_total") == 60


def test_two_engines_in_one_registry() -> None:
    """B45: they do not clash, and every family still has one header.

    Joining reads a private name of prometheus_client's registry; if this fails after an upgrade, look there first.
    """
    registry = CollectorRegistry()
    first = instrument(FakeEngine(), registry=registry, model="m", name="prefill")
    second = instrument(FakeEngine(idle()), registry=registry, model="n", name="decode")
    assert first is second
    assert first.engines == ("prefill", "decode")
    found = series(second.render())
    assert value(found, "kvloom_requests_received_total", engine="prefill") == 60
    assert value(found, "kvloom_requests_received_total", engine="decode", model="n") == 0
    names = [family.name for family in text_string_to_metric_families(second.render().decode())]
    assert len(names) == len(set(names))


def test_two_engines_of_one_name_are_refused_and_nothing_has_changed() -> None:
    registry, late = CollectorRegistry(), FakeEngine()
    collector = instrument(FakeEngine(), registry=registry)
    with pytest.raises(ValueError, match="engine '0'"):
        instrument(late, registry=registry)
    assert late.observers == []
    assert collector.engines == ("0",)


def test_an_engine_takes_the_place_of_another() -> None:
    registry = CollectorRegistry()
    instrument(FakeEngine(), registry=registry).remove("0")
    assert (
        value(
            series(instrument(FakeEngine(idle()), registry=registry, model="m").render()),
            "kvloom_requests",
            state="waiting",
        )
        == 0
    )


def test_two_namespaces_in_one_registry() -> None:
    registry = CollectorRegistry()
    assert instrument(FakeEngine(), registry=registry) is not instrument(FakeEngine(), registry=registry, namespace="b")


def test_a_registry_with_somebody_elses_metric_of_that_name_is_refused() -> None:
    registry, engine = CollectorRegistry(), FakeEngine()
    Counter("kvloom_output_tokens", "Not ours.", registry=registry)
    with pytest.raises(ValueError, match="kvloom_output_tokens"):
        instrument(engine, registry=registry)
    assert engine.observers == []


def test_buckets_reach_the_histograms() -> None:
    collector = instrument(FakeEngine(), buckets={"step_seconds": (7.0,)}, model="m")
    assert value(series(collector.render()), "kvloom_step_seconds_bucket", kind="decode", le="7.0") == 0


def test_the_answer_is_a_collector() -> None:
    assert isinstance(instrument(FakeEngine()), KVLoomCollector)


def test_importing_metrics_loads_no_tensors() -> None:
    """Also none of our own packages: the types of what is read are for the type checker."""
    program = (
        "import sys, kvloom.metrics; print({'torch', 'kvloom.scheduler', 'kvloom.allocator'} & sys.modules.keys())"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "set()"
