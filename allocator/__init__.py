"""kvloom.allocator: who owns which page of KV memory, and where its bytes lie."""

from kvloom.allocator.base import BaseTokenToKVPoolAllocator
from kvloom.allocator.batch import Batch, HostArrays
from kvloom.allocator.errors import (
    AllocatorError,
    BrokenInvariant,
    DoubleFree,
    ForeignPage,
    GroupMisuse,
    InvalidArgument,
)
from kvloom.allocator.memory import KVMemory
from kvloom.allocator.paged import PagedTokenToKVPoolAllocator
from kvloom.allocator.pages import PageLedger
from kvloom.allocator.per_token import TokenToKVPoolAllocator
from kvloom.allocator.pools import KVCache, MHATokenToKVPool
from kvloom.allocator.prefix import Match, NullPrefixCache, PrefixCache
from kvloom.allocator.reports import MemoryStatistics, PoolStatistics, Shortfall
from kvloom.allocator.spec import PoolSpec
from kvloom.allocator.table import RequestTable

__all__ = [
    "AllocatorError",
    "BaseTokenToKVPoolAllocator",
    "Batch",
    "BrokenInvariant",
    "DoubleFree",
    "ForeignPage",
    "GroupMisuse",
    "HostArrays",
    "InvalidArgument",
    "KVCache",
    "KVMemory",
    "MHATokenToKVPool",
    "Match",
    "MemoryStatistics",
    "NullPrefixCache",
    "PageLedger",
    "PagedTokenToKVPoolAllocator",
    "PoolSpec",
    "PoolStatistics",
    "PrefixCache",
    "RequestTable",
    "Shortfall",
    "TokenToKVPoolAllocator",
]
