"""What goes back and when: fences, tokens thrown away, preemption."""

from collections.abc import Callable

import pytest

from kvloom.allocator import PoolSpec
from kvloom.allocator.prefix import KeptPrefixCache, NullPrefixCache, RadixPrefixCache
from kvloom.scheduler import FinishReason
from kvloom.scheduler.plan import IntArray
from kvloom.scheduler.ports import TokensOf
from tests.scheduler.driven import Driven, ids, sizes

Drive = Callable[..., Driven]
BOOM = RuntimeError("boom")


def numbered(request_id: str, number: int) -> int:
    return 40 + number % 50


def test_what_ends_together_goes_back_together(drive: Drive) -> None:
    driven = drive(max_running=8)
    for i in range(4):
        driven.add(str(i), 4, max_new_tokens=1 if i < 3 else 9)
    plan = driven.step()
    assert driven.memory.given_back == [(plan.rows[:3].tolist(), [0, 0, 0], "finish")]
    driven.step()
    driven.abort("3")
    assert driven.memory.given_back[1:] == [([plan.rows[3]], [1], "abort")]


def test_the_fence_is_the_last_plan_that_names_the_row(drive: Drive) -> None:
    driven = drive(steps_in_flight_max=2, rows=2, max_running=2, eos_ids=(5,), pages=4, page_size=4)
    driven.speak = lambda request_id, number: 5 if (request_id, number) == ("stops", 1) else 7
    driven.add("stops", 4, max_new_tokens=9)
    driven.add("goes on", 4, max_new_tokens=6)
    driven.step()
    driven.plan()
    assert [sizes(plan) for plan in driven.out] == [{"stops": 1, "goes on": 1}] * 2
    row = int(driven.out[0].rows[0])
    driven.commit()
    assert driven.memory.given_back == [([row], [2], "finish")]
    assert driven.memory.statistics().rows_quarantined == 1
    driven.add("next", 4, max_new_tokens=1)
    assert ids(driven.must_plan()) == ["goes on"]  # the row is still named by a step in flight
    driven.commit()
    assert driven.memory.settled == [0, 1, 2]
    assert ids(driven.must_plan()) == ["goes on", "next"]
    assert row in driven.out[-1].rows
    driven.commit()
    driven.commit()
    assert driven.said["next"] == [7]


def test_a_token_behind_the_stop_is_thrown_away_and_counted(drive: Drive) -> None:
    driven = drive(steps_in_flight_max=2, eos_ids=(5,))
    driven.speak = lambda request_id, number: 5 if number >= 2 else 7
    driven.add("a", 4, max_new_tokens=9)
    driven.run()
    now = driven.core.statistics()
    assert driven.said["a"] == [7, 7, 5]
    assert driven.reasons()["a"] is FinishReason.STOP
    assert (now.wasted_tokens["overshoot"], now.output_tokens, sum(now.steps.values())) == (1, 3, 4)
    assert now.wasted_tokens.get("aborted", 0) == 0


def test_what_is_computed_for_one_who_left_is_counted_by_why(drive: Drive) -> None:
    driven = drive(steps_in_flight_max=2, prefill_chunk=6)
    driven.add("a", 10)
    driven.plan()
    driven.plan()
    driven.abort("a")
    driven.commit()
    driven.abandon(BOOM)
    now = driven.core.statistics()
    assert (now.wasted_tokens["aborted"], now.wasted_tokens["overshoot"]) == (6 + 4, 0)
    assert (now.failed_steps, dict(now.finished)) == (1, {"abort": 1})


def test_a_failed_step_leaves_the_next_one_to_others(drive: Drive) -> None:
    """a is in both steps; what the second brings for it is for nobody."""
    driven = drive(steps_in_flight_max=2)
    driven.add("a", 4, max_new_tokens=9)
    driven.must_plan()
    driven.add("b", 4, max_new_tokens=2)
    driven.must_plan()
    driven.abandon(BOOM)
    assert driven.memory.given_back == [([driven.out[0].rows[0]], [1], "error")]
    driven.commit()
    assert driven.said == {"b": [7]}
    driven.run()
    assert driven.reasons() == {"a": FinishReason.ERROR, "b": FinishReason.LENGTH}


def test_the_youngest_makes_room_and_comes_back(drive: Drive) -> None:
    """B22: A and B want 6 of 8 pages each, C waits behind a queue of one place."""
    driven = drive(pages=8, page_size=4, max_waiting=1, speak=numbered)
    driven.add("A", 12, max_new_tokens=12)
    driven.step()
    driven.add("B", 12, max_new_tokens=12)
    driven.step()
    driven.add("C", 12, max_new_tokens=12)
    while not driven.core.statistics().preempted:
        driven.step()
    assert [one.request.id for one in driven.core.live if one.phase == "preempted"] == ["B"]
    assert driven.core.statistics().waiting == 1
    assert driven.core.queue_is_full, "C has the one place; B takes none"
    driven.run()
    assert [driven.ends[request_id].usage.preemptions for request_id in "AB"] == [0, 1]
    assert driven.ends["C"].usage.preemptions <= 3
    assert list(driven.ends) == ["A", "B", "C"]
    assert all(said == [40 + i for i in range(12)] for said in driven.said.values())
    assert set(driven.reasons().values()) == {FinishReason.LENGTH}


def crowd(drive: Drive, depth: int, prefix_cache: KeptPrefixCache | None = None) -> Driven:
    driven = drive(
        pages=10, page_size=2, max_running=6, steps_in_flight_max=depth, speak=numbered, prefill_chunk=3,
        prefix_cache=prefix_cache,
    )  # fmt: skip
    for i in range(6):
        driven.add(str(i), 2 + i % 3, max_new_tokens=8)
    return driven


both_caches = pytest.mark.parametrize("make_cache", [NullPrefixCache, RadixPrefixCache])


@both_caches
@pytest.mark.parametrize("depth", [1, 2])
def test_the_oldest_never_gives_way(drive: Drive, depth: int, make_cache: Callable[[], KeptPrefixCache]) -> None:
    driven = crowd(drive, depth, make_cache())
    while driven.core.has_work:
        oldest = driven.core.live[0]
        before = oldest.preemptions
        driven.step()
        assert oldest.preemptions == before
    assert driven.core.statistics().preemptions == sum(end.usage.preemptions for end in driven.ends.values()) >= 2
    assert all(said == [40 + i for i in range(8)] for said in driven.said.values())


@both_caches
@pytest.mark.parametrize("depth", [1, 2])
def test_nobody_enters_before_somebody_older(
    drive: Drive, depth: int, make_cache: Callable[[], KeptPrefixCache]
) -> None:
    """Which puts those who were preempted before those who never ran."""
    driven = crowd(drive, depth, make_cache())
    came_back = 0
    while driven.core.has_work:
        outside = [one for one in driven.core.live if one.row < 0]
        driven.step()
        entered = [one.arrival for one in outside if one.row >= 0]
        came_back += sum(one.preemptions > 0 for one in outside if one.row >= 0)
        assert not entered or max(entered) < min((one.arrival for one in driven.core.live if one.row < 0), default=99)
    assert came_back >= 2


def test_a_preempted_request_is_computed_anew_with_what_it_said(drive: Drive) -> None:
    driven = drive(pages=5, page_size=4, speak=numbered, prefill_chunk=5)
    driven.add("A", 8, max_new_tokens=8)
    driven.step()
    driven.step()
    driven.add("B", 4, max_new_tokens=8, presence_penalty=1.0)
    while not driven.core.statistics().preempted:
        driven.step()
    said = list(driven.said["B"])
    assert len(said) >= 2
    (victim,) = (one for one in driven.core.live if one.phase == "preempted")
    assert victim.tokens.tolist() == [10, 11, 12, 13, *said]
    computed = driven.core.statistics().prompt_tokens_computed
    plans = driven.run()
    anew = [plan for plan in plans if int(plan.q_lens.max()) > 1]
    assert sum(int(plan.q_lens[-1]) for plan in anew) == 4 + len(said)
    (history,) = (
        history
        for plan in plans
        if plan.sampling is not None and plan.sampling.penalties is not None
        for history in plan.sampling.penalties.histories
    )
    assert (history.prompt.tolist(), history.outputs.tolist()) == ([10, 11, 12, 13], said)
    now = driven.core.statistics()
    assert now.prompt_tokens_computed == computed == 12
    assert now.prompt_tokens_recomputed == 4 + len(said)
    assert now.wasted_tokens["preempted"] == 4 + len(said) - 1
    assert now.output_tokens == 16
    assert driven.said["B"] == [40 + i for i in range(8)]
    assert driven.ends["B"].timings.queue_seconds > 1


def test_every_second_is_in_one_observation(drive: Drive) -> None:
    """First tokens are timed once; the time without a row counts as time between two tokens."""
    driven = crowd(drive, depth=1)
    firsts, gaps = list[float](), list[float]()
    while driven.core.has_work:
        driven.must_plan()
        committed = driven.commit()
        firsts += committed.first_token_seconds
        gaps += committed.inter_token_seconds.tolist()
    assert driven.core.statistics().preemptions
    assert (len(firsts), len(gaps)) == (6, 6 * 7)
    assert min(firsts + gaps) > 0
    assert sum(firsts + gaps) == sum(end.timings.total_seconds for end in driven.ends.values())


@pytest.mark.parametrize("wish", ["abort", "deadline", "end_all"])
def test_a_preempted_request_can_end(drive: Drive, wish: str) -> None:
    driven = drive(pages=8, page_size=4, speak=numbered)
    driven.add("A", 12, max_new_tokens=12)
    driven.add("B", 12, max_new_tokens=12, deadline=100.0)
    while not driven.core.statistics().preempted:
        driven.step()
    assert driven.core.free_places == driven.config.max_waiting, "it takes no place in the queue"
    if wish == "abort":
        driven.abort("B")
    elif wish == "deadline":
        driven.now = 100.0
        driven.expire()
    else:
        driven.hear(driven.core.end_all(FinishReason.SHUTDOWN, driven.now))
    assert driven.ends["B"].usage.output_tokens == len(driven.said["B"]) > 0
    assert driven.core.statistics().preempted == 0
    driven.run()


def test_pages_a_step_in_flight_may_use_are_not_taken(drive: Drive) -> None:
    """R3: the hungry one stalls, the victim is left out of the next plan and gives way when its last step commits."""
    driven = drive(pages=8, page_size=4, steps_in_flight_max=2, speak=numbered)
    driven.add("A", 12, max_new_tokens=12)
    driven.add("B", 12, max_new_tokens=12)
    plan = driven.plan()
    while plan is not None and ids(plan) == ["A", "B"]:
        if len(driven.out) == 2:
            driven.commit()
        plan = driven.plan()
    assert plan is None, "A must stall and B is marked: nothing to do until the step in flight is over"
    assert driven.plan() is None, "asked again, it marks nobody else"
    assert driven.core.statistics().preemptions == 0
    assert ids(driven.out[0]) == ["A", "B"]
    driven.commit()
    assert driven.core.statistics().preempted == 1
    assert driven.memory.given_back[-1][2] == "preempt"
    plan = driven.must_plan()
    assert (ids(plan), plan.token_src) == (["A"], None)
    assert plan.token_ids.tolist() == [driven.said["A"][-1]]
    driven.run()
    driven.add("C", 12, max_new_tokens=12)
    driven.run()
    assert driven.said["A"] == driven.said["B"] == driven.said["C"] == [40 + i for i in range(12)]


def test_the_older_ones_get_the_pages_that_are_left(drive: Drive) -> None:
    driven = drive(pages=9, page_size=4, steps_in_flight_max=2, speak=numbered)
    driven.add("A", 12, max_new_tokens=12)
    driven.add("B", 12, max_new_tokens=12)
    while ids(plan := driven.must_plan()) == ["A", "B"]:
        if len(driven.out) == 2:
            driven.commit()
    assert ids(plan) == ["A"]
    assert driven.memory.statistics().pools["full"].free == 0
    assert driven.core.statistics().preemptions == 0


def test_a_marked_victim_that_ends_instead(drive: Drive) -> None:
    """It finishes, fails or is aborted in the very step it waits for: its pages come back all the same."""
    for ending in ("abort", "abandon", "row error"):
        driven = drive(pages=8, page_size=4, steps_in_flight_max=2, speak=numbered)
        driven.add("A", 12, max_new_tokens=12)
        driven.add("B", 12, max_new_tokens=12)
        while driven.plan() is not None or len(driven.out) == 2:
            driven.commit()
            if len(driven.out) == 0:
                driven.plan()
        if ending == "abort":
            driven.abort("B")
            driven.commit()
        elif ending == "abandon":
            driven.abandon(BOOM)
        else:
            driven.commit(row_errors={1: BOOM})
        assert driven.core.statistics().preemptions == 0
        driven.add("C", 12, max_new_tokens=12)
        driven.run()
        assert driven.said["C"] == [40 + i for i in range(12)]


def test_a_prompt_under_way_can_be_the_victim(drive: Drive) -> None:
    driven = drive(pages=8, page_size=4, prefill_chunk=1, max_batch_tokens=64, speak=numbered)
    driven.add("A", 3, max_new_tokens=20)
    for _ in range(4):
        driven.step()
    driven.add("B", 20, max_new_tokens=2)
    while not driven.core.statistics().preempted:
        driven.step()
    assert driven.said["B"] == []
    driven.run()
    now = driven.core.statistics()
    assert (now.preemptions, now.prompt_tokens_computed) == (1, 23)
    assert now.prompt_tokens_recomputed == now.wasted_tokens["preempted"] > 0
    assert driven.said == {"A": [40 + i for i in range(20)], "B": [40, 41]}


def test_more_outputs_than_room_was_made_for(drive: Drive) -> None:
    driven = drive(pages=512, speak=numbered)
    driven.add("long", 4, max_new_tokens=700)
    for i in range(30):
        driven.add(str(i), 4, max_new_tokens=1 + 7 * i)
    driven.run()
    assert len(driven.said["long"]) == 700
    assert all(said == [numbered("", i) for i in range(len(said))] for said in driven.said.values())
    assert driven.ends["29"].usage.output_tokens == 1 + 7 * 29


def test_a_pool_that_one_request_fills(drive: Drive) -> None:
    """It ends by length when the pool is full, without waiting for pages that will never come."""
    driven = drive(pages=4, page_size=4)
    driven.add("a", 10)
    driven.add("b", 16)
    driven.run()
    assert {one: len(said) for one, said in driven.said.items()} == {"a": 7, "b": 1}
    assert set(driven.reasons().values()) == {FinishReason.LENGTH}


FULL, SWA = PoolSpec(), PoolSpec("swa", window=3)
Told = list[tuple[str, list[int]]]


@pytest.mark.parametrize(
    ("pools", "expected"),
    [
        ((FULL,), [("publish", []), ("publish", [4]), ("publish", [1]), ("publish", [8])]),
        (
            (FULL, SWA),
            [
                ("publish", []),  # a may enter, and nobody runs
                ("publish", [4]), ("trim", [4]),  # a prompt goes on, before pages leave its window
                ("publish", [4]),  # b may enter; 6 of a are planned
                ("publish", [6]), ("trim", [6]),
                ("publish", [1]), ("trim", [7, 1]),
                ("publish", [1]),  # b leaves
                ("publish", []), ("trim", [8]),
                ("publish", [8]),
            ],
        ),
    ],
    ids=["full", "with a window"],
)  # fmt: skip
def test_published_and_trimmed_are_settled_lengths_only(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, pools: tuple[PoolSpec, ...], expected: Told
) -> None:
    driven = drive(steps_in_flight_max=2, prefill_chunk=4, pools=pools)
    told: Told = []
    tokens: list[list[int]] = []  # of each row that is told of, up to the length that is told

    def listen(verb: str) -> None:
        def note(rows: IntArray, lengths: IntArray, tokens_of: TokensOf) -> None:
            told.append((verb, lengths.tolist()))
            tokens.extend(tokens_of(row, 0, end).tolist() for row, end in zip(rows, lengths.tolist(), strict=True))

        monkeypatch.setattr(driven.memory, verb, note)

    listen("publish")
    listen("trim")
    driven.add("a", 6, max_new_tokens=3)
    driven.plan()
    driven.plan()
    driven.commit()
    driven.add("b", [50], max_new_tokens=1)
    driven.run()
    assert told == expected
    said = [10, 11, 12, 13, 14, 15, 7, 7]
    assert tokens == [said[:end] if end > 1 else [50] for _, ends in told for end in ends]
