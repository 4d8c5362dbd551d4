"""The prefix cache that caches nothing."""

import numpy as np

from kvloom.allocator.prefix.base import Match, TokenArray


class NullPrefixCache:
    """Every match is empty."""

    evictable_pages = 0

    def match(self, tokens: TokenArray, namespace: str) -> Match:  # the protocol's arguments
        """Nothing is cached.  Mutates nothing."""
        return Match(0, np.empty(0, np.int32))
