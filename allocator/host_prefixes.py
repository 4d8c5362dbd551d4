"""KV of evicted prefixes on the host, so that who begins alike need not compute it again.

What the prefix cache gives up for want of room stays in its memory as ghosts; here each gets a body, the copy of its
pages.  A ghost that ends, because its tokens are cached again or because it is too old, ends its copy too.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvloom.allocator.errors import BrokenInvariant, InvalidArgument
from kvloom.allocator.indices import whole
from kvloom.allocator.memory_pool import MemoryPool
from kvloom.allocator.pools import HostCopy
from kvloom.allocator.ports import TokenArray
from kvloom.allocator.prefix import Cut, Evicted, Ghost, GhostCache, KeptPrefixCache, Match
from kvloom.allocator.ring import PageArray


@dataclass(frozen=True, slots=True, eq=False)
class EvictedKV:
    """The KV of a ghost's pages, as they were when it was cut off; it stays as it is when it is dropped.

    It counts in full until then, also where the first of its pages live again.
    """

    ghost: Ghost
    copies: Mapping[str, HostCopy]
    nbytes: int
    tier: "HostPrefixes"

    def gone(self) -> None:
        """The ghost is no more."""
        self.tier.drop(self)


class HostPrefixes:
    """At most `limit` bytes of host memory, 0: off; the oldest copies go first.  No copy is waited for.

    And no more pages than the cache remembers the tokens of (`ghost_pages`).  Until they are full for the first time,
    the memory for each copy has to be pinned: about a millisecond for 1 MiB.

    Only without window pools: in these a prefix goes page by page and not from its end, so that a copy would have to
    know which of its windows are whole.

    bytes_out, bytes_in  moved to the host and back, since start

    Raises InvalidArgument for a limit below 0; and, unless it is 0, for window pools and for a prefix cache that does
    not remember what it gave up.
    """

    def __init__(self, pools: Mapping[str, MemoryPool], cache: KeptPrefixCache, limit: int) -> None:
        self.limit = whole("host_prefix_bytes", limit)
        if self.limit < 0:
            raise InvalidArgument(f"host_prefix_bytes={limit} must be at least 0")
        windows = [name for name, pool in pools.items() if pool.spec.window is not None]
        if self.limit and windows:
            raise InvalidArgument(f"host_prefix_bytes={limit}, but of the windows of {windows} only parts are cached")
        self._ghosts = cache if isinstance(cache, GhostCache) else None
        if self.limit and self._ghosts is None:
            raise InvalidArgument(f"host_prefix_bytes={limit}, but {type(cache).__name__} has no ghosts to keep KV of")
        self.used = 0
        self.bytes_out = 0
        self.bytes_in = 0
        self._pools = pools
        self._page_size = next(iter(pools.values())).rows.page_size
        self._page_bytes = sum(pool.geometry.page_bytes for pool in pools.values())
        self._by_age: OrderedDict[EvictedKV, None] = OrderedDict()

    def match(self, tokens: TokenArray, match: Match) -> Match:
        """`match` with what is here of `tokens` behind it.  Whoever has it keeps that alive.  Mutates nothing."""
        if self._ghosts is None or not self.used:
            return match
        parts = self._ghosts.parts_behind(tokens, match)
        return match._replace(host_tokens=sum(part.pages for part in parts) * self._page_size, parts=parts)

    def save(self, evicted: Evicted) -> None:
        """What the cache has just given up, `evicted`, on its way to the host; its pages may be given on after this.

        The newest of it that there is room for at all, instead of what is oldest here.
        """
        if self._ghosts is None or not self.limit or not self._page_bytes:
            return
        for cut, nbytes in self._worth_it(self._ghosts.cuts(evicted)):
            while self.used + nbytes > self.limit:
                self.drop(next(iter(self._by_age)))
            copies = {
                name: pool.storage.get_cpu_copy(self._slots(cut.pages[name])) for name, pool in self._pools.items()
            }
            body = cut.ghost.body = EvictedKV(cut.ghost, copies, nbytes, self)
            self._by_age[body] = None
            self.used += nbytes
            self.bytes_out += nbytes

    def parts_of(self, match: Match) -> list[tuple[EvictedKV, int, int]]:
        """The parts of a match: copy, its first page and the pages that count.  Raises InvalidArgument."""
        parts = [(part.body, part.first, part.pages) for part in match.parts if isinstance(part.body, EvictedKV)]
        pages = sum(count for _, _, count in parts)
        if len(parts) < len(match.parts) or pages * self._page_size != match.host_tokens:
            raise InvalidArgument(f"a match of {match.host_tokens} tokens on the host has {pages} pages from here")
        return parts

    def load(self, parts: Sequence[tuple[EvictedKV, int, int]], row: int, place: int) -> int:
        """Into the pages that a row has from `place` on; returns the place behind."""
        size = self._page_size
        for body, first, pages in parts:
            for name, pool in self._pools.items():
                slots = self._slots(pool.table.pages[row, place : place + pages])
                pool.storage.load_cpu_copy(body.copies[name].part(first * size, pages * size), slots)
            self.bytes_in += pages * self._page_bytes
            place += pages
        return place

    def drop(self, body: EvictedKV) -> None:
        """Its ghost has none any more."""
        del self._by_age[body]
        body.ghost.body = None
        self.used -= body.nbytes

    def check(self) -> None:
        """Raise BrokenInvariant unless what is used is what is here, each the body of its ghost, within the limit."""
        there = sum(body.nbytes for body in self._by_age)
        if there != self.used or self.used > self.limit or any(body.ghost.body is not body for body in self._by_age):
            raise BrokenInvariant(f"{there} bytes of evicted KV are there; {self.used} of {self.limit} are counted")

    def _worth_it(self, cuts: Sequence[Cut]) -> Iterator[tuple[Cut, int]]:
        """With the bytes of each, oldest first: those that would not be dropped for the others at once."""
        room, chosen = self.limit, []
        for cut in reversed(cuts):
            nbytes = len(next(iter(cut.pages.values()))) * self._page_bytes
            if nbytes <= room:
                room -= nbytes
                chosen.append((cut, nbytes))
        return reversed(chosen)

    def _slots(self, pages: PageArray) -> torch.Tensor:
        """All slots of these pages, int64."""
        size = self._page_size
        return torch.from_numpy((pages.astype(np.int64)[:, None] * size + np.arange(size)).reshape(-1))
