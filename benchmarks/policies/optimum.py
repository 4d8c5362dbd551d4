"""The most that any policy can hit on a trace, which somebody who knows the trace can reach: Belady's rule.

L. A. Belady, A study of replacement algorithms for a virtual-storage computer, IBM Systems Journal 5 (2), 1966.

A request needs the pages of its whole prompt and answer at once; what else stays is chosen from what was there before.
So a page that is found took up room in every request since its last use.  The question is which of these spans to
grant, where each request has room for `capacity` less its own pages.  All are worth the same, one page, so where there
is no room for all of them the one that ends last goes: any other in its place is in nobody's way for longer.  That is
an upper bound for every policy, whatever it may evict and whether or not it keeps a tree.

That a page counts only if all before it are there takes nothing away: who uses a page uses those before it, so their
next use comes no later, and of pages with the same next use the one behind goes first.  Belady's rule hence takes the
last pages of leaves only, and a tree can reach the bound.  One condition: a request's last pages, those that it could
not find because a token must be left to compute, are new.  `Future` insists on it.
"""

from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from benchmarks.policies.chats import Request
from kvloom.allocator.prefix.eviction import NodeView
from kvloom.allocator.prefix.node import Node


class Future:
    """What is going to happen to the pages of a trace.

    limits       by request: pages of its prompt that it can find, one token at least being left over
    next_use     by request, int32 [whole pages of prompt and answer]: the request that uses the page next, or the
                 number of requests when none does; never falls along a path
    distinct     pages of an unlimited cache in the end
    """

    def __init__(self, trace: Sequence[Request], page_size: int) -> None:
        self.page_size = page_size
        self.limits = [(request.prompt - 1) // page_size for request in trace]
        known: dict[tuple[int, int, bytes], int] = {}  # a page by the one before it, or the tenant, and its tokens
        paths = [self._path(known, t, request) for t, request in enumerate(trace)]
        self.distinct = len(known)
        self.next_use: list[NDArray[np.int32]] = []
        following = np.full(self.distinct, len(trace), np.int32)
        for t, path in reversed(list(enumerate(paths))):
            self.next_use.append(following[path])
            following[path] = t
        self.next_use.reverse()

    def _path(self, known: dict[tuple[int, int, bytes], int], t: int, request: Request) -> NDArray[np.intp]:
        """Numbers of the pages of a request.  Raises ValueError if it could not find a page that is there."""
        data, size = request.tokens.tobytes(), self.page_size * request.tokens.itemsize
        path: list[int] = []
        page = -1
        for depth in range(len(data) // size):
            new = len(known)
            page = known.setdefault((request.tenant, page, data[depth * size : (depth + 1) * size]), new)
            if page != new and depth >= self.limits[t]:
                raise ValueError(f"request {t} ends in tokens that were there before; the optimum is not made for it")
            path.append(page)
        return np.array(path, np.intp)


def optimum(future: Future, capacity: int) -> list[int]:
    """Pages that each request finds when Belady's rule has `capacity` pages.  Raises ValueError for too few of them.

    Pages that wait for the same request are worth the same, so only their number is kept: those that wait for a request
    when it comes are those that it finds.
    """
    never = len(future.next_use)
    waiting = [0] * (never + 1)  # by the request that uses them next
    latest: list[int] = []  # heap of those requests, negative; some of them with nothing left
    total, found = 0, []
    for t, following in enumerate(future.next_use):
        found.append(waiting[t])
        total -= waiting[t]
        waiting[t] = 0
        surplus = total + len(following) - capacity
        while surplus > 0:
            if not latest:
                raise ValueError(f"request {t} needs {len(following)} pages, more than the {capacity} there are")
            gone = min(surplus, waiting[-latest[0]])
            waiting[-latest[0]] -= gone
            total, surplus = total - gone, surplus - gone
            if not waiting[-latest[0]]:
                heappop(latest)
        uses, counts = np.unique(following, return_counts=True)
        for use, count in zip(uses.tolist(), counts.tolist(), strict=True):
            if not waiting[use]:
                heappush(latest, -use)
            waiting[use] += count
        total += len(following)
    return found


def enough(future: Future) -> int:
    """Pages with which the optimum finds all that an unlimited cache does."""
    most = 0
    waiting = np.zeros(len(future.next_use) + 1, np.int64)
    total = 0
    for t, following in enumerate(future.next_use):
        total -= int(waiting[t])
        most = max(most, total + len(following))
        wanted = following[following < len(future.next_use)]
        np.add.at(waiting, wanted, 1)
        total += len(wanted)
    return most


class Clairvoyant:
    """Belady's rule as a policy: the leaf whose last page is used last goes first.

    The cache takes what it needs from the end of one leaf before it looks at the next, so this is not the optimum: it
    is what a policy may hope for.  `learn` before the pages lose their users.
    """

    def __init__(self, pages: int) -> None:
        self._next_use = np.zeros(pages + 1, np.int32)

    def learn(self, pages: NDArray[np.int32], next_use: NDArray[np.int32]) -> None:
        """From now on these pages have that next use."""
        self._next_use[pages] = next_use

    def key(self, node: NodeView) -> int:
        """The next use of its last page, the latest first."""
        if not isinstance(node, Node):
            raise TypeError("a node of the radix tree has the page ids, nothing else does")
        return -int(self._next_use[node.ids[0, node.pages - 1]])
