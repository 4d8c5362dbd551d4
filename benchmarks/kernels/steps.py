"""Whole allocation steps: plan on the host, one upload, one launch; and retiring."""

from collections.abc import Iterator
from functools import partial
from itertools import count

import numpy as np
import torch

from benchmarks.kernels.launches import EXTEND_SHAPES
from benchmarks.kernels.timing import Work
from kvloom.allocator import DecodeStep, ExtendStep, PagedRows, PagedTokenToKVPoolAllocator, RequestTable, Shortfall
from kvloom.allocator.table import RowArray

DECODE_ROWS = (1, 64, 256, 1024, 4096)
RETIRED = ((64, 4096), (256, 1024))
STEP_ROWS, STEP_TOKENS = 256, 32_768  # what one captured extend step has room for
START = 512  # tokens of the rows that decode, more or less
STEPS = 2900  # that they can take


def crowd(device: torch.device, page_size: int, rows_n: int, seq_len: int, pages: int | None = None) -> PagedRows:
    """A pool with room for `rows_n` rows of `seq_len` tokens, or of `pages` pages."""
    per_row = -(-seq_len // page_size)
    size = (pages or rows_n * per_row) * page_size
    allocator = PagedTokenToKVPoolAllocator(size, page_size, torch.bfloat16, device, None)
    return PagedRows(allocator, RequestTable(rows_n, per_row, device))


def opened(rows: PagedRows, seq_lens: RowArray) -> RowArray:
    """New rows with pages for these lengths; nobody asks for their slots."""
    new = rows.open_rows(len(seq_lens))
    assert not isinstance(new, Shortfall)
    assert rows.host.reserve(new, seq_lens) is None
    return new


def decoding(device: torch.device, page_size: int, rows_n: int) -> tuple[PagedRows, RowArray]:
    """Rows that decode: their lengths spread over a page, so that one in `page_size` enters a new one each step."""
    rows = crowd(device, page_size, rows_n, START + STEPS)
    lengths = START - np.arange(rows_n, dtype=np.int32) % page_size
    mine = opened(rows, lengths.astype(np.int32))
    mine.setflags(write=False)  # the same rows in each step, as a scheduler has them
    return rows, mine


def reopen(rows: PagedRows, mine: RowArray) -> None:
    """Release rows and open them again, empty."""
    rows.release_rows(mine[::-1].copy(), [-1] * len(mine))
    again = rows.open_rows(len(mine))
    assert np.array_equal(again, mine)


def decode_steps(device: torch.device, page_size: int) -> Iterator[Work]:
    """The step alone, in two ways, and what remains of it on the host when its kernel is part of the model's graph."""
    for rows_n in DECODE_ROWS:
        rows, mine = decoding(device, page_size, rows_n)
        yield Work(f"decode step, launched, {rows_n:,} rows", partial(rows.decode_rows, mine))
        rows, mine = decoding(device, page_size, rows_n)
        step = DecodeStep(rows.host, rows_n)
        yield Work(f"decode step, replayed, {rows_n:,} rows", partial(step.run, mine), host_goal=35.0)
        rows, mine = decoding(device, page_size, rows_n)
        step = DecodeStep(rows.host, rows_n)
        name = f"decode step, kernel in the model's graph, {rows_n:,} rows"
        yield Work(name, partial(step.plan, mine), launch=step.launch, host_goal=20.0)


def extend_steps(device: torch.device, page_size: int) -> Iterator[Work]:
    """New rows with a prompt each, in the three ways of `decode_steps`; one step has room for all but the longest."""
    for (rows_n, tokens), device_goal in EXTEND_SHAPES.items():
        lengths = np.full(rows_n, tokens, np.int32)
        room = max(STEP_TOKENS, tokens)
        goal = 40.0 if room == STEP_TOKENS else None
        what = f"{rows_n:,} x {tokens:,}"
        rows, mine = prompts(device, page_size, lengths)
        again = partial(reopen, rows, mine)
        yield Work(f"extend step, launched, {what}", partial(rows.extend_rows, mine, lengths), again)
        rows, mine = prompts(device, page_size, lengths)
        step, again = ExtendStep(rows.host, STEP_ROWS, room), partial(reopen, rows, mine)
        yield Work(f"extend step, replayed, {what}", partial(step.run, mine, lengths), again, host_goal=goal)
        rows, mine = prompts(device, page_size, lengths)
        step, again = ExtendStep(rows.host, STEP_ROWS, room), partial(reopen, rows, mine)
        yield Work(
            f"extend step, kernel in the model's graph, {what}",
            partial(step.plan, mine, lengths),
            again,
            launch=step.launch,
            host_goal=goal,
            device_goal=device_goal,
        )


def prompts(device: torch.device, page_size: int, lengths: RowArray) -> tuple[PagedRows, RowArray]:
    """Rows that have been extended to these lengths once."""
    rows = crowd(device, page_size, len(lengths), int(lengths.max()))
    return rows, opened(rows, lengths)


def retire(
    device: torch.device, page_size: int, lengths: RowArray, name: str, pages: int = 0, goal: float | None = None
) -> Work:
    """One free group: rows of these lengths, behind the fence of the step in flight."""
    rows = crowd(device, page_size, len(lengths), int(lengths.max()), pages or int((-(-lengths // page_size)).sum()))
    held = [opened(rows, lengths)]
    steps = count()
    now = [next(steps)]

    def ready() -> None:
        if rows.table.held_rows == 0:
            rows.settle(now[0])
            now[0] = next(steps)
            held[0] = opened(rows, lengths)

    def call() -> None:
        rows.release_rows(held[0], [now[0]] * len(lengths))

    return Work(f"retire {name}, page {page_size}", call, ready, host_goal=goal)


def retirements(device: torch.device) -> Iterator[Work]:
    """All page sizes; and many short rows beside a long one."""
    for page_size in (1, 16, 64):
        for rows_n, tokens in RETIRED:
            yield retire(device, page_size, np.full(rows_n, tokens, np.int32), f"{rows_n} x {tokens:,}", goal=60.0)
    uneven = np.full(256, 16, np.int32)
    uneven[100] = 65_536
    yield retire(device, 16, uneven, "255 x 16 and 1 x 65,536")
