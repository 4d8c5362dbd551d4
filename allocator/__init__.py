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
from kvloom.allocator.extend_step import ExtendStep
from kvloom.allocator.memory import KVMemory
from kvloom.allocator.paged import PagedTokenToKVPoolAllocator
from kvloom.allocator.paged_rows import PagedRows
from kvloom.allocator.pages import PageLedger
from kvloom.allocator.per_token import TokenToKVPoolAllocator
from kvloom.allocator.pools import HostCopy, KVCache, MHATokenToKVPool, MLATokenToKVPool, SWAKVPool
from kvloom.allocator.prefix import (
    EvictionPolicy,
    Inserted,
    KeptPrefixCache,
    Match,
    NodeView,
    NullPrefixCache,
    PrefixCache,
    PrefixStatistics,
    RadixPrefixCache,
)
from kvloom.allocator.reports import (
    HostStatistics,
    MemoryStatistics,
    PageTimes,
    PoolGeometry,
    PoolStatistics,
    Shortfall,
)
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
    "EvictionPolicy",
    "ExtendStep",
    "ForeignPage",
    "GroupMisuse",
    "HostArrays",
    "HostCopy",
    "HostStatistics",
    "Inserted",
    "InvalidArgument",
    "KVCache",
    "KVMemory",
    "KeptPrefixCache",
    "MHATokenToKVPool",
    "MLATokenToKVPool",
    "Match",
    "MemoryStatistics",
    "NodeView",
    "NullPrefixCache",
    "PageLedger",
    "PageTimes",
    "PagedRows",
    "PagedTokenToKVPoolAllocator",
    "PoolGeometry",
    "PoolSpec",
    "PoolStatistics",
    "PrefixCache",
    "PrefixStatistics",
    "RadixPrefixCache",
    "RecordingAllocator",
    "RequestTable",
    "SWAKVPool",
    "SWATokenToKVPoolAllocator",
    "Shortfall",
    "StaleState",
    "TokenToKVPoolAllocator",
    "replay",
]
