"""From a plan to a batch: numbers of the plan, slots from the tables."""

from collections.abc import Mapping

import numpy as np
import torch

from kvloom.allocator.batch import Batch, HostArrays
from kvloom.allocator.errors import InvalidArgument
from kvloom.allocator.indices import constant, counting, spans, starts
from kvloom.allocator.ports import StepPlan
from kvloom.allocator.step_binding import StepBinding
from kvloom.allocator.table import RequestTable, RowArray


class BatchMaker:
    """Makes the batches of one memory; `needs` are the optional fields to build."""

    def __init__(
        self,
        tables: Mapping[str, RequestTable],
        binding: StepBinding,
        device: torch.device,
        page_size: int,
        needs: frozenset[str],
    ) -> None:
        self._tables = tables
        self._binding = binding
        self._device = device
        self._page_size = page_size
        self._needs = needs
        first = next(iter(tables.values()))
        self._pad_slot, self._reused = first.pad_row, first.reused

    def make(self, plan: StepPlan) -> Batch:
        """See `KVMemory.bind`."""
        reserved = self._reserved(plan.rows)
        if np.count_nonzero(plan.seq_lens > reserved):
            i = int(np.argmax(plan.seq_lens > reserved))
            raise InvalidArgument(
                f"step {plan.step} writes row {plan.rows[i]} up to token {plan.seq_lens[i]}; {reserved[i]} are reserved"
            )
        chunks = slice(plan.decode_rows, None)  # a row that decodes is past what it reuses
        if plan.decode_rows < len(plan.rows) and np.count_nonzero(
            plan.prefix_lens[chunks] < self._reused[plan.rows[chunks]] * self._page_size
        ):
            raise InvalidArgument(f"step {plan.step} writes into pages that rows {plan.rows[:8].tolist()} only reuse")
        host = _host_arrays(plan)
        out, sent = self._binding.slots(host, plan.decode_rows)
        batch = Batch(
            step=plan.step,
            decode_rows=plan.decode_rows,
            host=host,
            device=self._device,
            pad_slot=self._pad_slot,
            out_loc=out,
            has_token_src=plan.token_src is not None,
            sampling=plan.sampling,
            names=plan,
            tensors=sent,
        )
        if "page_table" in self._needs:
            width = -(-batch.max_seq // self._page_size)
            batch.page_table = {
                pool: self._binding.page_table(pool, host.row_slot, sent, width) for pool in self._tables
            }
        return batch

    def _reserved(self, rows: RowArray) -> RowArray:
        """Tokens that every pool has pages for."""
        first, *others = self._tables.values()
        reserved: RowArray = first.lengths[rows]
        for table in others:
            reserved = np.minimum(reserved, table.lengths[rows])
        return reserved


def _host_arrays(plan: StepPlan) -> HostArrays:
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
