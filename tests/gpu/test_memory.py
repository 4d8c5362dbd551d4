"""KVMemory on a device: a batch costs one upload, and reading its fields costs no wait."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvloom.allocator import KVMemory, PoolSpec
from kvloom.scheduler.runners import ShadowRunner
from tests.allocator.books import ints
from tests.allocator.memories import Step
from tests.gpu.test_kernels import no_synchronisation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),  # says that it is a prototype
]

FIELDS = (
    "token_ids", "token_src", "positions", "row_slot", "prefix_lens", "q_lens", "seq_lens", "q_start", "sample_rows",
    "logits_idx",
)  # fmt: skip


def test_every_field_of_a_batch_is_there_without_a_wait() -> None:
    memory = KVMemory(capacity_tokens=256, device=torch.device("cuda", 0), needs=frozenset({"page_table"}))
    row = memory.admit(memory.match(np.zeros(0, np.int32)), 20)
    assert row is not None
    with no_synchronisation():
        batch = memory.bind(Step(0, ints(row), ints(0), ints(20), 0, ints(*range(20)), ints(0)))
        tensors = {name: getattr(batch, name) for name in FIELDS}
    for name, tensor in tensors.items():
        assert tensor.is_cuda
        assert tensor.tolist() == getattr(batch.host, name).tolist(), name
    assert batch.page_table["full"].tolist() == [[1, 2]]
    assert batch.out_loc["full"].tolist() == list(range(16, 36))


def test_evicted_prefixes_go_to_the_host_and_come_back_without_a_wait() -> None:
    """Whole copies and parts of them, of all layers; the pages are overwritten at once."""
    spec = PoolSpec(layers=tuple(range(6)), kv_heads=4, head_dim=64, dtype=torch.bfloat16)
    device = torch.device("cuda", 0)
    memory = KVMemory((spec,), capacity_tokens=4096, device=device, host_prefix_bytes=2**28, watermarks=(0.0, 0.0),
                      needs=frozenset({"page_table"}))  # fmt: skip
    buffers = [buffer for layer in spec.layers for buffer in memory.pools["full"].get_kv_buffer(layer)]
    tokens = np.arange(2049, dtype=np.int32)
    row = memory.admit(memory.match(tokens), len(tokens))
    assert row is not None
    slots = slots_of(memory, row, 2048)
    before = []
    for buffer in buffers:
        buffer.copy_(torch.rand(buffer.shape, device=device))
        before.append(buffer[slots].clone())
    memory.publish(ints(row), ints(2048), lambda _, start, stop: tokens[start:stop])
    memory.release([row], [-1])
    other = tokens.copy()
    other[1000:] = 7
    torch.cuda.synchronize()
    for step, (asked, host_tokens) in enumerate(((other, 992), (tokens, 2048))):
        with no_synchronisation():
            flood = memory.admit(memory.match(tokens[:0]), 4096)
            assert flood is not None
            for buffer in buffers:
                buffer.zero_()
            memory.release([flood], [-1])
            match = memory.match(asked)
            row = memory.admit(match, 2049)
        assert row is not None
        assert (match.tokens, match.host_tokens) == (0, host_tokens)
        slots = slots_of(memory, row, host_tokens)
        for buffer, then in zip(buffers, before, strict=True):
            assert torch.equal(buffer[slots], then[:host_tokens])
        batch = memory.bind(Step(step, ints(row), ints(host_tokens), ints(1), 1, ints(5), ints(0)))
        line = memory.tables["full"].pages[row, : host_tokens // 16 + 1]
        assert batch.page_table["full"].tolist() == [line.tolist()]
        memory.release([row], [step])
        memory.settle(step)
        memory.check()


def slots_of(memory: KVMemory, row: int, tokens: int) -> torch.Tensor:
    positions = np.arange(tokens)
    pages = memory.tables["full"].pages[row, positions // 16].astype(np.int64)
    return torch.from_numpy(pages * 16 + positions % 16).to(memory.device)


def test_memory_of_a_share_of_what_is_free() -> None:
    """At most that share, and not much less; of two pools each gets its part."""
    free = torch.cuda.mem_get_info()[0]
    full = PoolSpec("full", (0,), kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    window = PoolSpec("swa", (1, 2, 3), kv_heads=8, head_dim=128, dtype=torch.bfloat16, window=1024)
    runner = ShadowRunner(max_seq=8192)
    runner._spec = replace(runner.spec, pools=(full, window), device=torch.device("cuda"))
    memory = KVMemory.for_runner(runner, memory_fraction=0.1, lengths=[8192])
    nbytes = sum(storage.nbytes for storage in memory.pools.values())
    assert 0.09 * free <= nbytes <= 0.1 * free
