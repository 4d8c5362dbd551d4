"""kvloom.allocator: who owns which page of KV memory, and where its bytes lie."""

from kvloom.allocator.ascend import AscendPagedTokenToKVPoolAllocator
from kvloom.allocator.base import BaseTokenToKVPoolAllocator
from kvloom.allocator.batch import Batch, HostArrays
from kvloom.allocator.decode_step import DecodeStep
from kvloom.allocator.errors import (
    AllocatorError,
    BrokenInvariant,
    DoubleFree,
    ForeignPage,
    GroupMisuse,
    InvalidArgument,
    StaleState,
)
from kvloom.allocator.memory import KVMemory
from kvloom.allocator.paged import PagedTokenToKVPoolAllocator
from kvloom.allocator.paged_rows import PagedRows
from kvloom.allocator.pages import PageLedger
from kvloom.allocator.per_token import TokenToKVPoolAllocator
from kvloom.allocator.pools import HostCopy, KVCache, MHATokenToKVPool, MLATokenToKVPool, SWAKVPool
from kvloom.allocator.prefix import Match, NullPrefixCache, PrefixCache
from kvloom.allocator.reports import MemoryStatistics, PoolStatistics, Shortfall
from kvloom.allocator.snapshots import AllocatorState
from kvloom.allocator.spec import PoolSpec
from kvloom.allocator.swa import SWATokenToKVPoolAllocator
from kvloom.allocator.table import RequestTable
from kvloom.allocator.wrappers import CheckedAllocator, RecordingAllocator, replay

__all__ = [
    "AllocatorError",
    "AllocatorState",
    "AscendPagedTokenToKVPoolAllocator",
    "BaseTokenToKVPoolAllocator",
    "Batch",
    "BrokenInvariant",
    "CheckedAllocator",
    "DecodeStep",
    "DoubleFree",
    "ForeignPage",
    "GroupMisuse",
    "HostArrays",
    "HostCopy",
    "InvalidArgument",
    "KVCache",
    "KVMemory",
    "MHATokenToKVPool",
    "MLATokenToKVPool",
    "Match",
    "MemoryStatistics",
    "NullPrefixCache",
    "PageLedger",
    "PagedRows",
    "PagedTokenToKVPoolAllocator",
    "PoolSpec",
    "PoolStatistics",
    "PrefixCache",
    "RecordingAllocator",
    "RequestTable",
    "SWAKVPool",
    "SWATokenToKVPoolAllocator",
    "Shortfall",
    "StaleState",
    "TokenToKVPoolAllocator",
    "replay",
]
