"""KVMemory: everything about KV memory, as one object to the loop.

The scheduler deals in rows and token counts; which pages back them, where their KV lies and which slots a step writes
is decided here.  Only host numbers change while a step is planned; `bind` turns a plan into one upload, at most two
launches and a `Batch`.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from kvloom.allocator.batch import Batch, HostArrays
from kvloom.allocator.binding import binding_for
from kvloom.allocator.devices import device_of
from kvloom.allocator.errors import BrokenInvariant, InvalidArgument
from kvloom.allocator.indices import constant, counting, int32s, spans, starts, whole
from kvloom.allocator.paged import PagedTokenToKVPoolAllocator
from kvloom.allocator.pools import KVCache, MHATokenToKVPool
from kvloom.allocator.ports import HasSpec, RunnerNeeds, StepPlan, TokenArray
from kvloom.allocator.prefix import Match, NullPrefixCache, PrefixCache
from kvloom.allocator.reports import MemoryStatistics, Shortfall
from kvloom.allocator.rows import RowAllocator
from kvloom.allocator.spec import PoolSpec
from kvloom.allocator.table import RequestTable, RowArray

MAX_ROWS = 1024


class KVMemory:
    """Pools, allocators, request table and prefix cache of one engine.

    capacity_tokens  slots of each pool, rounded down to whole pages
    page_size        slots in a page, from 1 up
    max_rows         sequences that can hold memory at once, those waiting behind a fence included
    max_seq          longest sequence in tokens
    needs            optional batch fields to build: "page_table"

    One thread (the loop's) uses it.  Raises InvalidArgument when the numbers make no sense.
    """

    def __init__(
        self,
        pools: Sequence[PoolSpec] = (PoolSpec(),),
        *,
        capacity_tokens: int,
        page_size: int = 16,
        max_rows: int = MAX_ROWS,
        max_seq: int | None = None,
        device: torch.device | str = "cpu",
        needs: frozenset[str] = frozenset(),
        prefix_cache: PrefixCache | None = None,
    ) -> None:
        if len(pools) != 1 or pools[0].window is not None:
            windows = [spec.window for spec in pools]
            raise InvalidArgument(
                f"{len(pools)} pools of windows {windows}; a memory has one, without a window, for now"
            )
        capacity_tokens, page_size = whole("capacity_tokens", capacity_tokens), whole("page_size", page_size)
        max_rows = whole("max_rows", max_rows)
        if not 0 < page_size <= capacity_tokens:
            raise InvalidArgument(
                f"capacity_tokens={capacity_tokens} must hold a page of page_size={page_size} from 1 up"
            )
        self.device = device_of(device)
        self.page_size = page_size
        self.pool = pools[0]
        self.pools: Mapping[str, KVCache] = {
            spec.name: MHATokenToKVPool(
                capacity_tokens // page_size * page_size,
                page_size, spec.dtype, spec.kv_heads, spec.head_dim, len(spec.layers), self.device, layers=spec.layers,
            )
            for spec in pools
        }  # fmt: skip
        storage = self.pools[self.pool.name]
        self.allocator = PagedTokenToKVPoolAllocator(
            storage.size, page_size, self.pool.dtype, self.device, storage, pool=self.pool.name
        )
        self.capacity_tokens = self.allocator.num_pages * page_size
        # Tokens of the longest sequence that it can hold.
        self.max_seq = self.capacity_tokens if max_seq is None else min(self.capacity_tokens, max_seq)
        self.table = RequestTable(max_rows, -(-self.max_seq // page_size), self.device)
        self._rows = RowAllocator(self.allocator.ledger, self.table)
        self._binding = binding_for(self.table, page_size, self.device)
        self._prefix_cache = prefix_cache or NullPrefixCache()
        self._needs = needs
        self._claimed = False

    @classmethod
    def for_runner(
        cls,
        runner: HasSpec,
        *,
        capacity_tokens: int,
        page_size: int = 16,
        max_rows: int = MAX_ROWS,
        prefix_cache: PrefixCache | None = None,
    ) -> "KVMemory":
        """Memory with the pools, device and batch fields that `runner.spec` asks for."""
        spec = runner.spec
        return cls(
            spec.pools,
            capacity_tokens=capacity_tokens,
            page_size=page_size,
            max_rows=max_rows,
            max_seq=spec.max_seq,
            device=spec.device,
            needs=spec.needs,
            prefix_cache=prefix_cache,
        )

    @property
    def max_rows(self) -> int:
        """Rows of the request table."""
        return self.table.max_rows

    @property
    def next_step(self) -> int:
        """The number from which on steps are new here: fences of whoever used this memory before are below it."""
        return self.allocator.ledger.settled_step + 1

    def require(self, spec: RunnerNeeds) -> None:
        """Raise InvalidArgument unless a runner of this `spec` can work with this memory."""
        if spec.pools != (self.pool,):
            raise InvalidArgument(f"the runner wants the pools {spec.pools}; this memory has {(self.pool,)}")
        if device_of(spec.device) != self.device:
            raise InvalidArgument(f"the runner is on {spec.device}; this memory is on {self.device}")
        if not spec.needs <= self._needs:
            missing = sorted(spec.needs - self._needs)
            raise InvalidArgument(f"the runner needs {missing}, which this memory was not made to build")

    def claim(self) -> None:
        """Belong to one engine from here on.  Raises InvalidArgument when another has it."""
        if self._claimed:
            raise InvalidArgument("this memory belongs to another engine, not left yet or with a step still out")
        self._claimed = True

    def unclaim(self) -> None:
        """Be free for the next engine."""
        self._claimed = False

    def match(self, tokens: TokenArray, namespace: str = "") -> Match:
        """The longest cached prefix of `tokens` (int32), in whole pages.  Mutates nothing."""
        return self._prefix_cache.match(tokens, namespace)

    def admit(self, match: Match, length: int, spare: int = 0) -> int | None:
        """A new row with pages for `length` tokens, if `spare` pages stay free; None, nothing changed, when not now.

        Raises InvalidArgument when never, and changes nothing.
        """
        if match.tokens:
            raise InvalidArgument("this memory cannot reuse a cached prefix yet")
        length, spare = whole("length", length), whole("spare", spare)
        pages = self._rows.pages_for(length)
        if length < 0 or spare < 0 or pages > self.table.max_pages:
            raise InvalidArgument(
                f"a row of {length} tokens with {spare} pages to spare; a row has at most {self.table.max_pages} pages"
            )
        if pages + spare > self.allocator.ledger.free_pages:
            return None
        row = self.table.open()
        if row is None:
            return None
        shortfall = self._rows.reserve(np.array([row], np.int32), np.array([length], np.int32))
        if shortfall is not None:
            raise BrokenInvariant(f"pages that were free a moment ago are gone: {shortfall}")
        return row

    def reserve(self, rows: RowArray, lengths: RowArray) -> Shortfall | None:
        """Let each of the distinct `rows` hold at least `lengths[i]` tokens (int32).  None: done.

        When short nothing has changed.  Raises InvalidArgument or DoubleFree and changes nothing.
        """
        rows, lengths = int32s("rows", rows), int32s("lengths", lengths)
        return self._rows.reserve(rows, lengths, self._prefix_cache.evictable_pages)

    def publish(self, rows: RowArray, lengths: RowArray) -> None:
        """The first `lengths[i]` tokens of each row are settled: their whole pages may enter the prefix cache."""

    def trim(self, rows: RowArray, lengths: RowArray) -> None:
        """Settled lengths have moved on: pages left of a window may go.  Without window pools there are none."""

    def release(self, rows: Sequence[int], fences: Sequence[int], reason: str = "finish") -> None:
        """One free group: rows and their pages come back, usable again once step `fences[i]` is settled (-1: now).

        Raises DoubleFree or InvalidArgument and changes nothing.
        """
        self._rows.release(int32s("rows", rows), fences, reason)

    def settle(self, step: int) -> None:
        """Step `step` is over: what waited for it is free."""
        self.allocator.ledger.settle(step)
        self.table.settle(step)

    def bind(self, plan: StepPlan) -> Batch:
        """The batch of a plan: picks slots, writes the device's page table; one upload, at most two launches.

        Raises InvalidArgument, with nothing sent, when the plan goes beyond what its rows have reserved.
        """
        reserved = self.table.lengths[plan.rows]
        if np.count_nonzero(plan.seq_lens > reserved):
            i = int(np.argmax(plan.seq_lens > reserved))
            raise InvalidArgument(
                f"step {plan.step} writes row {plan.rows[i]} up to token {plan.seq_lens[i]}; {reserved[i]} are reserved"
            )
        host = self._host_arrays(plan)
        out, sent = self._binding.slots(host, plan.decode_rows)
        batch = Batch(
            step=plan.step,
            decode_rows=plan.decode_rows,
            host=host,
            device=self.device,
            pad_slot=self.table.pad_row,
            out_loc={self.pool.name: out},
            has_token_src=plan.token_src is not None,
            sampling=plan.sampling,
            names=plan,
            tensors=sent,
        )
        if "page_table" in self._needs:
            width = self._rows.pages_for(batch.max_seq)
            batch.page_table = {self.pool.name: self._binding.page_table(host.row_slot, sent, width)}
        return batch

    def statistics(self) -> MemoryStatistics:
        """An immutable report of all pools and rows."""
        pool = self.allocator.statistics()._replace(slack_tokens=self.table.slack_tokens(self.page_size))
        return MemoryStatistics(
            pools={pool.pool: pool},
            rows_capacity=self.table.max_rows,
            rows_held=self.table.held_rows,
            rows_quarantined=self.table.quarantined_rows,
            evicted={},
        )

    def __str__(self) -> str:
        """Who holds what."""
        return str(self.statistics())

    def holders(self) -> dict[int, int]:
        """How many pages each row in use holds, shared ones counted for each."""
        rows = np.flatnonzero(self.table.page_counts)
        return dict(zip(rows.tolist(), self.table.page_counts[rows].tolist(), strict=True))

    def check(self) -> None:
        """Raise BrokenInvariant unless the books balance: one state per page, each held page in its row's line."""
        self._rows.check()
        ledger = self.allocator.ledger
        if ledger.held_pages != ledger.pages_of_rows():
            raise BrokenInvariant(f"pool {ledger.pool!r}: somebody else has taken pages: {self}")

    def _host_arrays(self, plan: StepPlan) -> HostArrays:
        tokens = len(plan.token_ids)
        if plan.decode_rows == len(plan.rows):  # one token each
            q_start, positions, logits_idx = counting(tokens + 1), plan.prefix_lens, plan.sample_rows
        else:
            q_start = starts(plan.q_lens)
            positions = spans(plan.prefix_lens, plan.q_lens).astype(np.int32)
            logits_idx = q_start[plan.sample_rows + 1] - 1
        return HostArrays(
            token_ids=plan.token_ids,
            token_src=constant(tokens, -1) if plan.token_src is None else plan.token_src,
            positions=positions,
            row_slot=plan.rows,
            prefix_lens=plan.prefix_lens,
            q_lens=plan.q_lens,
            seq_lens=plan.seq_lens,
            q_start=q_start,
            sample_rows=plan.sample_rows,
            logits_idx=logits_idx,
        )
