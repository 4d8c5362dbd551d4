"""A double-ended queue of page ids in one array: taking and giving back cost what they move, never the pool's size."""

import numpy as np
from numpy.typing import NDArray

PageArray = NDArray[np.int32]
NO_PAGES: PageArray = np.empty(0, np.int32)


class PageRing:
    """At most `capacity` page ids (int32) in order; every verb is O(pages moved).

    The results are copies: a caller can keep or change them without touching the queue.
    """

    __slots__ = ("_head", "_ids", "_length")

    def __init__(self, capacity: int) -> None:
        self._ids = np.empty(max(capacity, 1), np.int32)
        self._head = 0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def take(self, count: int) -> PageArray:
        """Remove and return the first `count` ids; the caller has checked that they are there."""
        head = self._head
        end = head + count
        self._head = end % len(self._ids)
        self._length -= count
        if end <= len(self._ids):
            return self._ids[head:end].copy()
        return np.concatenate((self._ids[head:], self._ids[: end - len(self._ids)]))

    def push_back(self, pages: PageArray) -> None:
        """Append in the given order."""
        self._write((self._head + self._length) % len(self._ids), pages)

    def push_front(self, pages: PageArray) -> None:
        """Put in front, so that `pages[0]` is the next to be taken."""
        self._head = (self._head - len(pages)) % len(self._ids)
        self._write(self._head, pages)

    def to_array(self) -> PageArray:
        """All ids in order; O(length)."""
        return np.take(self._ids, np.arange(self._head, self._head + self._length), mode="wrap")

    def copy(self) -> "PageRing":
        """The same ids in the same order, in memory of its own; O(capacity)."""
        ring = PageRing(0)
        ring._ids, ring._head, ring._length = self._ids.copy(), self._head, self._length
        return ring

    def clear(self) -> None:
        """Forget all ids."""
        self._head = self._length = 0

    def _write(self, at: int, pages: PageArray) -> None:
        first = min(len(pages), len(self._ids) - at)
        self._ids[at : at + first] = pages[:first]
        self._ids[: len(pages) - first] = pages[first:]
        self._length += len(pages)
