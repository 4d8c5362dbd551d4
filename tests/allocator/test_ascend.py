"""AscendPagedTokenToKVPoolAllocator: int32 throughout, torch alone; random calls on it are in `conformance`."""

import pytest
import torch

from kvloom.allocator import AscendPagedTokenToKVPoolAllocator, InvalidArgument
from kvloom.allocator.kernels import torch_kernels
from tests.allocator.books import refused
from tests.allocator.test_cases import both_ways, drain, taken


def make(pages: int = 4, page_size: int = 4, need_sort: bool = False) -> AscendPagedTokenToKVPoolAllocator:
    return AscendPagedTokenToKVPoolAllocator(pages * page_size, page_size, torch.float16, "cpu", None, need_sort)


@both_ways
@pytest.mark.parametrize("last_dtype", [torch.int32, torch.int64])
def test_d28_every_answer_is_int32(last_dtype: torch.dtype, need_sort: bool) -> None:
    """Also after frees, in which the caller may name slots of any make, and when there is nothing to answer."""
    pool = make(8, 4, need_sort)
    for _ in range(3):
        a = taken(pool.alloc(8))
        b = taken(pool.alloc_extend([0, 0], [6, 0], torch.tensor([-1, -1], dtype=last_dtype), 6))
        c = taken(pool.alloc_decode([7], b[-1:].to(last_dtype)))
        nothing = pool.alloc(0), pool.alloc_extend([], [], [], 0), pool.alloc_decode([], [])
        for answer in (a, b, c, *map(taken, nothing)):
            assert answer.dtype == torch.int32
        with pool.free_group():
            pool.free(a.to(torch.int64))
        pool.free(torch.cat((b, c)))
    drain(pool)


@both_ways
def test_d3_short_of_pages_is_none(need_sort: bool) -> None:
    """However the pages are missing: none left, fewer than needed, or only for the last row of a batch."""
    pool = make(3, 4, need_sort)
    row = taken(pool.alloc_extend([0], [8], [-1], 8))
    before = pool.ledger.free_list().tolist()
    assert pool.alloc_extend([8, 0], [12, 1], [int(row[-1]), -1], 5) is None
    assert pool.alloc_extend([0], [13], [-1], 13) is None
    assert pool.alloc_decode([9, 5], row[[7, 3]]) is None
    assert pool.ledger.free_list().tolist() == before == [3]
    pool.alloc(4)
    assert pool.alloc(4) is None
    assert pool.alloc_decode([9], row[-1:]) is None
    assert pool.alloc_extend([0], [1], [-1], 1) is None
    assert taken(pool.alloc_extend([0], [0], [-1], 0)).shape == (0,)


def test_d36_a_row_that_grows_inside_its_partly_filled_page() -> None:
    """Alone, and beside rows that need pages; the count of new pages is never below 0."""
    pool = make(6, 4)
    row = taken(pool.alloc_extend([0], [5], [-1], 5)).tolist()
    assert taken(pool.alloc_extend([5], [7], row[-1:], 2)).tolist() == [9, 10]
    assert pool.available_size() == 16
    other = taken(pool.alloc_extend([0, 7], [5, 8], [-1, 10], 6)).tolist()
    assert other == [12, 13, 14, 15, 16, 11]
    assert taken(pool.alloc_extend([5, 0], [6, 2], [16, -1], 3)).tolist() == [17, 20, 21]
    assert pool.available_size() == 4


def test_torch_alone_wherever_it_runs() -> None:
    assert make()._kernels is torch_kernels
    assert AscendPagedTokenToKVPoolAllocator(8, 4, torch.float16, "meta", None)._kernels is torch_kernels


@pytest.mark.parametrize(("size", "page_size"), [(2**31, 2**16), (2**31, 1), (2**40, 2**20)])
def test_b07_a_size_whose_slots_exceed_int32(size: int, page_size: int) -> None:
    with pytest.raises(InvalidArgument, match=f"size={size} .*int32 ends at {2**31 - 1}"):
        AscendPagedTokenToKVPoolAllocator(size, page_size, torch.float16, "cpu", None)


def test_b07_the_largest_size_whose_slots_do_not() -> None:
    pool = AscendPagedTokenToKVPoolAllocator(2**31 - 2**16, 2**16, torch.float16, "cpu", None)
    pool.ledger.take(pool.num_pages - 1)
    page = taken(pool.alloc_extend([0], [2**16 - 1], [-1], 2**16 - 1))
    assert (int(page[0]), int(page[-1])) == (2**31 - 2**16, 2**31 - 2)
    assert taken(pool.alloc_decode([2**16], page[-1:])).tolist() == [2**31 - 1]
    assert pool.alloc_decode([2**16 + 1], [2**31 - 1]) is None


def test_refusals_are_those_of_the_paged_one() -> None:
    pool = make()
    with refused(pool.ledger, InvalidArgument):
        pool.alloc(5)
    with pytest.raises(InvalidArgument):
        make(0)
