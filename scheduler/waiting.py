"""The queue in front of the running sequences, ordered by age."""

import heapq

from kvloom.scheduler.request import Sequence


class WaitingQueue:
    """Sequences by order of arrival; one that was preempted is older than whatever has not run and so comes first.

    Removal from the middle is O(1): the heap's entry stays behind and is skipped when it comes up, or thrown out with
    the others once they outnumber the members.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, Sequence]] = []
        self._members: dict[int, Sequence] = {}  # by arrival
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._members)

    @property
    def tokens(self) -> int:
        """Tokens that all members would have to compute."""
        return self._tokens

    def push(self, sequence: Sequence) -> None:
        """Enter a sequence; its `tokens` must not change while it waits."""
        heapq.heappush(self._heap, (sequence.arrival, sequence))
        self._members[sequence.arrival] = sequence
        self._tokens += len(sequence.tokens)

    def peek(self) -> Sequence | None:
        """The oldest; None when empty."""
        while self._heap and self._heap[0][0] not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def remove(self, sequence: Sequence) -> None:
        """Take a member out, from any place."""
        del self._members[sequence.arrival]
        self._tokens -= len(sequence.tokens)
        if len(self._heap) > 2 * len(self._members) + 16:
            self._heap = list(self._members.items())
            heapq.heapify(self._heap)
