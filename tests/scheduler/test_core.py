"""The contract of plan, commit and abandon; counts; ends."""

import gc
import weakref
from collections.abc import Callable

import numpy as np
import pytest

from kvloom.allocator import KVMemory
from kvloom.scheduler import (
    BadStepResult,
    BrokenInvariant,
    DuplicateRequest,
    FinishReason,
    InvalidConfig,
    ModelLimits,
    NeverFits,
    PlanMisuse,
    QueueFull,
    Rejected,
    SchedulerConfig,
    SchedulerCore,
    StepResult,
    TooLong,
)
from tests.scheduler.driven import Driven, ids, sizes

Drive = Callable[..., Driven]
BOOM = RuntimeError("boom")


def test_one_request_from_arrival_to_end(drive: Drive) -> None:
    driven = drive(speak=lambda request_id, number: 20 + number)
    driven.now = 100.0
    driven.add("a", 6, max_new_tokens=3)
    plans = driven.run()
    assert [sizes(plan) for plan in plans] == [{"a": 6}, {"a": 1}, {"a": 1}]
    assert [plan.kind for plan in plans] == ["prefill", "decode", "decode"]
    assert [plan.step for plan in plans] == [0, 1, 2]
    assert driven.said["a"] == [20, 21, 22]
    end = driven.ends["a"]
    assert (end.reason, end.error) == (FinishReason.LENGTH, None)
    assert (end.usage.prompt_tokens, end.usage.output_tokens, end.usage.cached_tokens, end.usage.preemptions) == (
        6,
        3,
        0,
        0,
    )
    assert (end.timings.arrived_at, end.timings.admitted_at, end.timings.finished_at) == (100, 101, 103)
    assert (end.timings.first_token_seconds, end.timings.total_seconds, end.timings.queue_seconds) == (1, 3, 1)


def test_steps_end_in_order_and_once(drive: Drive) -> None:
    driven = drive(steps_in_flight_max=2)
    driven.add("a", 4)
    first, second = driven.must_plan(), driven.must_plan()
    before = driven.picture()
    tokens = StepResult(np.array([7]))
    for step in (second.step, second.step + 1, -1):
        with pytest.raises(PlanMisuse, match=r"not the oldest one out; out are \[0, 1\]"):
            driven.core.commit(step, tokens, driven.now)
        with pytest.raises(PlanMisuse):
            driven.core.abandon(step, BOOM, driven.now)
    assert driven.picture() == before
    driven.commit()
    for again in (driven.core.commit, driven.core.abandon):
        with pytest.raises(PlanMisuse):
            again(first.step, tokens if again == driven.core.commit else BOOM, driven.now)  # type: ignore[arg-type]
    driven.commit()
    with pytest.raises(PlanMisuse, match=r"out are \[\]"):
        driven.core.commit(second.step, tokens, driven.now)


@pytest.mark.parametrize("depth", [1, 2])
def test_no_more_plans_are_out_than_allowed(drive: Drive, depth: int) -> None:
    driven = drive(steps_in_flight_max=depth)
    driven.add("a", 4)
    for out in range(depth):
        assert driven.core.statistics().steps_in_flight == out
        driven.must_plan()
    before = driven.picture()
    assert driven.plan() is None
    assert driven.picture() == before
    driven.commit()
    assert driven.plan() is not None


def test_nothing_to_do(drive: Drive) -> None:
    driven = drive()
    before = driven.picture()
    assert driven.plan() is None
    assert not driven.core.has_work
    for nothing in (driven.abort("nobody"), driven.expire(), driven.core.end_all(FinishReason.SHUTDOWN, 0.0)):
        assert (list(nothing.sequences), list(nothing.tokens), list(nothing.finished)) == ([], [], [])
    assert driven.picture() == before


@pytest.mark.parametrize(
    "result",
    [
        StepResult(np.array([7])),
        StepResult(np.array([7, 7, 7])),
        StepResult(np.array([[7, 7]])),
        StepResult(np.array([7.0, 7.0])),
        StepResult(np.array([7, 100])),
        StepResult(np.array([-1, 7])),
        StepResult(np.array([7, 7]), {2: BOOM}),
    ],
)
def test_a_result_that_does_not_fit_changes_nothing(drive: Drive, result: StepResult) -> None:
    driven = drive()
    driven.add("a", 4)
    driven.add("b", 4)
    plan = driven.must_plan()
    before = driven.picture()
    with pytest.raises(BadStepResult, match=f"step {plan.step}"):
        driven.core.commit(plan.step, result, driven.now)
    assert driven.picture() == before
    driven.commit()  # it can still be committed
    driven.must_plan()
    with pytest.raises(BadStepResult):
        driven.core.commit(1, result, driven.now)
    driven.abandon(BOOM)  # or abandoned
    assert driven.reasons() == {"a": FinishReason.ERROR, "b": FinishReason.ERROR}


@pytest.mark.parametrize("depth", [1, 2])
def test_what_happens_to_those_who_left_cannot_spoil_a_result(drive: Drive, depth: int) -> None:
    """Their row may hold anything by now: the others must not pay for it."""
    driven = drive(steps_in_flight_max=depth)
    driven.add("a", 4)
    driven.add("b", 4, max_new_tokens=9)
    for _ in range(depth):
        driven.must_plan()
    driven.abort("a")
    for _ in range(depth):
        driven.commit([-1, 7])
    assert driven.said == {"b": [7] * depth}


def test_requests_refused_at_the_door_leave_no_trace_but_a_count(drive: Drive) -> None:
    driven = drive(pages=8, page_size=4, max_seq=100, max_waiting=1)
    driven.add("a", 4)
    expected: list[tuple[str, int, type[Rejected], str]] = [
        ("a", 4, DuplicateRequest, "invalid"),
        ("b", 4, QueueFull, "queue_full"),
        ("b", 0, Rejected, "invalid"),
        ("b", 33, NeverFits, "never_fits"),
        ("b", 100, TooLong, "too_long"),
    ]
    before = driven.core.statistics()
    for request_id, prompt, error, _ in expected:
        with pytest.raises(error):
            driven.add(request_id, prompt)
    after = driven.core.statistics()
    assert after.rejected == {"invalid": 2, "queue_full": 1, "never_fits": 1, "too_long": 1}
    assert after == before._replace(received=6, rejected=after.rejected)
    assert [one.request.id for one in driven.core.live] == ["a"]
    driven.run()
    assert driven.reasons() == {"a": FinishReason.LENGTH}


def test_an_id_is_free_again_once_its_request_has_ended(drive: Drive) -> None:
    driven = drive()
    for _ in range(2):
        driven.add("a", 4, max_new_tokens=1)
        driven.run()
        assert driven.said.pop("a") == [7]
        del driven.ends["a"]


def test_places_in_the_queue(drive: Drive) -> None:
    driven = drive(max_running=1, max_waiting=2)
    assert driven.core.free_places == 2
    driven.add("a", 4)
    driven.add("b", 4)
    assert driven.core.queue_is_full
    with pytest.raises(QueueFull) as caught:
        driven.add("c", 4)
    assert caught.value.retry_after > 0
    driven.step()  # a runs: it takes no place any more
    assert driven.core.free_places == 1
    driven.abort("b")
    assert driven.core.free_places == 2


def test_stops(drive: Drive) -> None:
    driven = drive(eos_ids=(5, 6), speak=lambda request_id, number: [9, 5, 8, 6][number % 4])
    driven.add("eos", 4, max_new_tokens=9)
    driven.add("own", 4, max_new_tokens=9, stop_token_ids=(9, 50))
    driven.add("later", 4, max_new_tokens=9, min_new_tokens=3)
    driven.add("ignores", 4, max_new_tokens=5, ignore_eos=True)
    driven.add("but not its own", 4, max_new_tokens=5, ignore_eos=True, stop_token_ids=(8,))
    driven.add("last", 4, max_new_tokens=2)
    driven.run()
    assert {request_id: len(said) for request_id, said in driven.said.items()} == {
        "eos": 2, "own": 1, "later": 4, "ignores": 5, "but not its own": 3, "last": 2,
    }  # fmt: skip
    assert [one for one, reason in driven.reasons().items() if reason is FinishReason.LENGTH] == ["ignores"]
    assert driven.core.statistics().finished == {"stop": 5, "length": 1}


def test_many_stop_tokens_beside_few(drive: Drive) -> None:
    """The next owner of a row inherits none of them."""
    driven = drive(rows=1, max_running=1, eos_ids=(5,))
    driven.add("many", 4, max_new_tokens=3, stop_token_ids=tuple(range(60, 99)))
    driven.add("few", 4, max_new_tokens=3)
    driven.speak = lambda request_id, number: 98 if request_id == "few" else 97
    driven.run()
    assert driven.said == {"many": [97], "few": [98, 98, 98]}


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_can_be_aborted_wherever_it_is(drive: Drive, depth: int) -> None:
    driven = drive(max_running=2, prefill_chunk=4, max_batch_tokens=8, steps_in_flight_max=depth)
    for request_id, prompt in {"decodes": 4, "prefills": 40, "waits": 4}.items():
        driven.add(request_id, prompt)
    driven.step()
    driven.step()
    driven.plan()
    for request_id in ("prefills", "waits", "decodes"):
        (end,) = driven.abort(request_id).finished
        assert end[1].reason is FinishReason.ABORT
        assert not driven.abort(request_id).finished
    while driven.out:
        committed = driven.commit()
        assert not committed.tokens
    assert driven.plan() is None
    assert driven.core.statistics().finished == {"abort": 3}


def test_deadlines(drive: Drive) -> None:
    driven = drive(max_running=2)
    driven.add("late", 4, deadline=3.5)
    driven.add("in time", 4, max_new_tokens=2, deadline=3.5)
    driven.add("never runs", 4, deadline=2.5)
    driven.add("no hurry", 4, deadline=1000.0)
    driven.step()
    driven.now = 2.5
    assert [end.request_id for _, end in driven.expire().finished] == ["never runs"]
    timings = driven.ends["never runs"].timings
    assert (timings.admitted_at, timings.queue_seconds, timings.total_seconds) == (None, 2.5, 2.5)
    assert not driven.expire().finished
    driven.step()
    assert driven.core.statistics().finished == {"deadline": 1, "length": 1}
    driven.must_plan()  # one is in the middle of a step when its time comes
    assert [end.request_id for _, end in driven.expire().finished] == ["late"]
    driven.commit()
    assert driven.said["late"] == [7, 7]
    assert driven.reasons()["late"] is FinishReason.DEADLINE


def test_a_step_that_fails_ends_its_own_requests_only(drive: Drive) -> None:
    driven = drive(max_running=2)
    for request_id in "abc":
        driven.add(request_id, 4, max_new_tokens=2)
    assert ids(driven.must_plan()) == ["a", "b"]
    ended = driven.abandon(BOOM).finished
    assert [(end.request_id, end.reason, end.error) for _, end in ended] == [
        ("a", FinishReason.ERROR, BOOM), ("b", FinishReason.ERROR, BOOM),
    ]  # fmt: skip
    assert driven.core.statistics().failed_steps == 1
    driven.run()
    assert driven.reasons()["c"] is FinishReason.LENGTH


def test_a_row_that_fails_ends_alone(drive: Drive) -> None:
    driven = drive()
    for request_id in "abc":
        driven.add(request_id, 4, max_new_tokens=2)
    driven.must_plan()
    committed = driven.commit([7, 12345, 7], {1: BOOM})  # whatever stands in its place
    assert [one.request.id for one in committed.sequences] == ["a", "c"]
    assert driven.ends["b"].error is BOOM
    driven.run()
    assert driven.said == {"a": [7, 7], "c": [7, 7]}


def test_a_row_that_fails_in_its_last_step_has_failed(drive: Drive) -> None:
    driven = drive()
    driven.add("a", 4, max_new_tokens=1)
    driven.must_plan()
    driven.commit([7], {0: BOOM})
    assert driven.reasons() == {"a": FinishReason.ERROR}
    assert driven.ends["a"].usage.output_tokens == 0


def test_all_end(drive: Drive) -> None:
    driven = drive(max_running=1)
    driven.add("a", 4)
    driven.add("b", 4)
    driven.step()
    ended = driven.hear(driven.core.end_all(FinishReason.SHUTDOWN, driven.now, BOOM)).finished
    assert [(end.request_id, end.reason, end.error) for _, end in ended] == [
        ("a", FinishReason.SHUTDOWN, BOOM), ("b", FinishReason.SHUTDOWN, BOOM),
    ]  # fmt: skip
    assert not driven.core.has_work


def test_observations_of_time(drive: Drive) -> None:
    driven = drive()
    driven.add("a", 4, max_new_tokens=3)
    driven.must_plan()
    driven.add("b", 4, max_new_tokens=1)
    driven.now = 5.0
    first = driven.commit()
    assert (list(first.first_token_seconds), first.inter_token_seconds.tolist()) == ([5.0], [])
    driven.now = 7.5
    driven.must_plan()
    second = driven.commit()
    assert (list(second.first_token_seconds), second.inter_token_seconds.tolist()) == ([7.5], [3.5])
    driven.now = 8.0
    driven.must_plan()
    third = driven.commit()
    assert (list(third.first_token_seconds), third.inter_token_seconds.tolist()) == ([], [0.5])


def test_statistics_of_the_queue(drive: Drive) -> None:
    driven = drive(max_running=1)
    for request_id, prompt in {"a": 4, "b": 5, "c": 6}.items():
        driven.now += 10
        driven.add(request_id, prompt)
    driven.step()
    now = driven.core.statistics()
    assert (now.waiting, now.decoding, now.waiting_prompt_tokens, now.oldest_waiting_at) == (2, 1, 11, 20.0)
    assert (now.prompt_tokens_computed, now.output_tokens, dict(now.steps)) == (4, 1, {"prefill": 1})


def test_those_who_ended_are_forgotten_long_before_their_deadline(drive: Drive) -> None:
    driven, prompts = drive(), list[weakref.ref[object]]()
    driven.add("lasts", 4, deadline=1e6, max_new_tokens=200)
    for i in range(150):
        prompts.append(weakref.ref(driven.add(str(i), 4, deadline=1e6 + i, max_new_tokens=1).request.prompt))
        driven.step()
    gc.collect()
    assert sum(prompt() is not None for prompt in prompts) < 100


def test_memory_that_somebody_else_uses_is_told(drive: Drive) -> None:
    driven = drive(pages=4)
    taken = driven.memory.admit(driven.memory.match(np.array([1], np.int32)), 16)
    driven.add("a", 4)
    with pytest.raises(BrokenInvariant, match=r"use the memory\?  pool 'full' of 4 pages .*: 0 free, 4 held"):
        driven.core.plan(driven.now)
    assert taken is not None
    driven.memory.release([taken], [-1])


def test_more_rows_than_the_memory_has() -> None:
    memory = KVMemory(capacity_tokens=64, max_rows=4)
    with pytest.raises(InvalidConfig, match="max_running=5, but the memory has 4 rows"):
        SchedulerCore(memory, SchedulerConfig(max_running=5), ModelLimits(100, 100))
