"""What a prefix cache reports."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class PrefixStatistics(NamedTuple):
    """A moment of a prefix cache; all counters since the start.

    entries        nodes of the tree
    pages, locked  pages in the tree, and those of them that somebody uses, by pool
    inserted       pages adopted, of all pools; duplicates: offered where the tree had one already
    evicted        pages that left, by (pool, reason)
    query_tokens   tokens of the recorded look-ups; hit_tokens of them were cached, host_hit_tokens behind them came
                   from the host, and regret_tokens would have been in a larger cache
    pinned_pages   pages of all pools that pins keep, each as often as it is pinned
    ghost_pages    evicted pages whose tokens are remembered
    """

    entries: int = 0
    pages: Mapping[str, int] = MappingProxyType({})
    locked: Mapping[str, int] = MappingProxyType({})
    inserted: int = 0
    duplicates: int = 0
    evicted: Mapping[tuple[str, str], int] = MappingProxyType({})
    query_tokens: int = 0
    hit_tokens: int = 0
    regret_tokens: int = 0
    pinned_pages: int = 0
    ghost_pages: int = 0
    host_hit_tokens: int = 0
