"""Very long prompts (case B06); that no size compiles anew is seen on a device: `tests/gpu/test_allocators.py`."""

import pytest
import torch

from kvloom.allocator import AscendPagedTokenToKVPoolAllocator, PagedTokenToKVPoolAllocator
from tests.allocator.test_cases import taken

both_kernels = pytest.mark.parametrize("cls", [PagedTokenToKVPoolAllocator, AscendPagedTokenToKVPoolAllocator])


@both_kernels
@pytest.mark.parametrize(("pages", "tokens"), [(70_000, 1_048_577), (200_000, 3_000_000)])
def test_one_prompt(cls: type[PagedTokenToKVPoolAllocator], pages: int, tokens: int) -> None:
    pool = cls(pages * 16, 16, torch.float16, "cpu", None)
    before = pool.available_size()
    slots = taken(pool.alloc_extend([0], [tokens], [-1], tokens))
    assert torch.equal(slots, torch.arange(16, 16 + tokens, dtype=cls.index_dtype))
    assert before - pool.available_size() == -(-tokens // 16) * 16
    pool.free(slots)
    assert pool.available_size() == before


@both_kernels
def test_a_long_prompt_in_pages_that_lie_apart_beside_short_ones(cls: type[PagedTokenToKVPoolAllocator]) -> None:
    pool = cls(70_000 * 16, 16, torch.float16, "cpu", None)
    pool.alloc(20_000 * 16)
    pool.free(range(16, 20_001 * 16, 32))  # every other page
    row = taken(pool.alloc_extend([0, 0, 0], [3, 400_001, 1], [-1] * 3, 400_005)).tolist()
    odd, beyond = range(1, 20_001, 2), range(20_001, 60_000)
    pages = [*odd, *beyond][: 3 + 25_001]
    expected = [page * 16 + i for page in pages[1:25_002] for i in range(16)][:400_001]
    assert row == [16, 17, 18, *expected, pages[25_002] * 16]
