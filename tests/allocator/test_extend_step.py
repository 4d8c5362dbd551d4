"""An extend step in fixed buffers is the same step as `PagedRows.extend_rows`; what it refuses changes nothing."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvloom.allocator import (
    AllocatorError,
    DoubleFree,
    ExtendStep,
    InvalidArgument,
    PagedRows,
    PagedTokenToKVPoolAllocator,
    PageLedger,
    RequestTable,
    Shortfall,
)
from kvloom.allocator.kernels import Kernels, host_kernels, torch_kernels
from kvloom.allocator.rows import RowAllocator
from kvloom.allocator.table import RowArray
from tests.allocator.books import books, ints

ROWS, MAX_PAGES, TOKENS = 7, 9, 60


def make(pages: int, page_size: int, max_pages: int = MAX_PAGES) -> PagedRows:
    allocator = PagedTokenToKVPoolAllocator(pages * page_size, page_size, torch.float32, "cpu", None)
    return PagedRows(allocator, RequestTable(ROWS, max_pages))


def opened(rows: PagedRows, count: int) -> RowArray:
    new = rows.open_rows(count)
    assert not isinstance(new, Shortfall)
    return new


def sent(step: ExtendStep) -> tuple[list[int], ...]:
    tensors = (step.row_slot, step.prefix_lens, step.seq_lens, step.token_start, step.out_loc)
    return tuple(tensor.tolist() for tensor in tensors)


def state(rows: PagedRows, step: ExtendStep) -> tuple[object, ...]:
    """Failures are counted: only what was refused for want of pages may say so."""
    table = rows.table
    _, *where = books(rows.allocator.ledger)
    return (table.pages.tolist(), table.page_counts.tolist(), table.lengths.tolist(), where, sent(step), step.tokens)


def check_sent(step: ExtendStep, some: RowArray, before: RowArray, lengths: RowArray) -> None:
    """What a runner finds on the device: the step, and behind it padding."""
    missing, starts = ROWS - len(some), [0, *np.cumsum(lengths - before).tolist()]
    assert step.row_slot.tolist() == some.tolist() + [ROWS] * missing
    assert step.prefix_lens.tolist() == before.tolist() + [0] * missing
    assert step.seq_lens.tolist() == lengths.tolist() + [0] * missing
    assert step.token_start.tolist() == starts + starts[-1:] * missing
    assert step.tokens == starts[-1]


@pytest.mark.parametrize("kernels", [host_kernels, torch_kernels], ids=["host", "torch"])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_the_same_step_as_launched(page_size: int, kernels: Kernels) -> None:
    """Rows come, grow by much, little or nothing, decode, shrink and go; both ways do the same in the same order."""
    draw = np.random.default_rng(page_size)
    plain, fixed = make(30, page_size), make(30, page_size)
    step = ExtendStep(fixed.host, ROWS, TOKENS)
    step._kernels = kernels
    buffers = (step.row_slot, step.prefix_lens, step.seq_lens, step.token_start, step.out_loc)
    addresses = [buffer.data_ptr() for buffer in buffers]
    live: list[int] = []
    short = full = idle = 0
    for turn in range(400):
        if len(live) < ROWS and draw.random() < 0.4:
            new = opened(plain, 1).tolist()
            assert opened(fixed, 1).tolist() == new
            live += new
        some = draw.permutation(live)[: draw.integers(0, len(live) + 1)].astype(np.int32)
        before = plain.table.lengths[some]
        room = np.minimum(MAX_PAGES * page_size - before, TOKENS // max(1, len(some)))
        more = np.where(draw.random(len(some)) < 0.3, room, draw.integers(0, room + 1))
        lengths = (before + more).astype(np.int32)
        expected = plain.extend_rows(some, lengths)
        if turn % 2:
            answer = step.run(some, lengths)
        else:
            answer = step.plan(some, lengths)
            step.launch()
        if isinstance(expected, Shortfall):
            assert answer == expected
            short += 1
            for rows in (plain, fixed):
                rows.release_rows(ints(*live), [-1] * len(live))
            live = []
        else:
            assert answer is None
            assert step.out_loc.tolist() == expected.tolist() + [0] * (TOKENS - len(expected))
            check_sent(step, some, before, lengths)
            full += int((lengths == MAX_PAGES * page_size).sum())
            idle += int(len(expected) == 0)
        halves = plain.table.lengths[some[:1]] // 2
        for rows in (plain, fixed):
            if len(some) and live and turn % 5 == 0:
                rows.truncate_rows(some[:1], halves, [-1])
            rows.check()
        assert fixed.table.pages.tolist() == plain.table.pages.tolist()
        assert fixed.allocator.ledger.free_list().tolist() == plain.allocator.ledger.free_list().tolist()
    assert min(short, full, idle) > 3
    assert [buffer.data_ptr() for buffer in buffers] == addresses


def test_before_the_first_step_all_is_padding() -> None:
    step = ExtendStep(make(4, 4).host, 2, 5)
    step.launch()
    assert sent(step) == ([ROWS] * 2, [0] * 2, [0] * 2, [0] * 3, [0] * 5)
    assert step.tokens == 0


def test_all_tokens_on_pages_of_their_own() -> None:
    """The most pages that a step can take: each row enters one with its first token."""
    rows = make(40, 4)
    step = ExtendStep(rows.host, 6, 13)
    mine = opened(rows, 6)
    assert step.run(mine, ints(1, 1, 1, 1, 1, 1)) is None
    assert step.run(mine, ints(4, 4, 4, 4, 1, 1)) is None
    assert step.run(mine, ints(5, 5, 5, 5, 5, 6)) is None
    assert step.out_loc.tolist()[:4] == [28, 32, 36, 40]
    assert rows.table.page_counts[mine].tolist() == [2] * 6


def test_a_step_that_is_short_changes_nothing() -> None:
    rows = make(5, 4)
    step = ExtendStep(rows.host, 3, 40)
    mine = opened(rows, 3)
    assert step.run(mine[:2], ints(3, 5)) is None
    before = state(rows, step)
    assert step.run(mine, ints(4, 8, 9)) == rows.extend_rows(mine, ints(4, 8, 9)) == Shortfall("full", 3, 2, 0, 2, 8)
    assert step.plan(mine, ints(5, 12, 1)) == Shortfall("full", 3, 2, 0, 2, 0)
    assert step.plan(mine[2:], ints(12)) == Shortfall("full", 3, 2, 0, 0, 8)
    assert state(rows, step) == before
    assert step.run(mine[:2], ints(5, 12)) is None
    assert rows.allocator.ledger.free_pages == 0
    assert step.run(mine[:2], ints(8, 12)) is None  # what fits into pages that are there
    rows.check()


@pytest.mark.parametrize(
    ("act", "error", "says"),
    [
        (lambda step: step.run([0, 1], [9, 4]), InvalidArgument, "cannot grow"),  # shrinks
        (lambda step: step.run([0, 1], [37, 9]), InvalidArgument, "9 pages of 4"),
        (lambda step: step.run([0], [-1]), InvalidArgument, "cannot grow"),
        (lambda step: step.run([0], [-(2**31)]), InvalidArgument, "cannot grow"),
        (lambda step: step.run([0], [2**31 - 1]), InvalidArgument, "cannot grow"),
        (lambda step: step.run([0], [2**31]), InvalidArgument, "32 bits"),
        (lambda step: step.run([0, 1], [9]), InvalidArgument, "1 lengths for 2 rows"),
        (lambda step: step.run([0], [9, 9]), InvalidArgument, "2 lengths for 1 rows"),
        (lambda step: step.run([0, 1], [19, 19]), InvalidArgument, "24 new tokens in a step of at most 20"),
        (lambda step: step.run([0, 1, 2, 3], [9] * 4), InvalidArgument, "4 rows in a step of at most 3"),
        (lambda step: step.run([0.5], [9]), InvalidArgument, "whole numbers"),
        (lambda step: step.run([0, 0], [9, 9]), DoubleFree, "named twice"),
        (lambda step: step.run([5], [9]), DoubleFree, "not all in use"),
        (lambda step: step.run([ROWS], [9]), InvalidArgument, "rows run from 0"),
        (lambda step: step.run([-1], [9]), InvalidArgument, "rows run from 0"),
        (lambda step: step.run([0, -1], [9, 9]), InvalidArgument, "rows run from 0"),
    ],
)
def test_misuse_changes_nothing(act: Callable[[ExtendStep], object], error: type[AllocatorError], says: str) -> None:
    rows = make(30, 4)
    step = ExtendStep(rows.host, 3, 20)
    assert step.run(opened(rows, 4)[:2], ints(5, 9)) is None
    before = state(rows, step)
    with pytest.raises(error, match=says):
        act(step)
    assert state(rows, step) == before
    rows.check()
    assert step.run(ints(0, 1), ints(9, 9)) is None


def test_more_tokens_than_32_bits_can_count_are_counted() -> None:
    """In 32 bits the three would be 5 tokens."""
    rows = RowAllocator(PageLedger(1, page_size=2**23), RequestTable(3, 2**8))
    step = ExtendStep(rows, 3, 2**10)
    mine = [row for _ in range(3) if (row := rows.table.open()) is not None]
    with pytest.raises(InvalidArgument, match="4294967301 new tokens in a step of at most 1024"):
        step.run(mine, [2**31 - 2**23, 2**31 - 2**23, 2**24 + 5])
    assert not rows.table.lengths.any()
    assert step.run(mine, [1024, 0, 0]) is None
    rows.check()


def test_what_cannot_be_a_step() -> None:
    rows = make(4, 4)
    for max_rows, max_tokens in ((0, 4), (4, 0), (4, 2**31), (4, True)):
        with pytest.raises(InvalidArgument):
            ExtendStep(rows.host, max_rows, max_tokens)
    with pytest.raises(InvalidArgument, match="for the CPU and CUDA"):
        ExtendStep(RowAllocator(PageLedger(4), RequestTable(2, 2, "meta")), 1, 1)


def test_a_send_that_fails_leaves_rows_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = make(20, 4)
    step = ExtendStep(rows.host, 3, 40)
    mine = opened(rows, 3)
    assert step.run(mine, ints(4, 6, 0)) is None

    def lost() -> None:
        raise RuntimeError("no memory")

    before = (rows.table.lengths.tolist(), rows.table.pages.tolist(), rows.allocator.ledger.free_pages, step.tokens)
    with monkeypatch.context() as patch:
        patch.setattr(step, "launch", lost)
        with pytest.raises(RuntimeError, match="no memory"):
            step.run(mine, ints(9, 9, 9))
    rows.check()
    after = (rows.table.lengths.tolist(), rows.table.pages.tolist(), rows.allocator.ledger.free_pages, step.tokens)
    assert after == before
    assert step.run(mine, ints(9, 9, 9)) is None
    assert step.tokens == 17


def test_extending_and_decoding_take_turns() -> None:
    """Rows that are prefilled in chunks and then decode, some of them forks that share pages."""
    plain, fixed = make(60, 4), make(60, 4)
    step = ExtendStep(fixed.host, ROWS, TOKENS)
    mine = opened(plain, 2)
    assert np.array_equal(mine, opened(fixed, 2))

    def both(rows: RowArray, lengths: RowArray) -> None:
        expected = plain.extend_rows(rows, lengths)
        assert not isinstance(expected, Shortfall)
        assert step.run(rows, lengths) is None
        assert step.out_loc[: step.tokens].tolist() == expected.tolist()

    for lengths in (ints(6, 8), ints(7, 15)):
        both(mine, lengths)
        for rows in (plain, fixed):
            assert not isinstance(rows.decode_rows(mine), Shortfall)
    forks = [rows.fork_row(int(mine[0]), 2) for rows in (plain, fixed)]
    assert isinstance(forks[0], np.ndarray)
    assert np.array_equal(forks[0], forks[1])
    both(forks[0], ints(11, 21))
    assert fixed.table.pages.tolist() == plain.table.pages.tolist()
    fixed.check()
