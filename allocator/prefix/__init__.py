"""Prefix caches: what to keep of requests that are gone."""

from kvloom.allocator.prefix.base import Match, PrefixCache
from kvloom.allocator.prefix.null import NullPrefixCache

__all__ = ["Match", "NullPrefixCache", "PrefixCache"]
