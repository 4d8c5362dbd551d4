"""Run by `test_triton_kernels.py`, with TRITON_INTERPRET=1 in the environment."""

import os
import random

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from kvloom.allocator.kernels import torch_kernels, triton_kernels, triton_launches
from tests.allocator.kernels.batches import (
    PAGE_SIZES,
    Run,
    check_decode,
    check_extend,
    check_store,
    decode_lengths,
    grow,
    random_lengths,
)

CPU = torch.device("cpu")
KERNELS = triton_launches.TritonKernels(CPU)


def test_kernels_are_interpreted() -> None:
    """Else all tests here would fail for want of a device, or worse, pass on one."""
    assert os.environ["TRITON_INTERPRET"] == "1"
    assert isinstance(triton_kernels.decode, InterpretedFunction)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_random_batches(page_size: int) -> None:
    rng = random.Random(page_size)
    for rows, index_dtype in zip((0, 1, 2, 7, 30, 40), (torch.int64, torch.int32) * 3, strict=True):
        check_extend(KERNELS, grow(page_size, random_lengths(rng, page_size, rows, 70), rows), CPU, index_dtype)
        check_decode(KERNELS, grow(page_size, decode_lengths(rng, page_size, rows, 70), rows), CPU, index_dtype)


@pytest.mark.parametrize(
    "rows",
    [
        [(0, 1300)],  # one row over three programs
        [(0, 0), (5, 0), (16, 0)],
        [(3, 4), (17, 15), (0, 0)],  # no new page at all
        [(0, 511), (1, 0), (0, 1), (9, 0), (0, 513)],  # rows end where programs do, with empty rows between
    ],
)
def test_rows_at_the_edges(rows: list[tuple[int, int]]) -> None:
    check_extend(KERNELS, grow(16, rows), CPU, torch.int64)


def test_more_rows_than_a_program_has_lanes() -> None:
    check_decode(KERNELS, grow(4, decode_lengths(random.Random(0), 4, 300, 40)), CPU, torch.int64)
    check_extend(KERNELS, grow(3, [(row % 7, row % 3) for row in range(600)]), CPU, torch.int64)


def test_case_b07_equals_torch_past_int32() -> None:
    for verb in (Run.extend, Run.extend_rows):
        expected, run = (Run(grow(256, [(0, 300)], first_page=8_388_607), CPU) for _ in range(2))
        verb(expected, torch_kernels)
        verb(run, KERNELS)
        assert run.slots.min() > 2**31 - 257
        assert torch.equal(run.out, expected.out)
        assert torch.equal(run.table, expected.table)
    check_extend(KERNELS, grow(256, [(0, 300), (200, 70)], first_page=8_388_607), CPU, torch.int64)
    decode = grow(256, [(256, 1), (5, 1), (511, 1)], first_page=8_388_607)
    check_decode(KERNELS, decode, CPU, torch.int64)


def test_padding_rows_get_the_dump_slot() -> None:
    table = torch.zeros(2, 4, dtype=torch.int32)
    zeros = torch.zeros(5, dtype=torch.int32)
    out = torch.full((5,), -1)
    KERNELS.decode_rows(table, zeros + 1, zeros + 1, zeros, out, 16)
    assert not out.any()
    assert not table.any()


@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(
    ("dtype", "heads", "dim"), [(torch.float32, 2, 4), (torch.bfloat16, 3, 5), (torch.uint8, 1, 600)]
)
def test_store_kv(dtype: torch.dtype, heads: int, dim: int, index_dtype: torch.dtype) -> None:
    fused = torch.randint(100, (6, 3, heads, dim)).to(torch.float32)
    loc = torch.tensor([9, 1, 4, 17, 3, 2], dtype=index_dtype)
    check_store(KERNELS, fused[:, 0], fused[:, 2], loc, dtype)  # cast, tokens apart
    fused = fused.to(dtype)
    check_store(KERNELS, fused[:, 0], fused[:, 2], loc, dtype)
    heads_apart = fused[:, :2].transpose(1, 2)[:, :, 1]
    check_store(KERNELS, heads_apart, heads_apart, loc, dtype)


def test_store_kv_of_nothing() -> None:
    buffer = torch.zeros(4, 2, 8)
    nothing = torch.empty(0, 2, 8)
    KERNELS.store_kv(buffer, buffer, torch.empty(0, dtype=torch.int64), nothing, nothing)
    assert not buffer.any()


def test_warming_up_runs_every_verb() -> None:
    """Under the interpreter there is nothing to compile, so nothing is counted either."""
    assert KERNELS.warm_up((torch.int64, torch.int32)) == 0
