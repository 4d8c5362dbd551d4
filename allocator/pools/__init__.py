"""KV storage."""

from kvloom.allocator.pools.base import KVCache
from kvloom.allocator.pools.mha import MHATokenToKVPool

__all__ = ["KVCache", "MHATokenToKVPool"]
