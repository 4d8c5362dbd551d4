"""Candidates for eviction: nodes in the order of a policy, and loose pages in the order of coming loose.

Both are lazy.  What stops being a candidate stays where it is and is looked at again when it comes to the front; so
neither uses nor locks cost a search, and eviction never walks the tree.
"""

from collections import deque
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any

import numpy as np

from kvloom.allocator.prefix.eviction import EvictionPolicy
from kvloom.allocator.prefix.node import Node
from kvloom.allocator.prefix.pool_pages import Index

Entry = tuple[Any, int, Node]


class Candidates:
    """A heap of nodes.  `Any` is the policy's key, which only the policy knows."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._heap: list[Entry] = []
        self._entries: dict[Node, Entry] = {}  # the one entry of each node that counts
        self._turns = count()

    def __contains__(self, node: Node) -> bool:
        return node in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, node: Node) -> None:
        """`node` may go; does nothing where it is listed already with a key as small."""
        key = self._policy.key(node)
        listed = self._entries.get(node)
        if listed is None or key < listed[0]:
            entry = self._entries[node] = (key, next(self._turns), node)
            heappush(self._heap, entry)

    def pop(self) -> Node | None:
        """The node with the smallest key of now; no longer listed."""
        while self._heap:
            entry = heappop(self._heap)
            key, _, node = entry
            if self._entries.get(node) is not entry:
                continue
            if self._policy.key(node) > key:  # it was used since
                del self._entries[node]
                self.push(node)
                continue
            del self._entries[node]
            return node
        return None

    def discard(self, node: Node) -> None:
        """`node` is no more.  Entries that count for nothing never outnumber the others for long."""
        self._entries.pop(node, None)
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = list(self._entries.values())
            heapify(self._heap)


class LoosePages:
    """A queue of page ids, each at most once."""

    def __init__(self) -> None:
        self._queue: deque[Index] = deque()
        self._listed = np.zeros(64, bool)

    def push(self, index: Index) -> None:
        """Append those of the distinct ids that are not listed."""
        if len(index) == 0:
            return
        if index.max() >= len(self._listed):
            listed = np.zeros(2 * int(index.max()) + 2, bool)
            listed[: len(self._listed)] = self._listed
            self._listed = listed
        index = index[~self._listed[index]]
        if len(index):
            self._listed[index] = True
            self._queue.append(index)

    def take(self, count: int) -> Index:
        """Remove and return the first ids, at most `count`; none when the queue is empty."""
        if not self._queue:
            return np.empty(0, np.intp)
        index = self._queue.popleft()
        if len(index) > count:
            self._queue.appendleft(index[count:])
            index = index[:count]
        self._listed[index] = False
        return index

    def to_set(self) -> set[int]:
        """All ids; O(length)."""
        return {page for index in self._queue for page in index.tolist()}
