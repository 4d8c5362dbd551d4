"""What the observer counts, and where."""

import sys
from types import FrameType

import numpy as np
import pytest

from kvloom.metrics.catalogue import CATALOGUE, FINISH_REASONS, Kind
from kvloom.metrics.histograms import HistogramState
from kvloom.metrics.timings import TimingObserver
from kvloom.scheduler.ports import Observer
from kvloom.scheduler.request import FinishReason, Usage
from tests.metrics.made import committed, ended, plan


def state(timings: TimingObserver, family: str, *labels: str) -> HistogramState:
    return timings.histograms[family][labels].snapshot()


def test_is_an_observer() -> None:
    observer: Observer = TimingObserver()
    assert observer is not None


def test_there_is_a_histogram_for_every_row_of_the_catalogue() -> None:
    observed = [family.name for family in CATALOGUE if family.kind is Kind.HISTOGRAM and family.observed]
    assert list(TimingObserver().histograms) == observed


@pytest.mark.parametrize(("decode_rows", "kind"), [(3, "decode"), (0, "prefill"), (1, "mixed")])
def test_a_step_counts_under_its_kind(decode_rows: int, kind: str) -> None:
    timings = TimingObserver()
    timings.on_step(plan(3, decode_rows), committed(), 0.25)
    counts = {labels: one.snapshot().count for (labels,), one in timings.histograms["step_seconds"].items()}
    assert counts == {"prefill": 0, "decode": 0, "mixed": 0} | {kind: 1}
    assert state(timings, "step_seconds", kind).sum == 0.25


def test_a_step_brings_its_tokens_times() -> None:
    timings = TimingObserver()
    timings.on_step(plan(), committed(first=[0.5, 1.5], gaps=np.full(100, 0.004)), 0.01)
    timings.on_step(plan(), committed(), 0.01)
    assert (state(timings, "time_to_first_token_seconds").count, state(timings, "inter_token_seconds").count) == (
        2,
        100,
    )
    assert state(timings, "time_to_first_token_seconds").sum == 2.0
    assert state(timings, "inter_token_seconds").sum == pytest.approx(0.4)


def calls_of_a_step(rows: int) -> int:
    """Calls, Python's and numpy's, that one step with `rows` rows costs."""
    timings, made, step, calls = TimingObserver(), plan(), committed(gaps=np.linspace(0, 1, rows)), 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        timings.on_step(made, step, 0.01)
    finally:
        sys.setprofile(None)
    return calls


def test_a_step_costs_a_handful_of_calls_whatever_its_rows() -> None:
    assert calls_of_a_step(20) == calls_of_a_step(10_000) < 50


@pytest.mark.parametrize("reason", FinishReason)
def test_an_end_counts_under_its_reason(reason: FinishReason) -> None:
    timings = TimingObserver()
    timings.on_finished(committed(ended(reason)), 104.0)
    counts = {labels: one.snapshot().count for (labels,), one in timings.histograms["request_duration_seconds"].items()}
    assert counts == dict.fromkeys(FINISH_REASONS, 0) | {reason.value: 1}
    assert state(timings, "request_duration_seconds", reason.value).sum == 4.0


def test_an_end_counts_lengths_once() -> None:
    timings = TimingObserver()
    finals = [ended(usage=Usage(100, tokens, preemptions=tokens % 2)) for tokens in range(50)]
    timings.on_finished(committed(*finals), 104.0)
    assert (state(timings, "request_prompt_tokens").count, state(timings, "request_prompt_tokens").sum) == (50, 5000.0)
    assert state(timings, "request_output_tokens").sum == sum(range(50))
    assert state(timings, "request_preemptions").counts.tolist() == [25, 25, 0, 0, 0, 0, 0]
    assert state(timings, "time_to_first_token_seconds").count == 0


def test_a_finish_inside_a_step_is_not_counted_by_the_step() -> None:
    """The engine tells of it twice: with the step, and as an end."""
    timings = TimingObserver()
    both = committed(ended(), gaps=[0.1])
    timings.on_step(plan(), both, 0.01)
    timings.on_finished(both, 104.0)
    assert state(timings, "request_duration_seconds", "stop").count == 1
    assert state(timings, "inter_token_seconds").count == 1


def test_queueing_again_is_apart_from_queueing_first() -> None:
    """B44: the sum over both is all the time a request has waited, and nothing is negative."""
    timings = TimingObserver()
    timings.on_finished(
        committed(ended(queue_seconds=1.0), ended(usage=Usage(1, 1, preemptions=2), queue_seconds=1.75)), 0
    )
    first, again = (state(timings, "request_queue_seconds", phase) for phase in ("first", "requeue"))
    assert (first.count, first.sum) == (2, 2.0)
    assert (again.count, again.sum) == (1, 0.75)


def test_who_never_got_in_has_waited_until_the_end() -> None:
    timings = TimingObserver()
    timings.on_finished(committed(ended(FinishReason.DEADLINE, admitted_at=None, queue_seconds=4.0)), 104.0)
    assert state(timings, "request_queue_seconds", "first").sum == 4.0
    assert state(timings, "request_queue_seconds", "requeue").count == 0


def test_buckets_can_be_replaced() -> None:
    timings = TimingObserver({"step_seconds": (1.0, 2.0)})
    assert all(one.bounds == (1.0, 2.0) for one in timings.histograms["step_seconds"].values())


@pytest.mark.parametrize("name", ["requests", "nonsense", "kv_page_lifetime_seconds"])
def test_only_histograms_of_the_observer_have_buckets(name: str) -> None:
    with pytest.raises(ValueError, match=f"no histograms of an observer: \\['{name}'\\]"):
        TimingObserver({name: (1.0,)})
