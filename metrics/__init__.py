"""kvloom.metrics: what an operator sees.

`instrument(engine)` answers with a collector: counters and gauges are read from the last snapshot of the engine when
somebody scrapes, durations are observed on the way.  `collector.render()` is the Prometheus text; or serve
`collector.registry`.  `engine.add_observer(StructlogObserver())` logs what happens.
"""

from kvloom.metrics.collector import KVLoomCollector
from kvloom.metrics.instrument import instrument
from kvloom.metrics.logs import StructlogObserver
from kvloom.metrics.timings import TimingObserver

__all__ = ["KVLoomCollector", "StructlogObserver", "TimingObserver", "instrument"]
