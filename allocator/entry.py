"""How a row comes to pages: from the prefix cache, from the host, and from what is free."""

from collections.abc import Mapping

import numpy as np
import torch

from kvloom.allocator.errors import BrokenInvariant, InvalidArgument
from kvloom.allocator.indices import whole
from kvloom.allocator.memory_pool import MemoryPool
from kvloom.allocator.offload import HostTier, Offloaded
from kvloom.allocator.prefix import Match
from kvloom.allocator.reports import Shortfall
from kvloom.allocator.reuse import PrefixReuse
from kvloom.allocator.ring import NO_PAGES
from kvloom.allocator.row_slots import RowArray, RowSlots
from kvloom.allocator.rows import Fork
from kvloom.allocator.step_binding import StepBinding


class RowEntry:
    """Lets rows in and grow, all or nothing: pages in every pool, or a shortage that has changed no row."""

    def __init__(
        self,
        pools: Mapping[str, MemoryPool],
        slots: RowSlots,
        reuse: PrefixReuse,
        host: HostTier,
        binding: StepBinding,
    ) -> None:
        self._pools = pools
        self._slots = slots
        self._reuse = reuse
        self._host = host
        self._binding = binding
        self.restored_tokens = 0  # since start
        self._first = next(iter(pools.values()))
        self._page_size = self._first.rows.page_size
        self._row_tokens_max = self._first.table.max_pages * self._page_size

    def admit(self, match: Match, length: int, spare: int, priority: int) -> int | None:
        """See `KVMemory.admit`."""
        length, spare = self._checked(length, match.tokens + match.host_tokens, spare)
        priority = whole("priority", priority)
        parts = self._host.prefixes.parts_of(match)
        self._reuse.lock(match)
        row = self._open(match, length, spare, "prefill")
        if row is None:
            self._reuse.unlock(match)
            return None
        self._reuse.enter(row, match, priority)
        for pool in self._pools.values():
            if pool.spec.window is None:
                self._fill(pool, row, length, "prefill")
        if parts:
            first = match.tokens // self._page_size
            stop = self._host.prefixes.load(parts, row, first)
            for name in self._pools:
                self._binding.changed(name, row, slice(first, stop))
        return row

    def restore(self, kept: Offloaded, length: int, spare: int) -> int | None:
        """See `KVMemory.restore`."""
        length, spare = self._checked(length, kept.tokens, spare)
        self._host.require(kept)
        nothing = Match(0, {}, kept.namespace)
        row = self._open(nothing, length, spare, "restore")
        if row is None:
            return None
        self._reuse.enter(row, nothing)
        for name, pool in self._pools.items():
            first = int(pool.first_in_window(np.array([kept.tokens], np.int32))[0])
            pool.table.begin_at(row, first, first * pool.rows.page_size)
            self._fill(pool, row, length if pool.spec.window is None else kept.tokens, "restore")
            self._binding.changed(name, row, slice(first, int(pool.table.page_counts[row])))
        self._host.load(kept, row)
        self._host.drop(kept)
        self.restored_tokens += kept.tokens
        return row

    def offload(self, row: int, length: int) -> Offloaded | None:
        """See `KVMemory.offload`."""
        row, length = whole("row", row), whole("length", length)
        self._slots.require_held(np.array([row], np.int32))
        self._require_prefix(row, length)
        return self._host.save(row, length, self._reuse.namespace(row))

    def fork(self, row: int, count: int, length: int) -> RowArray | Shortfall:
        """See `KVMemory.fork`."""
        row, count, length = whole("row", row), whole("count", count), whole("length", length)
        self._slots.require_held(np.array([row], np.int32))
        self._require_prefix(row, length)
        reused = int(self._first.table.reused[row]) * self._page_size
        if count < 1 or length < reused:
            raise InvalidArgument(f"{count} new rows from {length} tokens of row {row}; at least 1 from {reused}")
        if count > self._slots.free:
            return Shortfall("rows", count, self._slots.free, 0, self._slots.free)
        rows = np.array([self._slots.open() for _ in range(count)], np.int32)
        forks: list[tuple[MemoryPool, Fork]] = []
        for pool in self._pools.values():
            short = length % self._page_size > 0 and count > pool.free_pages
            if short:
                pool.allocator.ledger.count_shortage("decode")
                self._reuse.make_room([(pool, count)])
            fork = pool.rows.fork_into(row, rows, length, again=short)
            if isinstance(fork, Shortfall):
                for forked, _ in forks:
                    forked.rows.drop(rows, -1, "rollback")
                self._slots.close(rows, -1)
                return fork
            forks.append((pool, fork))
        self._reuse.fork(row, rows)
        for pool, fork in forks:
            if fork.tokens:
                pool.storage.copy_slots(*map(torch.from_numpy, fork.slots(self._page_size)))
        return rows

    def reserve(self, rows: RowArray, lengths: RowArray, op: str, spare: int) -> Shortfall | None:
        """See `KVMemory.reserve`."""
        before: list[tuple[MemoryPool, RowArray]] = []
        for pool in self._pools.values():
            if len(self._pools) > 1:
                before.append((pool, pool.table.lengths[self._slots.index_of_held(rows)]))
            shortfall = pool.rows.reserve(rows, lengths, op, spare)
            if shortfall is not None and self._reuse.give_up(pool, shortfall.need - shortfall.free):
                shortfall = pool.rows.reserve(rows, lengths, op, spare, again=True)
            if shortfall is not None:
                for grown, old in before[:-1]:
                    grown.rows.undo(rows, old)
                return shortfall
        return None

    def _require_prefix(self, row: int, length: int) -> None:
        """Raise InvalidArgument unless a row has all that a token behind `length` others reads."""
        for pool in self._pools.values():
            first = int(pool.first_in_window(np.array([length], np.int32))[0])
            if not 0 <= length <= pool.table.lengths[row] or first < pool.table.first[row]:
                raise InvalidArgument(
                    f"{length} tokens of row {row}: pool {pool.name!r} has {pool.table.lengths[row]} of it, from page "
                    f"{pool.table.first[row]} on"
                )

    def _checked(self, length: int, known: int, spare: int) -> tuple[int, int]:
        length, spare = whole("length", length), whole("spare", spare)
        if length < 0 or spare < 0 or not known <= length <= self._row_tokens_max:
            raise InvalidArgument(
                f"a row of {length} tokens, {known} of them with their KV, and {spare} pages to spare; a row has at "
                f"most {self._row_tokens_max} tokens"
            )
        return length, spare

    def _open(self, match: Match, length: int, spare: int, op: str) -> int | None:
        """A row, once there is room for it in every pool."""
        if not self._slots.free:
            return None
        wanted = [
            (pool, pool.entry_pages(length, match.pages.get(name, NO_PAGES)) + spare)
            for name, pool in self._pools.items()
        ]
        for pool, pages in wanted:
            if pages > pool.free_pages:
                pool.allocator.ledger.count_shortage(op)
        return self._slots.open() if self._reuse.make_room(wanted) else None

    def _fill(self, pool: MemoryPool, row: int, length: int, op: str) -> None:
        shortfall = pool.rows.reserve(np.array([row], np.int32), np.array([length], np.int32), op)
        if shortfall is not None:
            pool.allocator.ledger.count_violation("conservation")
            raise BrokenInvariant(f"pages that were free a moment ago are gone: {shortfall}")
