"""The arrays of a plan, from rows set by hand."""

import numpy as np
import pytest

from kvloom.scheduler import Request
from kvloom.scheduler.assemble import assemble
from kvloom.scheduler.plan import IntArray
from kvloom.scheduler.prefill import Chunk, cut
from kvloom.scheduler.request import Sequence
from kvloom.scheduler.rows import Rows


def rows_of(*prompts: int) -> Rows:
    rows = Rows(8, ())
    for row, length in enumerate(prompts):
        tokens = np.arange(10 * (row + 1), 10 * (row + 1) + length, dtype=np.int32)
        rows.enter(row, Sequence(Request(id=str(row), prompt=tokens), row, 0.0, 9, None, tokens, 0.0), 0)
    return rows


def ints(*numbers: int) -> IntArray:
    return np.array(numbers, np.int32)


def test_chunks_alone() -> None:
    rows = rows_of(3, 5)
    chunks = [cut(rows, 0, 4), cut(rows, 1, 2)]
    assert [(chunk.start, chunk.tokens.tolist(), chunk.last) for chunk in chunks] == [
        (0, [10, 11, 12], True), (0, [20, 21], False),
    ]  # fmt: skip
    plan = assemble(4, rows, ints(), chunks)
    assert (plan.step, plan.decode_rows, plan.kind, plan.tokens) == (4, 0, "prefill", 5)
    assert plan.token_ids.tolist() == [10, 11, 12, 20, 21]
    assert (plan.prefix_lens.tolist(), plan.seq_lens.tolist(), plan.sample_rows.tolist()) == ([0, 0], [3, 2], [0])
    assert rows.scheduled[:2].tolist() == [3, 2]
    assert rows.last_step[:2].tolist() == [4, 4]
    assert rows.prefilling == 1
    chunk = cut(rows, 1, 9)
    assert (chunk.start, chunk.tokens.tolist(), chunk.last) == (2, [22, 23, 24], True)


def test_decode_rows_alone_and_with_a_chunk() -> None:
    rows = rows_of(3, 3, 6)
    assemble(0, rows, ints(), [cut(rows, 0, 9), cut(rows, 1, 9)])
    rows.settled[:2], rows.settled_step = 3, 0
    rows.append(ints(0, 1), ints(50, 51), ints(3, 3))
    plan = assemble(1, rows, ints(0, 1), [])
    assert (plan.kind, plan.token_ids.tolist(), plan.token_src) == ("decode", [50, 51], None)
    assert (plan.sample_rows.tolist(), plan.q_lens.tolist()) == ([0, 1], [1, 1])
    plan = assemble(2, rows, ints(0, 1), [cut(rows, 2, 4)])
    assert (plan.kind, plan.decode_rows) == ("mixed", 2)
    assert plan.token_src is not None
    assert plan.token_src.tolist() == [0, 1, -1, -1, -1, -1]
    assert plan.token_ids.tolist() == [0, 0, 30, 31, 32, 33]
    assert (plan.rows.tolist(), plan.q_lens.tolist(), plan.sample_rows.tolist()) == ([0, 1, 2], [1, 1, 4], [0, 1])


def test_known_and_flying_tokens_side_by_side() -> None:
    rows = rows_of(2, 2)
    assemble(0, rows, ints(), [cut(rows, 0, 9), cut(rows, 1, 9)])
    rows.settled[:2], rows.settled_step = 2, 0
    rows.append(ints(0, 1), ints(50, 51), ints(2, 2))
    assemble(1, rows, ints(1), [])
    plan = assemble(2, rows, ints(0, 1), [])
    assert plan.token_src is not None
    assert (plan.token_src.tolist(), plan.token_ids.tolist()) == ([-1, 1], [50, 0])


def test_what_plans_share_cannot_be_written() -> None:
    rows = rows_of(2)
    assemble(0, rows, ints(), [Chunk(0, 0, ints(10, 11), True)])
    rows.settled[0], rows.settled_step = 2, 0
    rows.append(ints(0), ints(50), ints(2))
    plan = assemble(1, rows, ints(0), [])
    for array in (plan.q_lens, plan.sample_rows):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 7
