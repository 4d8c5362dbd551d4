"""What ends with time: entries that nobody used for long, and pins.

Time is an argument, in seconds of whatever clock the caller has; it begins at the first tick, so that what is cached or
pinned before counts from there.
"""

import math
from collections import OrderedDict
from heapq import heappop, heappush
from itertools import count

from kvloom.allocator.errors import InvalidArgument
from kvloom.allocator.prefix.base import Match
from kvloom.allocator.prefix.node import Node


class Timeline:
    """Seconds since the first tick; never goes back, and goes on when somebody comes with a clock that is behind."""

    def __init__(self) -> None:
        self.now = 0.0
        self._origin: float | None = None

    def advance(self, now: float) -> None:
        """It is `now`."""
        if self._origin is None or now < self._origin + self.now:  # the first, or another clock: time goes on from here
            self._origin = now - self.now
        self.now = max(self.now, now - self._origin)


class Ages:
    """Nodes in the order of their last use, when entries have a time to live; empty when not."""

    def __init__(self, ttl: float | None, time: Timeline) -> None:
        if ttl is not None and not ttl > 0:
            raise InvalidArgument(f"ttl={ttl!r} must be above 0 seconds; None: entries live for ever")
        self._ttl = ttl
        self._time = time
        self._used_at: OrderedDict[Node, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._used_at)

    def __contains__(self, node: Node) -> bool:
        return node in self._used_at

    def touch(self, node: Node) -> None:
        """It is used now."""
        if self._ttl is not None:
            self._used_at[node] = self._time.now
            self._used_at.move_to_end(node)

    def discard(self, node: Node) -> None:
        """It is no more."""
        self._used_at.pop(node, None)

    def overdue(self) -> list[Node]:
        """Nodes not used for the time to live, children before parents; they count as used now until discarded."""
        nodes: list[Node] = []
        while self._ttl is not None and self._used_at:
            node, used_at = next(iter(self._used_at.items()))
            if used_at + self._ttl > self._time.now:
                break
            nodes.append(node)
            self.touch(node)
        return nodes


class Pins:
    """Matches that are kept locked for some time, within a budget of pages."""

    def __init__(self, budget_pages: int, time: Timeline) -> None:
        self.pages = 0
        self._budget_pages = budget_pages
        self._time = time
        self._ends: list[tuple[float, int, Match]] = []
        self._turns = count()

    def add(self, match: Match, pages: int, seconds: float) -> bool:
        """Keep `match`, of that many pages; False, nothing changed, where the budget is too small.

        Raises InvalidArgument unless `seconds` is a time above 0.
        """
        if not 0 < seconds < math.inf:
            raise InvalidArgument(f"a pin of {seconds!r} seconds; it must be above 0, and end")
        if self.pages + pages > self._budget_pages:
            return False
        self.pages += pages
        heappush(self._ends, (self._time.now + seconds, next(self._turns), match))
        return True

    def take(self, match: Match) -> None:
        """End the pin of this very `match`.  Raises InvalidArgument when there is none."""
        for at, (_, _, pinned) in enumerate(self._ends):
            if pinned is match:
                self._ends.pop(at)
                self._ends.sort()
                self.pages -= pinned_pages(match)
                return
        raise InvalidArgument(f"this match of {match.tokens} tokens is not pinned")

    def take_all(self) -> list[Match]:
        """End them all."""
        pinned = [match for _, _, match in self._ends]
        self._ends.clear()
        self.pages = 0
        return pinned

    def take_due(self) -> list[Match]:
        """End those whose time is over."""
        due: list[Match] = []
        while self._ends and self._ends[0][0] <= self._time.now:
            due.append(heappop(self._ends)[2])
            self.pages -= pinned_pages(due[-1])
        return due


def pinned_pages(match: Match) -> int:
    """Pages of all pools that a pin of `match` keeps."""
    return sum(int((pages > 0).sum()) for pages in match.pages.values())
