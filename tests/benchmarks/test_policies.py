"""The optimum is one, nothing beats it, and the trace is what it says it is."""

import json
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings as testing, strategies as some
from rich.console import Console

from benchmarks.policies.chats import Crowd, Request, Shape
from benchmarks.policies.optimum import Clairvoyant, Future, enough, optimum
from benchmarks.policies.replay import CLAIRVOYANT, OPTIMUM, Outcome, Server, Setting, outcome, replay
from benchmarks.policies.report import (
    POLICIES,
    ROWS,
    capacities,
    hits,
    important,
    plot,
    regrets,
    settings,
    totals,
    values,
)

SIZE = 2
UNLIMITED = 10_000
SMALL = Shape(tenants=8, important=(2,), conversations=60, bursts=2, burst_requests=5, batch_tenants=2)


def trace_of(spelt: Sequence[tuple[str, int]]) -> list[Request]:
    """For each request a page for each letter, the first of them its tenant's, then as many that nobody else has.

    These hold the rest of the prompt, one token at least, and the answer.
    """
    requests = []
    for t, (letters, own) in enumerate(spelt):
        shared = np.repeat([ord(letter) for letter in letters], SIZE)
        tokens = np.concatenate((shared, np.arange(own * SIZE + 1) + 1_000 * (t + 1))).astype(np.int32)
        requests.append(Request(float(t), ord(letters[0]), t % 2, len(shared) + 1, tokens))
    return requests


traces = some.lists(some.tuples(some.text("ab", min_size=1, max_size=3), some.integers(0, 2)), min_size=1, max_size=7)


def longest(future: Future) -> int:
    return max(map(len, future.next_use))


def by_brute_force(trace: Sequence[Request], capacity: int) -> int:
    """The most tokens that can be hit, whatever is thrown away when; pages may go from anywhere."""
    best: dict[frozenset[bytes], int] = {frozenset(): 0}
    for request in trace:
        path = [
            request.tokens[: end * SIZE].tobytes() + bytes([request.tenant])
            for end in range(1, len(request.tokens) // SIZE + 1)
        ]
        after: dict[frozenset[bytes], int] = {}
        for cached, before in best.items():
            found = 0
            while found < (request.prompt - 1) // SIZE and path[found] in cached:
                found += 1
            others = sorted(cached - set(path))
            for kept in range(min(len(others), capacity - len(path)) + 1):
                for choice in combinations(others, kept):
                    state = frozenset(path).union(choice)
                    after[state] = max(after.get(state, 0), before + found * SIZE)
        best = after
    return max(best.values())


@given(traces, some.integers(0, 6))
@testing(max_examples=150, deadline=None)
def test_the_optimum_is_what_brute_force_finds(spelt: list[tuple[str, int]], spare: int) -> None:
    trace = trace_of(spelt)
    future = Future(trace, SIZE)
    capacity = longest(future) + spare
    assert sum(optimum(future, capacity)) * SIZE == by_brute_force(trace, capacity)


@given(traces, some.integers(0, 12))
@testing(max_examples=150, deadline=None)
def test_no_policy_beats_the_optimum(spelt: list[tuple[str, int]], spare: int) -> None:
    trace = trace_of(spelt)
    future = Future(trace, SIZE)
    capacity = longest(future) + spare
    best = replay(Setting(OPTIMUM, capacity), trace, future)
    for policy in (*POLICIES, CLAIRVOYANT):
        assert replay(Setting(policy, capacity, capacity), trace, future).hit <= best.hit
        assert replay(Setting(policy, UNLIMITED), trace, future) == replay(Setting(OPTIMUM, UNLIMITED), trace, future)


@given(traces)
@testing(max_examples=100, deadline=None)
def test_enough_is_the_least_that_is(spelt: list[tuple[str, int]]) -> None:
    future = Future(trace_of(spelt), SIZE)
    least, most = enough(future), sum(optimum(future, UNLIMITED))
    found = [sum(optimum(future, capacity)) for capacity in range(longest(future), least + 1)]
    assert found[-1] == most
    assert found[:-1] == sorted(found[:-1])
    assert all(fewer < most for fewer in found[:-1])


@pytest.fixture(scope="module")
def chats() -> tuple[list[Request], Future]:
    trace = Crowd(SMALL).requests()
    return trace, Future(trace, SMALL.page_size)


@pytest.mark.parametrize("part", [16, 8, 4, 2, 1])
def test_chats_stay_below_the_optimum_too(chats: tuple[list[Request], Future], part: int) -> None:
    trace, future = chats
    capacity = max(longest(future), future.distinct // part)
    best = replay(Setting(OPTIMUM, capacity), trace, future)
    found = {name: replay(Setting(name, capacity, capacity), trace, future) for name in (*POLICIES, CLAIRVOYANT)}
    assert all(one.hit <= best.hit for one in found.values())
    if part == 1:
        assert {one.hit for one in found.values()} == {best.hit}
        assert all(one.regret == 0 for one in found.values())


@pytest.mark.parametrize(
    ("spelt", "capacity", "hit"),
    [
        ([("a", 0), ("b", 0), ("c", 0), ("a", 0)], 2, {"lru": 0, CLAIRVOYANT: 2, OPTIMUM: 2}),
        # Room for two pages: the last one of each leaf would be best, the cache takes both from the same.
        ([("aa", 1), ("b", 1), ("c", 1), ("aa", 1), ("b", 1)], 5, {"lru": 2, CLAIRVOYANT: 2, OPTIMUM: 6}),
    ],
)
def test_who_knows_the_future_keeps_what_comes_back(
    spelt: list[tuple[str, int]], capacity: int, hit: dict[str, int]
) -> None:
    trace = trace_of(spelt)
    future = Future(trace, SIZE)
    assert {policy: replay(Setting(policy, capacity), trace, future).hit for policy in hit} == hit


def test_the_clairvoyant_reads_pages_of_nodes_only() -> None:
    class View:
        last_used = hits = created = priority = pages = 0

    with pytest.raises(TypeError):
        Clairvoyant(1).key(View())


def test_the_same_seed_makes_the_same_trace() -> None:
    one, again = Crowd(SMALL).requests(), Crowd(SMALL).requests()
    other = Crowd(replace(SMALL, seed=8)).requests()
    assert [request.at for request in one] == [request.at for request in again]
    assert all((left.tokens == right.tokens).all() for left, right in zip(one, again, strict=True))
    assert [request.at for request in one] != [request.at for request in other]


def test_a_turn_repeats_all_before_it(chats: tuple[list[Request], Future]) -> None:
    trace, _ = chats
    assert all(left.at <= right.at for left, right in pairwise(trace))
    talks: dict[bytes, Request] = {}
    later_turns = 0
    for request in trace:
        assert 0 < request.prompt < len(request.tokens)
        assert request.priority == (request.tenant + 1 in SMALL.important)
        before = [end for end in talks if request.tokens[: request.prompt].tobytes().startswith(end)]
        later_turns += len(before) > 0
        talks[request.tokens.tobytes()] = request
    assert later_turns > SMALL.conversations


def test_totals_of_an_unlimited_cache(chats: tuple[list[Request], Future]) -> None:
    trace, future = chats
    sums = totals(trace, future)
    assert sums["requests"] == len(trace)
    assert sums["important_requests"] == sum(request.priority for request in trace)
    assert sums["unlimited_hit_ratio"] == round(replay(Setting("lru", future.distinct), trace, future).ratio, 4)
    assert sums["longest_request_pages"] <= sums["enough_pages"] <= sums["pages"]


def test_hits_of_requests_with_priority_are_told_apart() -> None:
    trace = trace_of([("a", 0), ("aa", 0), ("aab", 0)])
    assert outcome(trace, [0, 2, 4], regret=1) == Outcome(3 + 5 + 7, 6, 5, 2, 1)


def test_a_request_must_fit() -> None:
    trace = trace_of([("a", 0), ("abab", 2)])
    future = Future(trace, SIZE)
    for policy in ("lru", OPTIMUM):
        assert replay(Setting(policy, 6), trace, future).hit == SIZE
        with pytest.raises(ValueError, match=r"pages"):
            replay(Setting(policy, 5), trace, future)


def test_a_request_that_repeats_another_to_its_end_is_refused() -> None:
    once = trace_of([("ab", 1)])
    with pytest.raises(ValueError, match="request 1"):
        Future(once * 2, SIZE)
    server = Server(Setting("lru", 10), Future(once, SIZE))
    server.serve(0, once[0])
    with pytest.raises(ValueError, match="request 0"):
        server.serve(0, once[0])


def test_tables_json_and_plot(chats: tuple[list[Request], Future], tmp_path: Path) -> None:
    trace, future = chats
    found = {setting: Outcome(100, 40, 10, 5, 7) for setting in settings(future)}
    console = Console(file=StringIO(), width=200)
    for table, rows in ((hits, len(ROWS)), (important, len(ROWS)), (regrets, len(POLICIES) + 1)):
        made = table(found, future)
        assert made.row_count == rows
        console.print(made)
    read = json.loads(json.dumps(values(SMALL, totals(trace, future), found)))
    assert len(read["outcomes"]) == len(found) > len(ROWS) * len(capacities(future))
    for name in ("one.svg", "again.svg"):
        plot(found, future, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "again.svg").read_bytes()
