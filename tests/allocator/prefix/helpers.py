"""A cache, and the memory around it in the fewest words: pages come from a counter, rows insert and let go."""

from collections.abc import Mapping
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvloom.allocator import Inserted, Match, RadixPrefixCache
from kvloom.allocator.prefix.base import Evicted, PageArray

FULL: Mapping[str, int | None] = {"full": None}


def ints(*values: int) -> PageArray:
    return np.array(values, np.int32)


def tokens(spelt: str) -> PageArray:
    """A token for each letter, so that a test can show its prompts."""
    return np.array([ord(letter) for letter in spelt], np.int32)


class Books:
    """A cache of its own, with a ledger that only counts."""

    def __init__(
        self,
        page_size: int = 4,
        windows: Mapping[str, int | None] = FULL,
        cache: RadixPrefixCache | None = None,
    ) -> None:
        self.page_size = page_size
        self.windows = windows
        self.cache = cache or RadixPrefixCache()
        self.cache.attach(page_size, windows)
        self.ids = {pool: count(1) for pool in windows}

    def fresh(self, pages: int) -> dict[str, PageArray]:
        return {pool: ints(*(next(ids) for _ in range(pages))) for pool, ids in self.ids.items()}

    def hold(self, spelt: str, after: int = 0, namespace: str = "", priority: int = 0) -> Inserted:
        """Insert; the row goes on using its pages."""
        row = tokens(spelt)
        pages = self.fresh(len(row) // self.page_size)
        inserted = self.cache.insert(namespace, after, row, pages, priority)
        self.cache.check()
        return inserted

    def put(self, spelt: str, after: int = 0, namespace: str = "", priority: int = 0) -> Inserted:
        """Insert, and let go."""
        inserted = self.hold(spelt, after, namespace, priority)
        self.drop(inserted.pages)
        return inserted

    def drop(self, pages: Mapping[str, PageArray]) -> None:
        for pool, ids in pages.items():
            self.cache.unlock(pool, ids)
        self.cache.check()

    def match(self, spelt: str, namespace: str = "") -> Match:
        """Of these letters and one more."""
        return self.cache.match(tokens(spelt + "."), namespace)

    def cached(self, spelt: str, namespace: str = "") -> int:
        return self.match(spelt, namespace).tokens

    def use(self, spelt: str) -> None:
        """A row matches, locks, and is over."""
        match = self.match(spelt)
        self.cache.lock(match)
        self.drop(match.pages)

    def evict(self, pool: str, pages: int, reason: str = "capacity") -> Evicted:
        evicted = self.cache.evict(pool, pages, reason)
        self.cache.check()
        return evicted

    def balance(self, pool: str = "full") -> tuple[int, int]:
        """Evictable and locked pages, which together must be all."""
        report = self.cache.statistics()
        assert self.cache.evictable(pool) + report.locked[pool] == report.pages[pool]
        return self.cache.evictable(pool), report.locked[pool]


def lists(pages: Mapping[str, NDArray[Any]]) -> dict[str, list[int]]:
    return {pool: ids.tolist() for pool, ids in pages.items()}
