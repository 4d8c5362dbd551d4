"""What the memory asks of a prefix cache."""

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

PageArray = NDArray[np.int32]
TokenArray = NDArray[np.int32]


class Match(NamedTuple):
    """A cached prefix: `tokens` tokens, in whole pages, whose KV is in `pages`.  Holds nothing by itself."""

    tokens: int
    pages: PageArray


class PrefixCache(Protocol):
    """KV of token prefixes that nobody computes twice."""

    def match(self, tokens: TokenArray, namespace: str) -> Match:
        """The longest cached prefix of `tokens`, leaving at least one token to compute.  Mutates nothing."""

    @property
    def evictable_pages(self) -> int:
        """Cached pages that nobody uses."""
