"""The row kernels alone: what they read is on the device already."""

import random

import torch

from benchmarks.kernels.timing import Work
from kvloom.allocator.kernels import Kernels

DECODE_ROWS = {1: None, 64: None, 256: None, 1024: 3.0, 4096: 6.0}  # rows -> device goal, us
EXTEND_SHAPES = {
    (1, 8192): 3.0, (16, 2048): 3.0, (64, 512): 3.0, (256, 128): 3.0, (1, 131_072): None, (1, 1_000_000): 15.0,
}  # fmt: skip


def launches(kernels: Kernels, device: torch.device, page_size: int) -> list[Work]:
    """Decode and extend launches of all shapes."""
    works = [decode(kernels, device, page_size, rows_n, goal) for rows_n, goal in DECODE_ROWS.items()]
    works += [extend(kernels, device, page_size, *shape, goal) for shape, goal in EXTEND_SHAPES.items()]
    return works


def decode(kernels: Kernels, device: torch.device, page_size: int, rows_n: int, goal: float | None) -> Work:
    """A decode step; one row in `page_size` enters a new page."""
    rng = random.Random(0)
    width = 64
    seq_lens = [rng.randint(1, width * page_size) for _ in range(rows_n)]
    new_pages = [rng.randint(1, 10**6) if (length - 1) % page_size == 0 else 0 for length in seq_lens]
    table = torch.randint(1, 10**6, (rows_n + 1, width), dtype=torch.int32, device=device)
    rows, lengths, pages = (
        torch.tensor(values, dtype=torch.int32, device=device)
        for values in (rng.sample(range(rows_n + 1), rows_n), seq_lens, new_pages)
    )
    out = torch.empty(rows_n, dtype=torch.int64, device=device)

    def launch() -> None:
        kernels.decode_rows(table, rows, lengths, pages, out, page_size)

    return Work(f"decode kernel, {rows_n:,} rows", launch, launch=launch, device_goal=goal)


def extend(
    kernels: Kernels, device: torch.device, page_size: int, rows_n: int, tokens: int, goal: float | None
) -> Work:
    """New rows of `tokens` tokens each."""
    per_row = -(-tokens // page_size)
    table = torch.zeros(rows_n + 1, per_row, dtype=torch.int32, device=device)
    rows = torch.randperm(rows_n, device=device).to(torch.int32)
    prefix_lens = torch.zeros(rows_n, dtype=torch.int32, device=device)
    seq_lens = prefix_lens + tokens
    new_pages = torch.randperm(rows_n * per_row, device=device).to(torch.int32) + 1
    starts = torch.arange(rows_n + 1, dtype=torch.int32, device=device)
    page_start, token_start = starts * per_row, starts * tokens
    out = torch.empty(rows_n * tokens, dtype=torch.int64, device=device)

    def launch() -> None:
        kernels.extend_rows(table, rows, prefix_lens, seq_lens, new_pages, page_start, token_start, out, page_size)

    return Work(f"extend kernel, {rows_n:,} x {tokens:,}", launch, launch=launch, device_goal=goal)
