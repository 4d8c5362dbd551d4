"""Memories to try things on, plans as far as memory reads them, and what a batch must be, computed slot by slot."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from kvloom.allocator import Batch, KVMemory, Match, PoolSpec
from kvloom.allocator.prefix import KeptPrefixCache
from tests.allocator.books import ints

NOTHING = Match(0, {})
IntArray = NDArray[np.int32]


@dataclass
class Step:
    """A plan, as far as memory reads it."""

    step: int
    rows: IntArray
    prefix_lens: IntArray
    q_lens: IntArray
    decode_rows: int
    token_ids: IntArray
    sample_rows: IntArray
    token_src: IntArray | None = None
    sampling: None = None
    request_ids: Sequence[str] = field(default_factory=list)

    @property
    def seq_lens(self) -> IntArray:
        return self.prefix_lens + self.q_lens


def make(
    pages: int = 8,
    page_size: int = 4,
    max_rows: int = 4,
    max_seq: int | None = None,
    pools: Sequence[PoolSpec] = (PoolSpec(),),
    prefix_cache: KeptPrefixCache | None = None,
) -> KVMemory:
    """As many pages in each pool."""
    return KVMemory(
        pools,
        capacity_tokens={pool.name: pages * page_size for pool in pools},
        page_size=page_size,
        max_rows=max_rows,
        max_seq=max_seq,
        needs=frozenset({"page_table"}),
        prefix_cache=prefix_cache,
    )


def admitted(memory: KVMemory, length: int) -> int:
    row = memory.admit(NOTHING, length)
    assert row is not None
    return row


def bound(
    memory: KVMemory, decode: dict[int, int] | None = None, prefill: dict[int, tuple[int, int]] | None = None
) -> Batch:
    """The batch of a step: rows with their length that take one token, then rows with start and stop of a chunk."""
    spans = [(row, length, length + 1) for row, length in (decode or {}).items()]
    spans += [(row, start, stop) for row, (start, stop) in (prefill or {}).items()]
    rows, start, stop = (ints(*column) for column in zip(*spans, strict=True))
    total = int((stop - start).sum())
    sampled = ints(*range(0, len(rows), 2))
    plan = Step(0, rows, start, stop - start, len(decode or {}), ints(*range(50, 50 + total)), sampled)
    plan.request_ids = [f"r{row}" for row in rows]
    batch = memory.bind(plan)
    compare(memory, spans, batch)
    return batch


def compare(memory: KVMemory, spans: list[tuple[int, int, int]], batch: Batch) -> None:
    """Every field against what the tables and the spans say, token by token."""
    tokens = [(row, position) for row, start, stop in spans for position in range(start, stop)]
    for pool in memory.specs:
        compare_pool(memory, pool, spans, tokens, batch)
    assert batch.positions.tolist() == [position for _, position in tokens]
    assert batch.row_slot.tolist() == [row for row, _, _ in spans]
    assert batch.prefix_lens.tolist() == [start for _, start, _ in spans]
    assert batch.q_lens.tolist() == [stop - start for _, start, stop in spans]
    assert batch.seq_lens.tolist() == [stop for _, _, stop in spans]
    ends = np.cumsum([stop - start for _, start, stop in spans]).tolist()
    assert batch.q_start.tolist() == [0, *ends]
    assert batch.logits_idx.tolist() == [ends[row] - 1 for row in batch.sample_rows.tolist()]
    assert batch.token_ids.tolist() == list(range(50, 50 + len(tokens)))
    assert batch.token_src.tolist() == [-1] * len(tokens)
    assert not batch.has_token_src
    assert (batch.rows, batch.tokens) == (len(spans), len(tokens))
    assert batch.max_q == max(stop - start for _, start, stop in spans)
    assert batch.max_seq == max(stop for _, _, stop in spans)
    assert batch.pad_slot == memory.max_rows
    assert list(batch.request_ids) == [f"r{row}" for row, _, _ in spans]
    for name in ("positions", "row_slot", "q_start", "logits_idx", "token_ids", "token_src", "seq_lens"):
        assert batch.tensor(name).dtype == torch.int32


def compare_pool(
    memory: KVMemory, pool: PoolSpec, spans: list[tuple[int, int, int]], tokens: list[tuple[int, int]], batch: Batch
) -> None:
    """Slots, and the part of the page table that attention reads: from the window of the first new token on."""
    size, lines = memory.page_size, memory.tables[pool.name].pages
    slots = [int(lines[row, position // size]) * size + position % size for row, position in tokens]
    assert min(slots) >= size, "the dump page"
    assert batch.out_loc[pool.name].dtype == torch.int64
    assert batch.out_loc[pool.name].tolist() == slots
    if not batch.page_table:
        return
    table = batch.page_table[pool.name]
    assert table.dtype == torch.int32
    for (row, start, stop), line in zip(spans, table.tolist(), strict=True):
        first = 0 if pool.window is None else max(start + 1 - pool.window, 0) // size
        places = slice(first, -(-stop // size))
        assert line[places] == lines[row, places].tolist()
        assert min(line[places]) > 0
