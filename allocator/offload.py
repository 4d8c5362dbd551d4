"""KV of preempted rows on the host, so that they can go on where they were instead of being computed again."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from kvloom.allocator.errors import DoubleFree, InvalidArgument
from kvloom.allocator.host_prefixes import HostPrefixes
from kvloom.allocator.indices import whole
from kvloom.allocator.memory_pool import MemoryPool
from kvloom.allocator.pools import HostCopy
from kvloom.allocator.reports import HostStatistics


@dataclass(frozen=True, slots=True, eq=False)
class Offloaded:
    """The KV of one row: all of its first `tokens` tokens, in window pools what the next token reads."""

    tokens: int
    namespace: str
    copies: Mapping[str, HostCopy]
    nbytes: int


class HostTier:
    """At most `limit` bytes of host memory, pinned where there is a device; copies never make the host wait.

    bytes_out, bytes_in  moved to the host and back, since start
    prefixes             what is there of evicted prefixes, with a limit of its own
    """

    def __init__(self, pools: Mapping[str, MemoryPool], limit: int, prefixes: HostPrefixes) -> None:
        self.limit = whole("host_bytes", limit)
        if self.limit < 0:
            raise InvalidArgument(f"host_bytes={limit} must be at least 0")
        self.used = 0
        self.bytes_out = 0
        self.bytes_in = 0
        self.prefixes = prefixes
        self._pools = pools
        self._kept: set[Offloaded] = set()

    def save(self, row: int, tokens: int, namespace: str) -> Offloaded | None:
        """What a row has computed, on its way to the host; None when there is no room, or nothing worth keeping.

        The row's pages may be given on at once: what is launched later comes after the copy.
        """
        slots = {name: self._slots(pool, row, tokens) for name, pool in self._pools.items()}
        nbytes = sum(self._pools[name].spec.bytes_per_token * len(some) for name, some in slots.items())
        if not 0 < nbytes <= self.limit - self.used:
            return None
        copies = {name: self._pools[name].storage.get_cpu_copy(some) for name, some in slots.items()}
        self.used += nbytes
        self.bytes_out += nbytes
        kept = Offloaded(tokens, namespace, copies, nbytes)
        self._kept.add(kept)
        return kept

    def load(self, kept: Offloaded, row: int) -> None:
        """Into the pages that the row has by now."""
        for name, copy in kept.copies.items():
            pool = self._pools[name]
            pool.storage.load_cpu_copy(copy, self._slots(pool, row, kept.tokens))
        self.bytes_in += kept.nbytes

    def require(self, kept: Offloaded) -> None:
        """Raise DoubleFree unless this is here still."""
        if kept not in self._kept:
            raise DoubleFree(f"the KV of {kept.tokens} tokens was taken back, or forgotten, before")

    def drop(self, kept: Offloaded) -> None:
        """Nobody will ask for it any more.  Raises DoubleFree and changes nothing."""
        self.require(kept)
        self._kept.remove(kept)
        self.used -= kept.nbytes

    def statistics(self) -> HostStatistics:
        """An immutable report, of prefixes too."""
        prefixes = self.prefixes
        moved_out, moved_in = self.bytes_out + prefixes.bytes_out, self.bytes_in + prefixes.bytes_in
        return HostStatistics(self.limit, self.used, moved_out, moved_in, prefixes.limit, prefixes.used)

    def _slots(self, pool: MemoryPool, row: int, tokens: int) -> torch.Tensor:
        """Slots of the tokens that whoever goes on behind `tokens` tokens reads, whole pages of them at the front."""
        size = pool.rows.page_size
        first = int(pool.first_in_window(np.array([tokens], np.int32))[0])
        positions = np.arange(first * size, tokens)
        return torch.from_numpy(pool.table.pages[row, positions // size].astype(np.int64) * size + positions % size)
