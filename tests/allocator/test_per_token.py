"""TokenToKVPoolAllocator at its edges; random calls on it are in `conformance`."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvloom.allocator import (
    AllocatorError,
    DoubleFree,
    ForeignPage,
    GroupMisuse,
    HostCopy,
    InvalidArgument,
    MHATokenToKVPool,
    TokenToKVPoolAllocator,
)
from tests.allocator.books import books, refused


def make(size: int = 8, need_sort: bool = False) -> TokenToKVPoolAllocator:
    return TokenToKVPoolAllocator(size, torch.float16, "cpu", None, need_sort)


def drained(allocator: TokenToKVPoolAllocator) -> list[int]:
    """All that is left, which must be what was promised."""
    slots = allocator.alloc(allocator.available_size())
    assert slots is not None
    assert allocator.alloc(1) is None
    return slots.tolist()


@pytest.mark.parametrize(
    ("misuse", "error"),
    [
        (lambda a: a.alloc(-1), InvalidArgument),
        (lambda a: a.alloc(1.5), InvalidArgument),
        (lambda a: a.alloc(None), InvalidArgument),
        (lambda a: a.free([0]), ForeignPage),
        (lambda a: a.free([1, -1]), ForeignPage),
        (lambda a: a.free([1, 9]), ForeignPage),
        (lambda a: a.free([2**31 + 1]), ForeignPage),
        (lambda a: a.free([2**32 + 1]), ForeignPage),  # 1, were it cut to 32 bits
        (lambda a: a.free(np.array([2**64 - 8], np.uint64)), InvalidArgument),
        (lambda a: a.free([1, 8]), DoubleFree),  # 8 was never handed out
        (lambda a: a.free([1, 3]), DoubleFree),  # 3 waits in the group
        (lambda a: a.free([1.0]), InvalidArgument),
        (lambda a: a.free([[1, 2]]), InvalidArgument),
        (lambda a: a.free_group_begin(), GroupMisuse),
    ],
)
@pytest.mark.parametrize("need_sort", [False, True])
def test_misuse_changes_nothing(
    misuse: Callable[[TokenToKVPoolAllocator], object], error: type[AllocatorError], need_sort: bool
) -> None:
    allocator = make(8, need_sort)
    assert allocator.alloc(3) is not None
    allocator.free_group_begin()
    allocator.free([3])
    with refused(allocator.ledger, error):
        misuse(allocator)
    allocator.free_group_end()
    assert sorted(drained(allocator)) == [3, 4, 5, 6, 7, 8]


def test_first_in_first_out() -> None:
    allocator = make(4)
    assert drained(allocator) == [1, 2, 3, 4]
    allocator.free([3, 1])
    allocator.free([2])
    assert drained(allocator) == [3, 1, 2]


def test_a_group_is_one_free_in_the_order_of_its_calls() -> None:
    allocator = make(5)
    allocator.alloc(4)
    with allocator.free_group():
        allocator.free([4, 2])
        allocator.free([3])
        assert allocator.available_size() == 1
    assert drained(allocator) == [5, 4, 2, 3]
    assert allocator.statistics().groups == 1


def test_need_sort_serves_from_the_free_list_as_long_as_it_can() -> None:
    allocator = make(6, need_sort=True)
    allocator.alloc(3)
    allocator.free([2, 1])
    assert allocator.available_size() == 5
    assert allocator.alloc(3).tolist() == [4, 5, 6]  # type: ignore[union-attr]
    allocator.free([5, 4])
    assert drained(allocator) == [1, 2, 4, 5]
    assert allocator.statistics().sorts == 1


def test_nothing_to_do_is_fine() -> None:
    allocator = make()
    before = books(allocator.ledger)
    empty = allocator.alloc(0)
    assert empty is not None
    assert (empty.dtype, empty.shape) == (torch.int64, (0,))
    allocator.free(empty)
    allocator.free([])
    allocator.free_group_end()
    with allocator.free_group():
        allocator.free(torch.empty(0))
    assert books(allocator.ledger) == before


def test_sizes_and_storage() -> None:
    storage = MHATokenToKVPool(8, 1, torch.float32, 1, 2, 1, "cpu")
    allocator = TokenToKVPoolAllocator(8, torch.float32, "cpu", storage)
    assert (allocator.size, allocator.page_size, allocator.num_pages) == (8, 1, 8)
    assert allocator.get_kvcache() is storage
    slots = allocator.alloc(3)
    assert slots is not None
    storage.set_kv_buffer(0, slots, torch.ones(3, 1, 2), torch.full((3, 1, 2), 2.0))
    copy = allocator.get_cpu_copy(slots)
    allocator.load_cpu_copy(copy, torch.tensor([6, 7, 8]))
    assert storage.get_value_buffer(0)[:, 0, 0].tolist() == [0, 2, 2, 2, 0, 0, 2, 2, 2]


def test_without_a_storage_there_is_nothing_to_copy() -> None:
    allocator = make()
    assert allocator.get_kvcache() is None
    with pytest.raises(InvalidArgument):
        allocator.get_cpu_copy(torch.tensor([1]))
    with pytest.raises(InvalidArgument):
        allocator.load_cpu_copy(HostCopy(()), torch.tensor([1]))


def test_one_line_of_sizes() -> None:
    allocator = make(8)
    allocator.alloc(5)
    allocator.free_group_begin()
    allocator.free([1, 2])
    line = allocator.debug_print()
    assert "\n" not in line
    for part in ("TokenToKVPoolAllocator", "size=8", "available=3", "held=3", "leaving=2"):
        assert part in line


@pytest.mark.parametrize("size", [0, -5])
def test_a_size_that_makes_no_sense(size: int) -> None:
    with pytest.raises(InvalidArgument, match=f"size={size}"):
        make(size)
