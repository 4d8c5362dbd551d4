"""The prefix cache that caches nothing."""

from collections.abc import Mapping

import numpy as np

from kvloom.allocator.prefix.base import Evicted, Inserted, Match, PageArray, TokenArray
from kvloom.allocator.prefix.reports import PrefixStatistics


class NullPrefixCache:
    """Every match is empty, and what is offered stays with whoever offers it.  It has no state."""

    pin_budget_pages = 0

    def attach(self, page_size: int, windows: Mapping[str, int | None]) -> None:
        """Nothing to prepare, hence any number of memories may share it."""

    def match(self, tokens: TokenArray, namespace: str = "") -> Match:
        """Nothing is cached."""
        return Match(0, {}, namespace)

    def lock(self, match: Match) -> None:
        """A match of this cache has no pages."""

    def unlock(self, pool: str, pages: PageArray) -> None:
        """A match of this cache has no pages."""

    def insert(
        self, namespace: str, after: int, tokens: TokenArray, pages: Mapping[str, PageArray], priority: int = 0
    ) -> Inserted:
        """Nothing is adopted, and nothing is there."""
        return Inserted(
            {pool: np.zeros(len(offered), np.int32) for pool, offered in pages.items()},
            {pool: np.zeros(len(offered), bool) for pool, offered in pages.items()},
        )

    def evict(self, pool: str, count: int, reason: str = "capacity") -> Evicted:
        """There is nothing to give up."""
        return {}

    def evictable(self, pool: str) -> int:
        """None."""
        return 0

    def tick(self, now: float) -> Evicted:
        """Nothing grows old."""
        return {}

    def share(self, pool: str, pages: PageArray) -> None:
        """It has no pages."""

    def forget(self, pages: PageArray) -> Evicted:
        """It has no pages."""
        return {}

    def reset(self) -> Evicted:
        """There is nothing to give up."""
        return {}

    def regret(self, tokens: TokenArray, namespace: str, matched_tokens: int, host_tokens: int = 0) -> int:
        """None."""
        return 0

    def statistics(self) -> PrefixStatistics:
        """Zeros."""
        return PrefixStatistics()

    def check(self) -> None:
        """Nothing can be wrong."""
