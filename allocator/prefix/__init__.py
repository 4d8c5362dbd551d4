"""Prefix caches: what to keep of requests that are gone.

To read it: `base` (the values and verbs), `node` and `tree` (structure), `pool_pages` (where each page is, how many
use it), `windows` and `keys` (small helpers), `insertion`, `evictor` with `candidates` and `eviction` (policies),
`ghosts` and `expiry`, `checks`; `radix` puts them together.
"""

from kvloom.allocator.prefix.base import Cut, Evicted, GhostCache, Inserted, KeptPrefixCache, Match, Part, PrefixCache
from kvloom.allocator.prefix.eviction import EvictionPolicy, NodeView
from kvloom.allocator.prefix.ghosts import Ghost
from kvloom.allocator.prefix.null import NullPrefixCache
from kvloom.allocator.prefix.radix import RadixPrefixCache
from kvloom.allocator.prefix.reports import PrefixStatistics

__all__ = [
    "Cut",
    "Evicted",
    "EvictionPolicy",
    "Ghost",
    "GhostCache",
    "Inserted",
    "KeptPrefixCache",
    "Match",
    "NodeView",
    "NullPrefixCache",
    "Part",
    "PrefixCache",
    "PrefixStatistics",
    "RadixPrefixCache",
]
