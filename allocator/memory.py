"""KVMemory: everything about KV memory, as one object to the loop.

The scheduler deals in rows and token counts; which pages back them, where their KV lies and which slots a step writes
is decided here.  Only host numbers change while a step is planned; `bind` turns a plan into one upload, at most two
launches for each pool and a `Batch`.
"""

from collections.abc import Mapping, Sequence
from typing import Self

import torch

from kvloom.allocator.batch import Batch
from kvloom.allocator.batch_maker import BatchMaker
from kvloom.allocator.claim import Claim, require_fit
from kvloom.allocator.devices import device_of
from kvloom.allocator.entry import RowEntry
from kvloom.allocator.errors import InvalidArgument
from kvloom.allocator.host_prefixes import HostPrefixes
from kvloom.allocator.indices import Ints, int32s, whole
from kvloom.allocator.memory_pool import MemoryPool, counting_violations, violations
from kvloom.allocator.offload import HostTier, Offloaded
from kvloom.allocator.pools import KVCache
from kvloom.allocator.ports import HasSpec, RunnerNeeds, StepPlan, TokenArray
from kvloom.allocator.prefix import KeptPrefixCache, Match, RadixPrefixCache
from kvloom.allocator.reports import MemoryStatistics, Shortfall
from kvloom.allocator.reuse import PrefixReuse, TokensOf
from kvloom.allocator.row_slots import RowArray, RowSlots
from kvloom.allocator.sizing import longest_row, pool_tokens, runner_tokens
from kvloom.allocator.spec import PoolSpec
from kvloom.allocator.step_binding import step_binding_for

MAX_ROWS = 1024
WATERMARKS = (0.01, 0.03)


class KVMemory:
    """Pools, allocators, request table and prefix cache of one engine.

    capacity_tokens  slots of each pool by name; or one number: slots of the largest pool, and in window pools what the
                     same requests need there if they are of `lengths`
    page_size        slots in a page, from 1 up
    max_rows         sequences that can hold memory at once, those waiting behind a fence included
    max_seq          longest sequence in tokens
    needs            optional batch fields to build: "page_table"
    prefix_cache     None: a RadixPrefixCache of its own
    lengths          tokens of typical requests, at their end
    host_bytes       host memory for the KV of preempted rows; 0: they are computed again
    host_prefix_bytes  and for what the prefix cache gives up; not with window pools, of which it has only parts
    watermarks       where less than the first share of a pool is free, the prefix cache gives up pages until the second
                     is; 0 to 1 both

    One thread (the loop's) uses it.  Raises InvalidArgument when the numbers make no sense.
    """

    def __init__(
        self,
        pools: Sequence[PoolSpec] = (PoolSpec(),),
        *,
        capacity_tokens: int | Mapping[str, int],
        page_size: int = 16,
        max_rows: int = MAX_ROWS,
        max_seq: int | None = None,
        device: torch.device | str = "cpu",
        needs: frozenset[str] = frozenset(),
        prefix_cache: KeptPrefixCache | None = None,
        lengths: Sequence[int] = (),
        host_bytes: int = 0,
        host_prefix_bytes: int = 0,
        watermarks: tuple[float, float] = WATERMARKS,
    ) -> None:
        page_size = whole("page_size", page_size)
        if page_size < 1:
            raise InvalidArgument(f"page_size={page_size} must be at least 1")
        self.device = device_of(device)
        self.page_size = page_size
        self.specs = tuple(pools)
        self.prefix_cache = cache = RadixPrefixCache() if prefix_cache is None else prefix_cache
        tokens = pool_tokens(self.specs, page_size, capacity_tokens, max_seq, lengths)
        self.max_seq = longest_row(self.specs, tokens, max_seq, cache.pin_budget_pages * page_size)  # in tokens
        self._slots = slots = RowSlots(max_rows)
        width = -(-self.max_seq // page_size)
        self._pools = {
            spec.name: MemoryPool.make(
                spec, tokens[spec.name], page_size, slots, width, self.device, cache.pin_budget_pages
            )
            for spec in pools
        }
        self.pools: dict[str, KVCache] = {name: pool.storage for name, pool in self._pools.items()}
        self.allocators = {name: pool.allocator for name, pool in self._pools.items()}
        self.tables = {name: pool.table for name, pool in self._pools.items()}
        self._first = self._pools[pools[0].name]
        self.max_rows = slots.max_rows
        self._windows = [pool for pool in self._pools.values() if pool.spec.window is not None]
        # Pages leave while their row runs: a prompt should be published before it is trimmed.
        self.windowed = bool(self._windows)
        self._binding = step_binding_for(self.tables, page_size, self.device)
        self._host = HostTier(self._pools, host_bytes, HostPrefixes(self._pools, cache, host_prefix_bytes))
        self._reuse = PrefixReuse(cache, self._pools, page_size, self._binding, watermarks, self._host.prefixes)
        self._entry = RowEntry(self._pools, slots, self._reuse, self._host, self._binding)
        self._needs = needs
        self._batches = BatchMaker(self.tables, self._binding, self.device, page_size, needs)
        self._claim = Claim()
        self._bound_step = -1  # the last step that may name a page which was a row's when it was bound

    @classmethod
    def for_runner(
        cls,
        runner: HasSpec,
        *,
        capacity_tokens: int | Mapping[str, int] | None = None,
        memory_bytes: int | None = None,
        memory_fraction: float | None = None,
        page_size: int = 16,
        max_rows: int = MAX_ROWS,
        prefix_cache: KeptPrefixCache | None = None,
        lengths: Sequence[int] = (),
        host_bytes: int = 0,
        host_prefix_bytes: int = 0,
        watermarks: tuple[float, float] = WATERMARKS,
    ) -> Self:
        """Memory with the pools, device and batch fields that `runner.spec` asks for.

        Its size is one of: `capacity_tokens`; `memory_bytes` of KV in all; `memory_fraction` (above 0, to 1) of what is
        free on the device now.  Of bytes, the pools get what lets the most requests of `lengths` in at once.
        Raises InvalidArgument when it is none or several of these, or too little.
        """
        spec = runner.spec
        tokens = runner_tokens(spec, page_size, capacity_tokens, memory_bytes, memory_fraction, lengths)
        return cls(
            spec.pools,
            capacity_tokens=tokens,
            page_size=page_size,
            max_rows=max_rows,
            max_seq=spec.max_seq,
            device=spec.device,
            needs=spec.needs,
            prefix_cache=prefix_cache,
            lengths=lengths,
            host_bytes=host_bytes,
            host_prefix_bytes=host_prefix_bytes,
            watermarks=watermarks,
        )

    @property
    def next_step(self) -> int:
        """The number from which on steps are new here: fences of whoever used this memory before are below it."""
        return self._first.allocator.ledger.settled_step + 1

    def require(self, spec: RunnerNeeds) -> None:
        """Raise InvalidArgument unless a runner of this `spec` can work with this memory."""
        require_fit(spec, self.specs, self.device, self._needs)

    def claim(self, runner: object) -> None:
        """Belong to one engine from here on; what another runner has computed is of no use to this one, and goes.

        Raises InvalidArgument when another engine has it.
        """
        if self._claim.take(runner):
            self._reuse.reset()

    def unclaim(self) -> None:
        """Be free for the next engine."""
        self._claim.give_back()

    def match(self, tokens: Ints, namespace: str = "") -> Match:
        """The longest cached prefix of `tokens`, in whole pages, less than all of them.  Mutates nothing."""
        return self._reuse.match(int32s("tokens", tokens), namespace)

    def admit(self, match: Match, length: int, spare: int = 0, priority: int = 0) -> int | None:
        """A new row for `length` tokens that begins with those of `match`, if `spare` pages stay free in each pool.

        It has pages for all its tokens; in a window pool only those of the match, and `reserve` gets the others as the
        row goes on.  Pages that only the prefix cache has are given up if that is enough.  None, and nothing but the
        order of eviction changed, when not now.  Raises InvalidArgument when never, or for a match that is gone.
        """
        return self._entry.admit(match, length, spare, priority)

    def fork(self, row: int, count: int, length: int) -> RowArray | Shortfall:
        """`count` new rows (int32) with the first `length` tokens of a row, which are settled.

        Whole pages are shared, and a partly filled last one is copied.
        When short of rows or pages nothing has changed.  Raises DoubleFree or InvalidArgument and changes nothing.
        """
        return self._entry.fork(row, count, length)

    def offload(self, row: int, length: int) -> Offloaded | None:
        """The KV of the first `length` tokens of a row, which no step in flight names, on its way to the host.

        The row may be released at once.  None when the host has no room.  Raises DoubleFree or InvalidArgument.
        """
        return self._entry.offload(row, length)

    def restore(self, kept: Offloaded, length: int, spare: int = 0) -> int | None:
        """A new row for `length` tokens with the KV that was offloaded, under the terms of `admit`.

        `kept` is used up when this succeeds.
        """
        return self._entry.restore(kept, length, spare)

    def forget(self, kept: Offloaded) -> None:
        """Nobody comes back for it."""
        self._host.drop(kept)

    def reserve(self, rows: RowArray, lengths: RowArray, op: str = "decode", spare: int = 0) -> Shortfall | None:
        """Let each of the distinct `rows` hold at least `lengths[i]` tokens (int32) in every pool.  None: done.

        Pages that only the prefix cache has are given up for it, whether that is enough or not.  When short, no row
        has changed.  `op`, prefill or decode, is what they are counted for.  Where any are taken, `spare` stay free.
        Raises InvalidArgument or DoubleFree and changes nothing.
        """
        return self._entry.reserve(int32s("rows", rows), int32s("lengths", lengths), op, spare)

    def publish(self, rows: RowArray, lengths: RowArray, tokens_of: TokensOf) -> None:
        """The first `lengths[i]` tokens of each row are settled: their whole pages enter the prefix cache.

        `tokens_of(row, start, stop)` says what they are, int32; it is asked for pages that are new there.
        Raises DoubleFree or InvalidArgument and changes nothing.
        """
        rows, lengths = int32s("rows", rows), int32s("lengths", lengths)
        self._slots.require_held(rows)
        if len(lengths) != len(rows) or any((lengths > table.lengths[rows]).any() for table in self.tables.values()):
            raise InvalidArgument(f"rows {rows[:8].tolist()} have not reserved {lengths[:8].tolist()} tokens")
        self._reuse.publish(rows, lengths, tokens_of, self._bound_step)

    def trim(self, rows: RowArray, lengths: RowArray, tokens_of: TokensOf) -> None:
        """Settled lengths are `lengths` now: pages left of a window are given back, in one free group for each pool.

        Where there are window pools only, what goes is published before, for there is no other page to hang it on.
        """
        for pool in self._windows:
            self._reuse.trim(pool, rows, lengths, tokens_of, self._bound_step)

    def release(self, rows: Sequence[int], fences: Sequence[int], reason: str = "finish") -> None:
        """One free group: rows and their pages come back, usable again once step `fences[i]` is settled (-1: now).

        `reason` "error": the cache forgets what they had there, as far as nobody uses it or goes on from it.
        Raises DoubleFree or InvalidArgument and changes nothing.
        """
        leaving, failed = int32s("rows", rows), reason == "error"
        for fence, some in self._slots.by_fence(leaving, fences):
            self._reuse.drop_users(leaving[some], fence, forget=failed)
            for pool in self._pools.values():
                pool.rows.drop(leaving[some], fence, "abort" if failed else reason)
            self._slots.close(leaving[some], fence)

    def settle(self, step: int) -> None:
        """Step `step` is over: what waited for it is free."""
        for pool in self._pools.values():
            pool.allocator.ledger.settle(step)
        self._slots.settle(step)
        self._reuse.settle(step)

    def tick(self, now: float) -> None:
        """It is `now`, in seconds: what the prefix cache has kept long enough goes, and so that some pages are free."""
        self._reuse.tick(now)

    def looked_up(self, tokens: TokenArray, match: Match) -> None:
        """Count the first look-up of a request."""
        self._reuse.cache.regret(tokens, match.namespace, match.tokens, match.host_tokens)

    def reset_prefix_cache(self) -> None:
        """Give up all cached pages that nobody uses."""
        self._reuse.reset()

    def bind(self, plan: StepPlan) -> Batch:
        """The batch of a plan: picks slots, writes the device's page tables; one upload, two launches a pool at most.

        Raises InvalidArgument, with nothing sent, when the plan goes beyond what its rows have reserved.
        """
        batch = self._batches.make(plan)
        self._bound_step = max(self._bound_step, plan.step)
        return batch

    def statistics(self) -> MemoryStatistics:
        """An immutable report of all pools and rows."""
        return MemoryStatistics(
            pools={name: pool.statistics(self.prefix_cache.evictable(name)) for name, pool in self._pools.items()},
            rows_capacity=self.max_rows,
            rows_held=self._slots.held,
            rows_quarantined=self._slots.quarantined,
            prefix=self.prefix_cache.statistics(),
            host=self._host.statistics(),
            eviction_seconds=self._reuse.eviction_seconds(),
            geometry={name: pool.geometry for name, pool in self._pools.items()},
            restored_tokens=self._entry.restored_tokens,
            violations=violations(self._pools.values()),
        )

    def __str__(self) -> str:
        """Who holds what."""
        return str(self.statistics())

    def check(self) -> None:
        """Raise BrokenInvariant unless the books balance: one state per page, each held page in its row's line."""
        with counting_violations(self._first):
            for pool in self._pools.values():
                pool.check()
            self._reuse.check()
