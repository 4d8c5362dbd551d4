"""One call from an engine to its metrics."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from prometheus_client import CollectorRegistry

from kvloom.metrics.collector import KVLoomCollector
from kvloom.metrics.timings import TimingObserver

if TYPE_CHECKING:
    from kvloom.scheduler.ports import Observer
    from kvloom.scheduler.status import EngineStatistics


class Instrumented(Protocol):
    """What is needed of an engine."""

    def statistics(self) -> "EngineStatistics":
        """The last snapshot; immutable, from any thread."""

    def add_observer(self, observer: "Observer") -> object:
        """Tell `observer` what happens from now on."""


def instrument(
    engine: Instrumented,
    *,
    registry: CollectorRegistry | None = None,
    model: str = "",
    name: str = "0",
    namespace: str = "kvloom",
    buckets: Mapping[str, Sequence[float]] | None = None,
) -> KVLoomCollector:
    """Export an engine's metrics; `collector.render()` is what a scrape answers.

    registry   where to join, beside the program's own metrics; None: a new one, `collector.registry`
    model      label `model`: a name you chose, never one that a client sent
    name       label `engine`: tells the engines of one registry apart (they share one collector)
    namespace  prefix of every metric
    buckets    family name without prefix -> other upper bounds for its histogram; of pages they are fixed

    Raises ValueError when the registry already exports an engine of that name, or for labels that are no text; nothing
    has changed then.
    """
    for label, value in (("model", model), ("name", name)):
        if not isinstance(value, str) or not value.isprintable():
            raise ValueError(f"{label}={value!r} is no printable text")
    timings = TimingObserver(buckets)
    collector = None if registry is None else _resident(registry, namespace)
    if collector is None:
        collector = KVLoomCollector(
            engine.statistics, timings, engine=name, model=model, namespace=namespace, registry=registry
        )
    else:
        collector.add(engine.statistics, timings, engine=name, model=model)
    engine.add_observer(timings)
    return collector


def _resident(registry: CollectorRegistry, namespace: str) -> KVLoomCollector | None:
    """The collector that serves `namespace` in `registry`.

    Two collectors with the same families would repeat each family's header, which is no valid exposition; so engines
    share one.  A registry has no public way to say who is in it, hence the private name: should it go away, the second
    engine of a registry is refused as a duplicate, and the test of this function says why.
    """
    owner = getattr(registry, "_names_to_collectors", {}).get(f"{namespace}_requests")
    return owner if isinstance(owner, KVLoomCollector) else None
