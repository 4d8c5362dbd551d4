"""From who runs to what a step carries: the arrays of a plan."""

from collections.abc import Sequence as SequenceOf
from functools import lru_cache

import numpy as np

from kvloom.scheduler.plan import IntArray, Plan
from kvloom.scheduler.prefill import Chunk
from kvloom.scheduler.rows import Rows


def assemble(step: int, rows: Rows, decode: IntArray, chunks: SequenceOf[Chunk]) -> Plan:
    """The plan of a step: one token for each row of `decode`, then the chunks.

    Mutates `rows`: what the plan names counts as scheduled from here on.
    """
    prefix_lens = rows.scheduled[decode]
    token_ids, token_src = rows.last_token[decode], None
    if rows.planned_step > rows.settled_step:
        pending = prefix_lens > rows.settled[decode]  # their newest token is still on its way
        if pending.any():
            token_ids[pending] = 0
            token_src = np.where(pending, decode, np.int32(-1))
    planned, q_lens, sampled, sampled_rows = decode, _ones(len(decode)), _counting(len(decode)), decode
    if chunks:
        lengths = [len(chunk.tokens) for chunk in chunks]
        last = [len(decode) + i for i, chunk in enumerate(chunks) if chunk.last]
        planned = np.concatenate((decode, np.array([chunk.row for chunk in chunks], np.int32)))
        prefix_lens = np.concatenate((prefix_lens, np.array([chunk.start for chunk in chunks], np.int32)))
        q_lens = np.concatenate((q_lens, np.array(lengths, np.int32)))
        token_ids = np.concatenate((token_ids, *(chunk.tokens for chunk in chunks)))
        if token_src is not None:
            token_src = np.concatenate((token_src, np.full(sum(lengths), -1, np.int32)))
        sampled = np.concatenate((sampled, np.array(last, np.int32)))
        sampled_rows = planned[sampled]
        rows.prefilling -= len(last)
    seq_lens = prefix_lens + q_lens
    plan = Plan(
        step=step,
        rows=planned,
        prefix_lens=prefix_lens,
        q_lens=q_lens,
        seq_lens=seq_lens,
        decode_rows=len(decode),
        token_ids=token_ids,
        token_src=token_src,
        sample_rows=sampled,
        sampling=rows.choices(sampled_rows, seq_lens, sampled),
        sequences=rows.members(planned),
        departures=rows.departures,
    )
    rows.scheduled[planned] = seq_lens
    rows.last_step[planned] = rows.planned_step = step
    return plan


@lru_cache(maxsize=64)
def _ones(count: int) -> IntArray:
    return _frozen(np.ones(count, np.int32))


@lru_cache(maxsize=64)
def _counting(count: int) -> IntArray:
    return _frozen(np.arange(count, dtype=np.int32))


def _frozen(array: IntArray) -> IntArray:
    array.setflags(write=False)  # plans share it
    return array
