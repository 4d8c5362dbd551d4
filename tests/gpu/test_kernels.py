"""The Triton kernels, compiled, on a device: equal to torch's, without a synchronisation, without a late compile."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from kvloom.allocator.kernels import Kernels, kernels_for, torch_kernels, warm_up
from kvloom.allocator.pools import MHATokenToKVPool
from tests.allocator.kernels.batches import (
    DECODING,
    EXTENDING,
    PAGE_SIZES,
    Run,
    check_decode,
    check_extend,
    check_store,
    decode_lengths,
    grow,
    random_lengths,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),  # says that it is a prototype
]

INDEX_DTYPES = (torch.int64, torch.int32)


@pytest.fixture(scope="module")
def cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="module")
def kernels(cuda: torch.device) -> Kernels:
    assert warm_up(cuda, INDEX_DTYPES) > 0, "triton is not installed here"
    return kernels_for(cuda)


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """What waits for the device inside raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_random_batches(kernels: Kernels, cuda: torch.device, page_size: int, index_dtype: torch.dtype) -> None:
    rng = random.Random(page_size)
    for rows in (0, 1, 2, 40, 700):
        check_extend(kernels, grow(page_size, random_lengths(rng, page_size, rows, 90), rows), cuda, index_dtype)
        check_decode(kernels, grow(page_size, decode_lengths(rng, page_size, rows, 90), rows), cuda, index_dtype)
    check_extend(kernels, grow(page_size, [(0, 0), (7, 100_000), (3, 0), (0, 1)]), cuda, index_dtype)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_torch_gives_the_same_there(cuda: torch.device, page_size: int) -> None:
    rng = random.Random(page_size)
    check_extend(torch_kernels, grow(page_size, random_lengths(rng, page_size, 40, 90)), cuda, torch.int64)
    check_decode(torch_kernels, grow(page_size, decode_lengths(rng, page_size, 40, 90)), cuda, torch.int64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("heads", "dim"), [(8, 128), (3, 5), (1, 576)])
def test_store_kv(kernels: Kernels, cuda: torch.device, dtype: torch.dtype, heads: int, dim: int) -> None:
    fused = torch.randn(50, 3, heads, dim, device=cuda)
    for index_dtype in INDEX_DTYPES:
        loc = torch.randperm(90, device=cuda)[:50].to(index_dtype)
        for tokens in (fused, fused.to(dtype)):
            check_store(kernels, tokens[:, 0], tokens[:, 2], loc, dtype)
            check_store(kernels, tokens[1:, 1], tokens[1:, 0], loc[1:], dtype)


def test_nothing_synchronises(kernels: Kernels, cuda: torch.device) -> None:
    rng = random.Random(0)
    growing = [Run(grow(16, random_lengths(rng, 16, rows, 90)), cuda) for rows in (1, 30, 500)]
    stepping = [Run(grow(16, decode_lengths(rng, 16, rows, 90)), cuda) for rows in (1, 30, 500)]
    buffers = torch.zeros(2, 64, 2, 8, device=cuda)
    loc = torch.arange(8, device=cuda)
    key = torch.randn(8, 2, 8, device=cuda)
    pool = MHATokenToKVPool(64, 16, torch.bfloat16, 2, 8, 1, cuda)
    with no_synchronisation():
        for table in (kernels, torch_kernels):
            for verbs, runs in ((EXTENDING, growing), (DECODING, stepping)):
                for verb in verbs:
                    for run in runs:
                        verb(run, table)
            table.store_kv(buffers[0], buffers[1], loc, key, key)
        pool.set_kv_buffer(0, loc, key, key)
        pool.get_kv_buffer(0)


def test_500_shapes_compile_nothing_new(kernels: Kernels, cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """By our own count and by Triton's."""
    import triton

    compiled: list[object] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **what: compiled.append(what["repr"]))
    before = warm_up(cuda, INDEX_DTYPES)
    rng = random.Random(0)
    for _ in range(500):
        page_size, rows, longest = rng.choice((1, 2, 3, 16, 24, 64)), rng.randint(1, 130), rng.choice((1, 16, 60))
        index_dtype = rng.choice(INDEX_DTYPES)
        extending = Run(grow(page_size, random_lengths(rng, page_size, rows, longest)), cuda, index_dtype)
        decoding = Run(grow(page_size, decode_lengths(rng, page_size, rows, longest)), cuda, index_dtype)
        for verb in EXTENDING:
            verb(extending, kernels)
        extending.extend_step(kernels, rows + rng.randint(1, 9), len(extending.batch.slots) + rng.randint(1, 999))
        for verb in DECODING:
            verb(decoding, kernels)
        key = torch.randn(rows, rng.randint(1, 4), rng.randint(1, 70), device=cuda).to(
            rng.choice((torch.half, torch.float))
        )
        buffers = torch.zeros(2, rows, *key.shape[1:], dtype=rng.choice((key.dtype, torch.bfloat16)), device=cuda)
        kernels.store_kv(buffers[0], buffers[1], torch.arange(rows, device=cuda, dtype=index_dtype), key, key)
    torch.cuda.synchronize()
    assert warm_up(cuda, INDEX_DTYPES) == before
    assert compiled == []


def test_decode_rows_in_a_cuda_graph(kernels: Kernels, cuda: torch.device) -> None:
    """Captured once; replayed for the steps that follow, over page edges."""
    page_size, rows_n, steps = 4, 70, 9
    rng = random.Random(0)
    height, width = 80, 8
    lengths = [rng.randint(1, (width - 3) * page_size) for _ in range(rows_n)]
    free = list(range(1, height * width))
    host = [[free.pop() if page * page_size < length else 0 for page in range(width)] for length in lengths]
    table = torch.zeros(height, width, dtype=torch.int32, device=cuda)
    table[:rows_n] = torch.tensor(host, dtype=torch.int32, device=cuda)
    rows = torch.arange(rows_n, dtype=torch.int32, device=cuda)
    seq_lens, new_pages = torch.ones_like(rows), torch.zeros_like(rows)
    out = torch.zeros(rows_n, dtype=torch.int64, device=cuda)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.decode_rows(table, rows, seq_lens, new_pages, out, page_size)
    for _ in range(steps):
        new, slots = [], []
        for row, length in enumerate(lengths):
            page, within = divmod(length, page_size)
            new.append(free.pop() if within == 0 else 0)
            host[row][page] = new[-1] or host[row][page]
            slots.append(host[row][page] * page_size + within)
        lengths = [length + 1 for length in lengths]
        seq_lens.copy_(torch.tensor(lengths))
        new_pages.copy_(torch.tensor(new))
        graph.replay()
        assert out.tolist() == slots
        assert table[:rows_n].tolist() == host
    assert not table[rows_n:].any()


def test_case_b07_slots_past_int32(kernels: Kernels, cuda: torch.device) -> None:
    """Pages 8,388,607 and 8,388,608 of 256 slots: the second begins at 2^31."""
    for verb in EXTENDING:
        run = Run(grow(256, [(0, 300)]), cuda)
        run.sent["new_pages"] = torch.tensor([8_388_607, 8_388_608], dtype=torch.int32, device=cuda)
        verb(run, kernels)
        assert run.slots.tolist() == [*range(2_147_483_392, 2_147_483_648), *range(2_147_483_648, 2_147_483_692)]
    check_extend(kernels, grow(256, [(0, 300), (200, 70)], first_page=8_388_607), cuda, torch.int64)
    check_decode(kernels, grow(256, [(256, 1), (5, 1), (511, 1)], first_page=8_388_607), cuda, torch.int64)


def test_case_b07_kv_far_out(kernels: Kernels, cuda: torch.device) -> None:
    """Slot 4,000,000 of rows of 576 bytes lies past 2^31 bytes."""
    keys, values = (torch.zeros(4_000_001, 1, 576, dtype=torch.uint8, device=cuda) for _ in range(2))
    key = torch.randint(1, 256, (2, 1, 576), dtype=torch.uint8, device=cuda)
    loc = torch.tensor([4_000_000, 3], device=cuda)
    kernels.store_kv(keys, values, loc, key, key - 1)
    assert torch.equal(keys[loc], key)
    assert torch.equal(values[loc], key - 1)
    assert int(keys.any(dim=2).sum()) == 2


def test_one_million_tokens(kernels: Kernels, cuda: torch.device) -> None:
    expected, run = (Run(grow(16, [(5, 1_000_000)]), cuda) for _ in range(2))
    run.extend_rows(kernels)
    expected.extend_rows(torch_kernels)
    assert torch.equal(run.out, expected.out)
    assert torch.equal(run.table, expected.table)
