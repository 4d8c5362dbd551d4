"""Durations and lengths, observed as they happen; everything else is read at scrape (`collector.py`)."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING

from kvloom.metrics.catalogue import CATALOGUE, Family, Kind
from kvloom.metrics.histograms import Histogram

if TYPE_CHECKING:
    from kvloom.scheduler.plan import Committed, Plan
    from kvloom.scheduler.request import Finished

Histograms = Mapping[tuple[str, ...], Histogram]  # by label values, in the order of the family's labels


class TimingObserver:
    """The histograms of one engine: an observer of it, and what its collector reads.

    `buckets` replaces the upper bounds of the families it names.
    Raises ValueError when one of them is no histogram, or one that the memory counts.
    """

    def __init__(self, buckets: Mapping[str, Sequence[float]] | None = None) -> None:
        families = {family.name: family for family in CATALOGUE if family.observed and family.kind is Kind.HISTOGRAM}
        buckets = buckets or {}
        if strangers := buckets.keys() - families.keys():
            raise ValueError(f"no histograms of an observer: {sorted(strangers)}; there are {sorted(families)}")
        self.histograms: Mapping[str, Histograms] = {
            name: _histograms(family, buckets.get(name, family.buckets)) for name, family in families.items()
        }

    def on_step(self, plan: "Plan", committed: "Committed", seconds: float) -> None:
        """Count a step; nothing here is done per row."""
        self._one("step_seconds", plan.kind).observe(seconds)
        self._one("time_to_first_token_seconds").observe_many(committed.first_token_seconds)
        self._one("inter_token_seconds").observe_many(committed.inter_token_seconds)

    def on_finished(self, committed: "Committed", now: float) -> None:
        """Count requests that ended."""
        finals = [final for _, final in committed.finished]
        usages = [final.usage for final in finals]
        self._one("request_prompt_tokens").observe_many([usage.prompt_tokens for usage in usages])
        self._one("request_output_tokens").observe_many([usage.output_tokens for usage in usages])
        self._one("request_preemptions").observe_many([usage.preemptions for usage in usages])
        self._queueing(finals)
        durations: defaultdict[str, list[float]] = defaultdict(list)
        for final in finals:
            durations[final.reason].append(final.timings.total_seconds)
        for reason, seconds in durations.items():
            self._one("request_duration_seconds", reason).observe_many(seconds)

    def _queueing(self, finals: Sequence["Finished"]) -> None:
        """Who never got in has waited until the end: without them the worst waits would be missing."""
        first: list[float] = []
        again: list[float] = []
        for final in finals:
            timings = final.timings
            left_at = timings.finished_at if timings.admitted_at is None else timings.admitted_at
            first.append(left_at - timings.arrived_at)
            if final.usage.preemptions:
                again.append(timings.queue_seconds - first[-1])
        self._one("request_queue_seconds", "first").observe_many(first)
        self._one("request_queue_seconds", "requeue").observe_many(again)

    def _one(self, family: str, *labels: str) -> Histogram:
        return self.histograms[family][labels]


def _histograms(family: Family, bounds: Sequence[float]) -> Histograms:
    closed = [values for values in family.labels.values() if values is not None]
    return {labels: Histogram(bounds) for labels in product(*closed)}
