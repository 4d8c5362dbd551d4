"""What a plan holds: who, how much, in which order, and the arrays that say so."""

import random
from collections.abc import Callable

import numpy as np
import pytest

from kvloom.allocator.prefix import KeptPrefixCache, NullPrefixCache, RadixPrefixCache
from kvloom.scheduler import Plan, Rejected, RunnerFailed
from kvloom.scheduler.randomness import uniforms
from tests.scheduler.driven import Driven, ids, sizes

Drive = Callable[..., Driven]


def numbered(request_id: str, number: int) -> int:
    return 40 + number


def test_first_come_first_served(drive: Drive) -> None:
    driven = drive(max_running=2)
    for request_id in "abcde":
        driven.add(request_id, 4, max_new_tokens=2)
    entered = [ids(plan) for plan in driven.run()]
    assert entered == [["a", "b"], ["a", "b"], ["c", "d"], ["c", "d"], ["e"], ["e"]]


def test_a_big_head_is_not_passed(drive: Drive) -> None:
    driven = drive(pages=8, page_size=4)
    driven.add("runs", 8, max_new_tokens=4)
    driven.step()
    driven.add("big", 28, max_new_tokens=1)
    driven.add("small", 1, max_new_tokens=1)
    assert [ids(driven.step()) for _ in range(5)] == [["runs"], ["runs"], ["runs"], ["big"], ["small"]]


def test_prompts_are_cut_and_decode_rows_come_first(drive: Drive) -> None:
    driven = drive(prefill_chunk=5, max_batch_tokens=8, max_running=4)
    driven.add("a", 12, max_new_tokens=3)
    driven.add("b", 4, max_new_tokens=3)
    plans = driven.run()
    assert [sizes(plan) for plan in plans] == [
        {"a": 5, "b": 3}, {"a": 5, "b": 1}, {"b": 1, "a": 2}, {"a": 1, "b": 1}, {"a": 1},
    ]  # fmt: skip
    assert [plan.decode_rows for plan in plans] == [0, 0, 1, 2, 1]
    assert [plan.kind for plan in plans] == ["prefill", "prefill", "mixed", "decode", "decode"]
    assert [[ids(plan)[row] for row in plan.sample_rows] for plan in plans] == [
        [], ["b"], ["b", "a"], ["a", "b"], ["a"],
    ]  # fmt: skip


def test_no_step_exceeds_its_tokens_and_none_is_wasted(drive: Drive) -> None:
    driven = drive(pages=200, max_running=4, max_batch_tokens=10, prefill_chunk=7)
    for i, prompt in enumerate((30, 3, 12, 1, 25, 9)):
        driven.add(str(i), prompt, max_new_tokens=4)
    while driven.core.has_work:
        waits = driven.core.statistics().waiting
        plan = driven.step()
        assert plan.tokens <= 10
        assert max(plan.q_lens[plan.decode_rows :], default=0) <= 7
        if waits and len(plan.rows) < 4:
            assert plan.tokens == 10, "somebody waits, and there was room"


def test_rows_limit_who_runs(drive: Drive) -> None:
    driven = drive(max_running=3)
    for i in range(7):
        driven.add(str(i), 2, max_new_tokens=3)
    most = 0
    while driven.core.has_work:
        driven.step()
        now = driven.core.statistics()
        most = max(most, now.prefilling + now.decoding)
    assert most == 3


def test_one_page_stays_free_for_each_that_runs(drive: Drive) -> None:
    driven = drive(pages=4, page_size=4)
    driven.add("a", 8, max_new_tokens=4)
    driven.add("b", 8, max_new_tokens=4)
    assert ids(driven.step()) == ["a"]  # b would leave none to a
    assert driven.core.statistics().preemptions == 0


def test_the_arrays_of_a_plan(drive: Drive) -> None:
    driven = drive(prefill_chunk=4, speak=numbered)
    driven.add("a", [10, 11, 12], max_new_tokens=9)
    driven.step()
    driven.step()
    driven.add("b", [20, 21, 22, 23, 24, 25], max_new_tokens=9)
    plan = driven.must_plan()
    assert plan.request_ids == ["a", "b"]
    assert len(set(plan.rows.tolist())) == 2
    assert (plan.prefix_lens.tolist(), plan.q_lens.tolist(), plan.seq_lens.tolist()) == ([4, 0], [1, 4], [5, 4])
    assert plan.token_ids.tolist() == [41, 20, 21, 22, 23]
    assert plan.token_src is None
    assert plan.sample_rows.tolist() == [0]
    assert plan.sampling is None
    for name in ("rows", "prefix_lens", "q_lens", "seq_lens", "token_ids", "sample_rows"):
        assert getattr(plan, name).dtype == np.int32, name
    driven.commit()
    plan = driven.must_plan()
    assert plan.token_ids.tolist() == [42, 24, 25]
    assert plan.sample_rows.tolist() == [0, 1]


def test_tokens_in_flight_are_named_by_row(drive: Drive) -> None:
    driven = drive(steps_in_flight_max=2, speak=numbered, prefill_chunk=4)
    driven.add("a", [10, 11, 12])
    first = driven.must_plan()
    driven.add("b", [20, 21, 22, 23, 24])
    second = driven.must_plan()
    assert first.token_src is None
    assert second.token_src is not None
    assert second.token_src.tolist() == [first.rows[0], -1, -1, -1, -1]
    assert second.token_ids.tolist() == [0, 20, 21, 22, 23]
    driven.commit()
    third = driven.must_plan()
    assert third.token_src is not None
    assert third.token_src.tolist() == [first.rows[0], -1]  # the prompt's last token is known
    assert third.token_ids.tolist() == [0, 24]
    driven.commit()
    fourth = driven.must_plan()
    assert fourth.token_src is not None
    assert fourth.token_src.tolist() == [first.rows[0], second.rows[1]]


def test_no_plan_foresees_more_tokens_than_are_allowed(drive: Drive) -> None:
    """Ends by length never overshoot."""
    driven = drive(steps_in_flight_max=2)
    driven.add("a", 4, max_new_tokens=3)
    plans = driven.run()
    assert [sizes(plan) for plan in plans] == [{"a": 4}, {"a": 1}, {"a": 1}]
    assert not any(driven.core.statistics().wasted_tokens.values())


def test_how_rows_choose(drive: Drive) -> None:
    driven = drive(speak=numbered)
    driven.add("greedy", 3, max_new_tokens=2)
    driven.add(
        "draws", 4, max_new_tokens=2, temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, seed=11,
    )  # fmt: skip
    for number in range(2):
        plan = driven.must_plan()
        how = plan.sampling
        assert how is not None
        assert how.temperature.tolist() == [0, 0.5]
        assert how.top_k.tolist() == [0, 7]
        assert how.top_p.tolist() == [1, 0.25]
        assert how.min_p.tolist() == [0, 0.125]
        assert how.uniform.tolist() == uniforms(np.array([0, 11]), np.full(2, number, np.int32)).tolist()
        assert how.penalties is None
        for name, kind in {"temperature": "f4", "top_k": "i4", "top_p": "f4", "min_p": "f4", "uniform": "f4"}.items():
            assert getattr(how, name).dtype == kind, name
        driven.commit()
    driven.add("greedy too", 3, max_new_tokens=1)
    assert driven.must_plan().sampling is None


def test_the_next_owner_of_a_row_chooses_for_itself(drive: Drive) -> None:
    driven = drive(rows=1, max_running=1)
    driven.add("draws", 3, max_new_tokens=1, temperature=0.5, presence_penalty=1.0)
    driven.add("greedy", 3, max_new_tokens=1)
    assert [plan.sampling is None for plan in driven.run()] == [False, True]


def test_penalties_come_with_the_history_once(drive: Drive) -> None:
    driven = drive(prefill_chunk=2, speak=numbered)
    driven.add(
        "a", [10, 11, 12], max_new_tokens=3, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.25
    )
    driven.add("b", [20, 21, 22], max_new_tokens=3)
    assert driven.step().sampling is None  # nobody is sampled
    plan = driven.step()
    assert plan.sampling is not None
    penalties = plan.sampling.penalties
    assert penalties is not None
    assert penalties.repetition.tolist() == [1.5, 1]
    assert penalties.presence.tolist() == [0.5, 0]
    assert penalties.frequency.tolist() == [0.25, 0]
    (history,) = penalties.histories
    assert (history.row_slot, history.prompt.tolist(), history.outputs.tolist()) == (plan.rows[0], [10, 11, 12], [])
    plan = driven.step()
    assert plan.sampling is not None
    assert plan.sampling.penalties is not None
    assert not plan.sampling.penalties.histories


def test_plans_are_not_written_after_they_were_made(drive: Drive) -> None:
    driven = drive(steps_in_flight_max=2, max_running=3, prefill_chunk=3, speak=numbered)
    for i in range(5):
        driven.add(str(i), 4, max_new_tokens=5, temperature=1.0)
    kept: list[tuple[Plan, list[bytes]]] = []
    while driven.core.has_work:
        if (plan := driven.plan()) is not None:
            kept.append((plan, arrays_of(plan)))
        driven.commit()
    assert len(kept) > 10
    assert all(arrays_of(plan) == arrays for plan, arrays in kept)


def arrays_of(plan: Plan) -> list[bytes]:
    """Everything in a plan that a runner is given, as bytes."""
    arrays = [plan.rows, plan.prefix_lens, plan.q_lens, plan.seq_lens, plan.token_ids, plan.sample_rows]
    if plan.token_src is not None:
        arrays.append(plan.token_src)
    how = plan.sampling
    chosen = [] if how is None else [how.temperature, how.top_k, how.top_p, how.min_p, how.uniform]
    if how is not None and how.penalties is not None:
        chosen += [how.penalties.repetition, how.penalties.presence, how.penalties.frequency]
        for history in how.penalties.histories:
            arrays += [np.array([history.row_slot]), history.prompt, history.outputs]
    head = f"{plan.step} {plan.decode_rows} {plan.kind} {plan.request_ids} {[array.dtype for array in arrays]}"
    return [head.encode(), *(array.tobytes() for array in arrays), *(array.tobytes() for array in chosen)]


def history(driven: Driven, seed: int) -> list[list[bytes]]:
    """The plans of a random trace of calls."""
    draw, plans, count = random.Random(seed), [], 0
    for _ in range(200):
        verb = draw.choice(["add", "add", "plan", "plan", "commit", "commit", "abort", "abandon"])
        if verb == "add":
            count += 1
            try:
                driven.add(
                    f"r{count}",
                    draw.randint(1, 30),
                    max_new_tokens=draw.randint(1, 12),
                    temperature=draw.choice([0.0, 1.0]),
                    presence_penalty=draw.choice([0.0, 0.5]),
                    seed=draw.randrange(2**40),
                    deadline=draw.choice([None, driven.now + 20]),
                )
            except Rejected:
                continue
        elif verb == "plan" and (plan := driven.plan()) is not None:
            plans.append(arrays_of(plan))
        elif verb == "commit" and driven.out:
            driven.commit()
        elif verb == "abort" and count:
            driven.abort(f"r{draw.randint(1, count)}")
        elif verb == "abandon" and driven.out and draw.random() < 0.2:
            driven.abandon(RunnerFailed("injected"))
        driven.expire()
    return plans


@pytest.mark.parametrize("make_cache", [NullPrefixCache, RadixPrefixCache])
@pytest.mark.parametrize("seed", range(6))
def test_the_same_calls_give_the_same_plans(drive: Drive, seed: int, make_cache: Callable[[], KeptPrefixCache]) -> None:
    settings = {
        "pages": 12, "page_size": 4, "max_running": 4, "max_waiting": 5, "max_batch_tokens": 12, "prefill_chunk": 5,
        "steps_in_flight_max": 1 + seed % 2, "eos_ids": (41,),
        "speak": lambda request_id, number: (len(request_id) * 31 + int(request_id[1:]) * 7 + number) % 60,
    }  # fmt: skip
    one, other = (drive(**settings, prefix_cache=make_cache()) for _ in range(2))
    plans = history(one, seed)
    assert plans == history(other, seed)
    assert len(plans) > 20
    assert one.core.statistics() == other.core.statistics()
    assert one.memory.given_back == other.memory.given_back
    assert (one.core.statistics().prompt_tokens_cached > 0) == (make_cache is RadixPrefixCache)
