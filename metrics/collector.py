"""The Prometheus side: engines' snapshots turned into metric families when somebody scrapes.

Nothing here runs while no one asks, and nothing locks: a scrape reads one immutable snapshot per engine, from whatever
thread it is in, so its numbers belong together and page states sum to the capacity.  On the engine's own thread it is
of this moment, on others at most 10 ms older than the last turn of its loop.
"""

import platform
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from kvloom.metrics.catalogue import BASE_LABELS, CATALOGUE, Family, Kind
from kvloom.metrics.memory_readings import memory_of, memory_tallies, pool_infos
from kvloom.metrics.readings import readings
from kvloom.metrics.timings import TimingObserver
from kvloom.metrics.values import Values

if TYPE_CHECKING:
    from kvloom.allocator.reports import MemoryStatistics
    from kvloom.scheduler.status import EngineStatistics

Source = Callable[[], "EngineStatistics"]


class KVLoomCollector:
    """Exports engines through one registry: a new one of its own unless `registry` says where to join.

    `source` answers with an engine's last snapshot, from any thread; `timings` observes that engine.  A registry takes
    one collector per namespace, which is how it can tell families apart: further engines enter by `add`.

    Raises ValueError when the namespace is no plain name, or the registry has these metrics already.
    """

    def __init__(
        self,
        source: Source,
        timings: TimingObserver,
        *,
        engine: str = "0",
        model: str = "",
        namespace: str = "kvloom",
        registry: CollectorRegistry | None = None,
    ) -> None:
        if not re.fullmatch(r"[a-zA-Z][a-zA-Z0-9_]*", namespace):
            raise ValueError(f"namespace {namespace!r}: letters, digits and underscores only, a letter first")
        self.namespace = namespace
        self._build = _build()
        # Replaced, never changed: a scrape in another thread reads it once.
        self._views: tuple[_View, ...] = (_View(source, timings, engine, model),)
        self.registry = CollectorRegistry() if registry is None else registry
        self.registry.register(self)

    @property
    def engines(self) -> tuple[str, ...]:
        """The `engine` labels, in the order in which they were added."""
        return tuple(view.engine for view in self._views)

    def add(self, source: Source, timings: TimingObserver, *, engine: str, model: str = "") -> None:
        """Export another engine beside the others.  Raises ValueError when its label is taken."""
        if engine in self.engines:
            raise ValueError(f"there is an engine {engine!r} already: name this one differently, or remove that one")
        self._views = (*self._views, _View(source, timings, engine, model))

    def remove(self, engine: str) -> None:
        """Export an engine no longer, and let go of it.  Nothing happens when there is none of that name."""
        self._views = tuple(view for view in self._views if view.engine != engine)

    def describe(self) -> Iterator[Metric]:
        """All families, empty: registration reads no engine."""
        return (self._metric(family, ()) for family in CATALOGUE)

    def collect(self) -> Iterator[Metric]:
        """All families, from one snapshot per engine."""
        pictures = [view.picture() for view in self._views]
        return (self._metric(family, pictures) for family in CATALOGUE)

    def render(self) -> bytes:
        """What a scrape of the registry answers, in the Prometheus text format."""
        return generate_latest(self.registry)

    def _metric(self, family: Family, pictures: Iterable["_Picture"]) -> Metric:
        name, labels = f"{self.namespace}_{family.name}", (*BASE_LABELS, *family.labels)
        match family.kind:
            case Kind.HISTOGRAM:
                histogram = HistogramMetricFamily(name, family.help, labels=labels)
                for picture in pictures:
                    for values, counts in picture.histograms.get(family.name, {}).items():
                        pairs = zip((*counts.bounds, float("inf")), counts.cumulative, strict=True)
                        buckets = [(_bound(bound), count) for bound, count in pairs]
                        histogram.add_metric((*picture.base, *values), buckets, counts.total)
                return histogram
            case Kind.INFO:
                info = InfoMetricFamily(name.removesuffix("_info"), family.help, labels=BASE_LABELS)
                for picture in pictures:
                    for facts in {"build_info": [self._build], "kv_pool_info": picture.pools}[family.name]:
                        info.add_metric(picture.base, facts)
                return info
        plain = (CounterMetricFamily if family.kind is Kind.COUNTER else GaugeMetricFamily)(
            name, family.help, labels=labels
        )
        for picture in pictures:
            for values, value in picture.numbers.get(family.name, {}).items():
                plain.add_metric((*picture.base, *values), value)
        return plain


@dataclass(frozen=True, slots=True)
class _Counts:
    """One histogram: values up to each bound, and up to any; their sum."""

    bounds: tuple[float, ...]
    cumulative: list[int]
    total: float


@dataclass(frozen=True, slots=True)
class _Picture:
    """One engine at one moment; `base` are the values of the base labels, `pools` the facts about each pool."""

    base: tuple[str, str]
    numbers: dict[str, Values]
    histograms: dict[str, dict[tuple[str, ...], _Counts]]
    pools: list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class _View:
    source: Source
    timings: TimingObserver
    engine: str
    model: str

    def picture(self) -> _Picture:
        statistics = self.source()
        memory = memory_of(statistics)
        return _Picture(
            (self.engine, self.model),
            readings(statistics),
            self._histograms(memory),
            pool_infos(memory) if memory else [],
        )

    def _histograms(self, memory: "MemoryStatistics | None") -> dict[str, dict[tuple[str, ...], _Counts]]:
        """Those of the observer, and those that the memory has counted."""
        found: dict[str, dict[tuple[str, ...], _Counts]] = {}
        for family, histograms in self.timings.histograms.items():
            states = {values: (one.bounds, one.snapshot()) for values, one in histograms.items()}
            found[family] = {
                values: _Counts(bounds, state.cumulative, state.sum) for values, (bounds, state) in states.items()
            }
        for family, tallies in memory_tallies(memory).items() if memory else ():
            found[family] = {
                values: _Counts(one.bounds, list(accumulate(one.counts)), one.total) for values, one in tallies.items()
            }
        return found


def _bound(value: float) -> str:
    """As the client library writes its own: "120.0", "+Inf"."""
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]


def _build() -> dict[str, str]:
    return {
        "version": _version("kvloom"),
        "torch": _version("torch"),
        "python": platform.python_version(),
        "backend": _backend(),
    }


def _backend() -> str:
    """What torch was built for, if this process has loaded it."""
    torch_version = getattr(sys.modules.get("torch"), "version", None)
    if torch_version is None:
        return "unknown"
    if getattr(torch_version, "hip", None):
        return "rocm"
    return "cuda" if getattr(torch_version, "cuda", None) else "cpu"


def _version(distribution: str) -> str:
    """From the installed files: importing torch takes seconds, and reports can be rendered without it."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "unknown"
