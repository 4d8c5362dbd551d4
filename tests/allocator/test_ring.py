"""PageRing against a deque."""

from collections import deque

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvloom.allocator.ring import PageRing
from tests.allocator.books import ints


class RingMachine(RuleBasedStateMachine):
    """Random verbs on both; never more ids than there is room for, never more taken than there are."""

    @initialize(capacity=st.integers(0, 9), first=st.integers(0, 9))
    def make(self, capacity: int, first: int) -> None:
        self.capacity = capacity
        self.next_id = min(first, capacity)
        self.twin = deque(range(self.next_id))
        self.ring = PageRing(capacity)
        self.ring.push_back(ints(*range(self.next_id)))

    @rule(share=st.floats(0, 1))
    def take(self, share: float) -> None:
        count = round(share * len(self.twin))
        taken = self.ring.take(count)
        assert taken.dtype == np.int32
        assert taken.tolist() == [self.twin.popleft() for _ in range(count)]

    @rule(share=st.floats(0, 1), front=st.booleans())
    def push(self, share: float, front: bool) -> None:
        count = round(share * (self.capacity - len(self.twin)))
        pages = list(range(self.next_id, self.next_id + count))
        self.next_id += count
        if front:
            self.ring.push_front(ints(*pages))
            self.twin.extendleft(reversed(pages))
        else:
            self.ring.push_back(ints(*pages))
            self.twin.extend(pages)

    @rule()
    def clear(self) -> None:
        self.ring.clear()
        self.twin.clear()

    @rule()
    def copy(self) -> None:
        """What happens to the original afterwards does not matter to the copy."""
        original, self.ring = self.ring, self.ring.copy()
        original.clear()
        original.push_back(ints(*[-1] * self.capacity))

    @invariant()
    def same(self) -> None:
        assert len(self.ring) == len(self.twin)
        assert self.ring.to_array().tolist() == list(self.twin)


TestRing = RingMachine.TestCase
TestRing.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def turned(capacity: int, by: int) -> PageRing:
    """A full ring 0, 1, .. whose first id lies at `by`."""
    ring = PageRing(capacity)
    ring.push_back(ints(*range(-by, 0)))
    ring.take(by)
    ring.push_back(ints(*range(capacity)))
    return ring


@pytest.mark.parametrize("by", range(5))
def test_all_can_be_taken_at_once_wherever_the_first_lies(by: int) -> None:
    ring = turned(5, by)
    assert ring.take(5).tolist() == [0, 1, 2, 3, 4]
    assert len(ring) == 0
    ring.push_front(ints(7, 8, 9, 10, 11))
    assert ring.to_array().tolist() == [7, 8, 9, 10, 11]


@pytest.mark.parametrize("by", [0, 3])
def test_what_was_taken_is_the_callers_own(by: int) -> None:
    ring = turned(5, by)
    taken, listed = ring.take(3), ring.to_array()
    ring.push_back(taken)
    taken[:] = -1
    listed[:] = -1
    assert ring.to_array().tolist() == [3, 4, 0, 1, 2]


@pytest.mark.parametrize("front", [True, False])
def test_what_was_put_in_is_copied(front: bool) -> None:
    ring = PageRing(4)
    pages = ints(1, 2)
    (ring.push_front if front else ring.push_back)(pages)
    pages[:] = 9
    assert ring.take(2).tolist() == [1, 2]
