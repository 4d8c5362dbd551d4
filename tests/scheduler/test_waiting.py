"""The queue, beside a list that is sorted whenever somebody asks."""

import gc
import weakref

import numpy as np
from hypothesis import given, strategies as st

from kvloom.scheduler.request import Request, Sequence, TokenArray
from kvloom.scheduler.waiting import WaitingQueue


def sequence(arrival: int, tokens: int = 1) -> Sequence:
    prompt = np.zeros(tokens, np.int32)
    return Sequence(Request(id=str(arrival), prompt=prompt), arrival, 0.0, 1, None, tokens=prompt, queued_at=0.0)


# What to do, and to whom: a number picks among those inside (or outside), modulo how many there are.
VERBS = st.lists(
    st.tuples(st.sampled_from(["push", "push new", "remove", "remove head"]), st.integers(0, 99)), max_size=60
)


@given(VERBS)
def test_like_a_sorted_list(verbs: list[tuple[str, int]]) -> None:
    queue, twin, outside = WaitingQueue(), list[Sequence](), list[Sequence]()
    for verb, number in verbs:
        if verb == "push new":
            twin.append(sequence(len(twin) + len(outside), tokens=1 + number))
            queue.push(twin[-1])
        elif verb == "push" and outside:
            twin.append(outside.pop(number % len(outside)))
            queue.push(twin[-1])
        elif verb.startswith("remove") and twin:
            twin.sort(key=lambda one: one.arrival)
            outside.append(twin.pop(0 if verb == "remove head" else number % len(twin)))
            queue.remove(outside[-1])
        assert len(queue) == len(twin)
        assert queue.tokens == sum(len(one.tokens) for one in twin)
        assert queue.peek() is min(twin, key=lambda one: one.arrival, default=None)


def come_and_go(queue: WaitingQueue, arrival: int) -> weakref.ref[TokenArray]:
    one = sequence(arrival, tokens=100)
    queue.push(one)
    queue.remove(one)
    return weakref.ref(one.tokens)


def test_those_who_left_are_forgotten_though_the_head_stays() -> None:
    """A head that waits long must not pin everybody who gave up behind it."""
    queue = WaitingQueue()
    queue.push(sequence(0))
    prompts = []
    for arrival in range(1, 500):
        prompts.append(come_and_go(queue, arrival))
    gc.collect()
    assert sum(prompt() is not None for prompt in prompts) < 100
    head = queue.peek()
    assert head is not None
    assert head.arrival == 0
