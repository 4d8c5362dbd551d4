"""The specification against plain Python, and the host's kernels with it."""

import random
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings, strategies as st

from kvloom.allocator.kernels import host_kernels, torch_kernels
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
INDEX_DTYPES = (torch.int64, torch.int32)

both = pytest.mark.parametrize("kernels", [torch_kernels, host_kernels], ids=["torch", "host"])
page_sizes = st.sampled_from(PAGE_SIZES)
index_dtypes = st.sampled_from(INDEX_DTYPES)
lengths = st.integers(0, 2) | st.integers(0, 80)
few = settings(max_examples=60, deadline=None)


@both
@few
@given(page_sizes, st.lists(st.tuples(lengths, lengths), max_size=10), st.integers(0, 99), index_dtypes)
def test_extend(
    kernels: ModuleType, page_size: int, rows: list[tuple[int, int]], seed: int, index_dtype: torch.dtype
) -> None:
    check_extend(kernels, grow(page_size, rows, seed), CPU, index_dtype)


@both
@few
@given(page_sizes, st.lists(lengths, max_size=10), st.integers(0, 99), index_dtypes)
def test_decode(kernels: ModuleType, page_size: int, prefixes: list[int], seed: int, index_dtype: torch.dtype) -> None:
    check_decode(kernels, grow(page_size, [(prefix, 1) for prefix in prefixes], seed), CPU, index_dtype)


@both
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_large_batches(kernels: ModuleType, page_size: int) -> None:
    rng = random.Random(page_size)
    check_extend(kernels, grow(page_size, random_lengths(rng, page_size, 300, 100)), CPU, torch.int64)
    check_decode(kernels, grow(page_size, decode_lengths(rng, page_size, 1500, 60)), CPU, torch.int64)


@both
@pytest.mark.parametrize(
    "rows",
    [
        [],
        [(0, 0), (5, 0), (16, 0)],  # nothing grows
        [(3, 4), (17, 15), (0, 0)],  # all stay inside their page, no new page at all
        [(16, 16), (32, 1)],  # from one edge to the next
        [(0, 16), (7, 0), (15, 1), (15, 2)],
    ],
)
def test_rows_at_the_edges(kernels: ModuleType, rows: list[tuple[int, int]]) -> None:
    check_extend(kernels, grow(16, rows), CPU, torch.int64)


@both
def test_case_b07_slots_past_int32(kernels: ModuleType) -> None:
    """Pages 8,388,607 and 8,388,608 of 256 slots: the second begins at 2^31."""
    last, first = 8_388_607, 8_388_608
    batch = grow(256, [(0, 300)])
    for verb in (Run.extend, Run.extend_rows):
        run = Run(batch, CPU)
        run.sent["new_pages"] = torch.tensor([last, first], dtype=torch.int32)
        verb(run, kernels)
        assert run.slots.tolist() == [*range(2**31 - 256, 2**31), *range(2**31, 2**31 + 44)]
        assert 2**31 == 2_147_483_648
    decode = grow(256, [(256, 1), (5, 1)])
    for step in (Run.decode, Run.decode_rows):
        run = Run(decode, CPU)
        run.decode_pages = torch.tensor([first, 0], dtype=torch.int32)
        run.table[decode.rows[1], 0] = first
        run.last_loc[1] = 2**31 + 4
        step(run, kernels)
        assert run.slots.tolist() == [2**31, 2**31 + 5]


@both
def test_case_b07_kv_far_out(kernels: ModuleType) -> None:
    """Slot 4,000,000 of rows of 576 bytes lies past 2^31 bytes; only the pages written become resident."""
    keys, values = (torch.empty(4_000_001, 1, 576, dtype=torch.uint8) for _ in range(2))
    key = torch.randint(256, (2, 1, 576), dtype=torch.uint8)
    loc = torch.tensor([4_000_000, 3])
    kernels.store_kv(keys, values, loc, key, key + 1)
    assert torch.equal(keys[loc], key)
    assert torch.equal(values[loc], key + 1)


@both
def test_padding_rows_get_the_dump_slot(kernels: ModuleType) -> None:
    """Any number of rows may name the pad line; it stays as it is."""
    table = torch.tensor([[5, 6], [0, 0]], dtype=torch.int32)
    before = table.clone()
    rows, seq_lens, new_pages = (torch.tensor(values, dtype=torch.int32) for values in ([1, 0, 1], [1, 7, 1], [0] * 3))
    out = torch.full((3,), -1)
    kernels.decode_rows(table, rows, seq_lens, new_pages, out, 4)
    assert out.tolist() == [0, 6 * 4 + 2, 0]
    assert torch.equal(table, before)


@both
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_store_kv(kernels: ModuleType, dtype: torch.dtype, index_dtype: torch.dtype) -> None:
    fused = torch.randn(6, 3, 4, 8, generator=torch.Generator().manual_seed(0))
    loc = torch.tensor([9, 1, 4, 17, 3, 2], dtype=index_dtype)
    check_store(kernels, fused[:, 0], fused[:, 2], loc, dtype)
    check_store(kernels, fused[:, 0].to(dtype), fused[:, 1].to(dtype), loc, dtype)


@both
def test_store_kv_of_nothing(kernels: ModuleType) -> None:
    buffer = torch.zeros(4, 2, 8)
    nothing = torch.empty(0, 2, 8)
    kernels.store_kv(buffer, buffer, torch.empty(0, dtype=torch.int64), nothing, nothing)
    assert not buffer.any()
