"""Slots past 2^31 (case B07); bytes past 2^31, which take the memory of a device: `tests/gpu`."""

import numpy as np
import pytest
import torch

from kvloom.allocator import InvalidArgument, PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from kvloom.allocator.kernels import Kernels, host_kernels, torch_kernels
from tests.allocator.test_cases import taken

FAR = 8_388_607  # with 256 slots a page, the next page begins at 2^31


@pytest.mark.parametrize("kernels", [host_kernels, torch_kernels], ids=["host", "torch"])
def test_pages_at_the_end_of_32_bits(kernels: Kernels) -> None:
    pool = PagedTokenToKVPoolAllocator((FAR + 3) * 256, 256, torch.float16, "cpu", None)
    pool._kernels = kernels
    pool.ledger.take(FAR - 1)
    slots = taken(pool.alloc_extend([0], [300], [-1], 300))
    assert slots.dtype == torch.int64
    assert slots.tolist() == [*range(2_147_483_392, 2_147_483_648), *range(2_147_483_648, 2_147_483_692)]
    assert taken(pool.alloc_decode([301], slots[-1:])).tolist() == [2_147_483_692]
    assert taken(pool.alloc(256)).tolist() == list(range(2_147_483_904, 2_147_484_160))
    pool.free(slots[-1:])
    assert pool.ledger.free_list().tolist() == [FAR + 1, FAR + 3]
    assert taken(pool.alloc_decode([257], slots[255:256])).tolist() == [2_147_483_648]


def test_lengths_in_int32_whose_sum_is_past_2_to_31() -> None:
    """Host maths only: short of pages in the first case, one token each in the second."""
    pool = PagedTokenToKVPoolAllocator(64 * 256, 256, torch.float16, "cpu", None)
    long = torch.full((3,), 2**30, dtype=torch.int32)
    assert pool.alloc_extend([0, 0, 0], long, [-1] * 3, 3 * 2**30) is None
    last = taken(pool.alloc(3 * 256))[255::256]
    for lengths in (long, long.numpy(), long.tolist()):
        assert taken(pool.alloc_extend(lengths, np.asarray(lengths) + 1, last, 3)).shape == (3,)
    with pytest.raises(InvalidArgument, match=str(2**31 - 1)):
        pool.alloc_decode([2**31], last[:1])


@pytest.mark.parametrize(
    ("size", "page_size"), [(2**31, 1), (2**31 * 16, 16), (2**63, 2**40)], ids=["per_token", "paged", "absurd"]
)
def test_too_large_is_refused_at_construction(size: int, page_size: int) -> None:
    with pytest.raises(InvalidArgument, match=rf"{2**31 - 2}|{2**63 - 1}"):
        PagedTokenToKVPoolAllocator(size, page_size, torch.float16, "cpu", None)
    if page_size == 1:
        with pytest.raises(InvalidArgument, match=str(2**31 - 2)):
            TokenToKVPoolAllocator(size, torch.float16, "cpu", None)
