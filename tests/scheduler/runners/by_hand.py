"""Batches made by hand: what the engine's memory would make, from a shuffled heap of pages."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvloom.allocator import Batch, HostArrays
from kvloom.scheduler.plan import Sampling


@dataclass(frozen=True)
class Names:
    request_ids: Sequence[str]


@dataclass
class Row:
    slot: int
    length: int = 0  # tokens whose KV is valid
    pages: list[int] = field(default_factory=list)


class Pages:
    """Hands out pages 1 to `count` in a random order, and makes batches of rows that hold them.

    A row's pages have the same ids in all `pools`, shifted by one place from each pool to the next.
    """

    def __init__(self, count: int, page_size: int, seed: int = 0, pools: Sequence[str] = ("full",)) -> None:
        self.page_size = page_size
        self._count = count
        self._pools = pools
        self._free = (np.random.default_rng(seed).permutation(count) + 1).tolist()
        self._step = 0

    def batch(
        self,
        work: Sequence[tuple[Row, Sequence[int]]],
        decode_rows: int,
        sample_rows: Sequence[int],
        sampling: Sampling | None = None,
        device: str = "cpu",
    ) -> Batch:
        """One step that computes the given tokens of each row, and moves the rows on by as many."""
        self._step += 1
        prefix = np.array([row.length for row, _ in work], np.int32)
        q_lens = np.array([len(tokens) for _, tokens in work], np.int32)
        q_start = np.concatenate(([0], np.cumsum(q_lens))).astype(np.int32)
        out_loc: list[int] = []
        for row, tokens in work:
            for position in range(row.length, row.length + len(tokens)):
                if position % self.page_size == 0:
                    row.pages.append(self._free.pop())
                out_loc.append(row.pages[-1] * self.page_size + position % self.page_size)
            row.length += len(tokens)
        width = max(len(row.pages) for row, _ in work)
        table = np.array([row.pages + [0] * (width - len(row.pages)) for row, _ in work], np.int32)
        host = HostArrays(
            token_ids=np.concatenate([np.asarray(tokens, np.int32) for _, tokens in work]),
            token_src=np.full(len(out_loc), -1, np.int32),
            positions=np.concatenate(
                [np.arange(p, p + q, dtype=np.int32) for p, q in zip(prefix, q_lens, strict=True)]
            ),
            row_slot=np.array([row.slot for row, _ in work], np.int32),
            prefix_lens=prefix,
            q_lens=q_lens,
            seq_lens=prefix + q_lens,
            q_start=q_start,
            sample_rows=np.array(sample_rows, np.int32),
            logits_idx=q_start[np.array(sample_rows, np.intp) + 1] - 1,
        )
        return Batch(
            step=self._step,
            decode_rows=decode_rows,
            host=host,
            device=torch.device(device),
            pad_slot=len(work),
            out_loc=self._in_each_pool(np.array(out_loc, np.int64), self.page_size, device),
            page_table=self._in_each_pool(table, 1, device),
            sampling=sampling,
            names=Names([str(row.slot) for row, _ in work]),
        )

    def _in_each_pool(self, places: NDArray[Any], unit: int, device: str) -> dict[str, torch.Tensor]:
        """Pages, or slots (`unit` to a page), of the first pool, and what stands for them in the others; 0 is none."""
        moved = [(places - unit + shift * unit) % (self._count * unit) + unit for shift in range(len(self._pools))]
        return {
            pool: torch.from_numpy(np.where(places < unit, places, there).astype(places.dtype)).to(device)
            for pool, there in zip(self._pools, moved, strict=True)
        }


def decode_batch(row_slots: Sequence[int], sampling: Sampling | None = None, device: str = "cpu") -> Batch:
    """A step of rows that decode their first token, for who looks at nothing but rows and sampling."""
    rows = [Row(slot) for slot in row_slots]
    pages = Pages(len(rows), page_size=1)
    return pages.batch([(row, [0]) for row in rows], len(rows), range(len(rows)), sampling, device)
