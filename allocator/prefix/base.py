"""What the memory asks of a prefix cache, and the values that go back and forth."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvloom.allocator.prefix.ghosts import Body, Ghost
from kvloom.allocator.prefix.reports import PrefixStatistics

PageArray = NDArray[np.int32]
TokenArray = NDArray[np.int32]
NO_PAGES: PageArray = np.empty(0, np.int32)
Evicted = dict[str, PageArray]  # by pool: ids of pages that left the cache and belong to whoever asked


class Part(NamedTuple):
    """`pages` pages that are gone, of which `body` has a copy from its page `first` on."""

    body: Body
    first: int
    pages: int


class Cut(NamedTuple):
    """A ghost and what it was: `pages[pool]`, int32, of all its tokens."""

    ghost: Ghost
    pages: Mapping[str, PageArray]


class Match(NamedTuple):
    """A cached prefix of `tokens` tokens, in whole pages.  Holds nothing by itself: lock it before anything else.

    `pages[pool]` is int32 [tokens // page_size]; in a window pool 0 but for the last window, which is all that
    attention will read.  `version` is the cache's at the time: it tells a page from another one under the same id.

    A memory that keeps what the cache gave up adds `parts`: the next `host_tokens` tokens, one part behind the other.
    """

    tokens: int
    pages: Mapping[str, PageArray]
    namespace: str = ""
    version: int = 0
    host_tokens: int = 0
    parts: tuple[Part, ...] = ()


class Inserted(NamedTuple):
    """What the cache has at the positions of an insertion, m pages.

    `pages[pool]`, int32 [m]: its pages there now, 0 where it has none.  `adopted[pool]`, bool [m]: the page that was
    offered became the cache's.
    """

    pages: Mapping[str, PageArray]
    adopted: Mapping[str, NDArray[np.bool_]]


class PrefixCache(Protocol):
    """KV of token prefixes that nobody computes twice.

    A page is `page_size` tokens; ids are per pool, from 1 up; 0 says "no page".  The cache only keeps the books: the
    memory moves pages in its ledgers by what these verbs return.  Misuse raises and changes nothing.
    """

    def attach(self, page_size: int, windows: Mapping[str, int | None]) -> None:
        """Serve one memory, whose pools have these windows (None: full attention).

        Raises InvalidArgument for sizes below 1 and when a memory is attached already.
        """

    def match(self, tokens: TokenArray, namespace: str = "") -> Match:
        """The longest cached prefix of `tokens`, leaving at least one token to compute.  Mutates nothing."""

    def lock(self, match: Match) -> None:
        """One more user for each page of `match`, which counts as used now.  Raises InvalidArgument when stale."""

    def unlock(self, pool: str, pages: PageArray) -> None:
        """One user fewer for each of the distinct `pages` (zeros are passed over).  Raises DoubleFree."""

    def insert(
        self, namespace: str, after: int, tokens: TokenArray, pages: Mapping[str, PageArray], priority: int = 0
    ) -> Inserted:
        """Cache m whole pages of `tokens` that follow page `after` of the first pool (0: from the start).

        `pages[pool]` is int32 [m]; 0, in window pools only: none.  Wherever a page is offered, the page that the cache
        has there afterwards gets one more user.  Raises InvalidArgument.
        """

    def evict(self, pool: str, count: int, reason: str = "capacity") -> Evicted:
        """Give up at least `count` pages of `pool` that nobody uses, or all there are."""

    def evictable(self, pool: str) -> int:
        """Cached pages of `pool` that nobody uses."""


class KeptPrefixCache(PrefixCache, Protocol):
    """And what a memory does for it from time to time."""

    pin_budget_pages: int  # pages of all pools that nobody else may count on

    def tick(self, now: float) -> Evicted:
        """It is `now`, in seconds on whatever clock: what has outlived its time goes."""

    def share(self, pool: str, pages: PageArray) -> None:
        """One more user for each of the distinct `pages`, which have users already (zeros are passed over).

        Raises InvalidArgument.
        """

    def forget(self, pages: PageArray) -> Evicted:
        """Of these pages of the first pool, a path in order, those at the end go that nobody uses or goes on from."""

    def reset(self) -> Evicted:
        """All pages that nobody uses go."""

    def regret(self, tokens: TokenArray, namespace: str, matched_tokens: int, host_tokens: int = 0) -> int:
        """Record a look-up; the tokens that a larger cache would have had beyond the match and the host's behind it."""

    def statistics(self) -> PrefixStatistics:
        """An immutable report."""

    def check(self) -> None:
        """Raise BrokenInvariant when its books do not balance."""


@runtime_checkable
class GhostCache(Protocol):
    """And what lets others keep copies of what it gives up: they write `Ghost.body`, and get it back as a `Part`."""

    def cuts(self, evicted: Evicted) -> Sequence[Cut]:
        """What the last `evict` gave up, `evicted`, and what is remembered of it, oldest first.

        Raises InvalidArgument with window pools: there it is not all pages of whole tokens that go.
        """

    def parts_behind(self, tokens: TokenArray, match: Match) -> tuple[Part, ...]:
        """What bodies have of `tokens` directly behind their `match`, leaving a token to compute.  Mutates nothing."""
