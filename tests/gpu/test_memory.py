"""KVMemory on a device: a batch costs one upload, and reading its fields costs no wait."""

import numpy as np
import pytest
import torch

from kvloom.allocator import KVMemory
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
