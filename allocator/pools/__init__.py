"""KV storage."""

from kvloom.allocator.pools.base import KVCache
from kvloom.allocator.pools.host_copy import HostCopy
from kvloom.allocator.pools.mha import MHATokenToKVPool
from kvloom.allocator.pools.mla import MLATokenToKVPool
from kvloom.allocator.pools.swa import SWAKVPool

__all__ = ["HostCopy", "KVCache", "MHATokenToKVPool", "MLATokenToKVPool", "SWAKVPool"]
