"""PagedTokenToKVPoolAllocator: groups and refusals; random calls on it are in `conformance`."""

from collections.abc import Callable

import pytest
import torch

from kvloom.allocator import (
    AllocatorError,
    DoubleFree,
    ForeignPage,
    GroupMisuse,
    InvalidArgument,
    PagedTokenToKVPoolAllocator,
)
from tests.allocator.books import books, refused


def make(pages: int = 8, page_size: int = 4, need_sort: bool = False) -> PagedTokenToKVPoolAllocator:
    return PagedTokenToKVPoolAllocator(pages * page_size, page_size, torch.float16, "cpu", None, need_sort)


def drained(allocator: PagedTokenToKVPoolAllocator) -> list[int]:
    """The first slots of all pages that are left, which must be as many as promised."""
    slots = allocator.alloc(allocator.available_size())
    assert slots is not None
    assert allocator.alloc(allocator.page_size) is None
    return slots.tolist()[:: allocator.page_size]


@pytest.mark.parametrize(
    ("misuse", "error"),
    [
        (lambda a: a.alloc(-4), InvalidArgument),
        (lambda a: a.alloc(10), InvalidArgument),
        (lambda a: a.alloc(4.0), InvalidArgument),
        (lambda a: a.alloc_extend([6], [5], [13], -1), InvalidArgument),
        (lambda a: a.alloc_extend([-1], [5], [13], 6), InvalidArgument),
        (lambda a: a.alloc_extend([6], [9], [13], 2), InvalidArgument),
        (lambda a: a.alloc_extend([6], [9], [13], 4), InvalidArgument),
        (lambda a: a.alloc_extend([6], [9], [13], 3.0), InvalidArgument),
        (lambda a: a.alloc_extend([6], [9, 1], [13], 4), InvalidArgument),
        (lambda a: a.alloc_extend([6, 0], [9, 1], [13], 4), InvalidArgument),
        (lambda a: a.alloc_extend([6.0], [9], [13], 3), InvalidArgument),
        (lambda a: a.alloc_extend([6], [2**31 + 9], [13], 2**31 + 3), InvalidArgument),
        (lambda a: a.alloc_extend([6], [9], [12], 3), InvalidArgument),  # not where a row of 6 tokens ends
        (lambda a: a.alloc_extend([6], [9], [-1], 3), InvalidArgument),
        (lambda a: a.alloc_extend([0], [9], [13], 9), InvalidArgument),
        (lambda a: a.alloc_extend([6], [9], [1], 3), InvalidArgument),  # in the dump page
        (lambda a: a.alloc_extend([6], [9], [21], 3), ForeignPage),  # in a free page
        (lambda a: a.alloc_extend([6], [9], [37], 3), ForeignPage),  # outside
        (lambda a: a.alloc_decode([7], [17]), ForeignPage),  # in a page that waits in the group
        (lambda a: a.alloc_decode([0], [-1]), InvalidArgument),
        (lambda a: a.alloc_decode([7, 7], [13]), InvalidArgument),
        (lambda a: a.alloc_decode([7], [14]), InvalidArgument),
        (lambda a: a.alloc_decode([2**31], [-1]), InvalidArgument),
        (lambda a: a.free([5, 3]), ForeignPage),
        (lambda a: a.free([5, 36]), ForeignPage),
        (lambda a: a.free([5, -1]), ForeignPage),
        (lambda a: a.free([5, 35]), DoubleFree),
        (lambda a: a.free([5, 18]), DoubleFree),
        (lambda a: a.free_group_begin(), GroupMisuse),
    ],
)
@pytest.mark.parametrize("need_sort", [False, True])
def test_misuse_changes_nothing(
    misuse: Callable[[PagedTokenToKVPoolAllocator], object], error: type[AllocatorError], need_sort: bool
) -> None:
    """A row of 6 tokens in slots 8 to 13, page 1 beside it, page 4 in an open group."""
    allocator = make(8, 4, need_sort)
    allocator.alloc(4)
    assert allocator.alloc_extend([0], [6], [-1], 6).tolist() == [8, 9, 10, 11, 12, 13]  # type: ignore[union-attr]
    allocator.alloc(4)
    allocator.free_group_begin()
    allocator.free([16])
    with refused(allocator.ledger, error):
        misuse(allocator)
    allocator.free_group_end()
    assert sorted(drained(allocator)) == [16, 20, 24, 28, 32]


@pytest.mark.parametrize(("size", "page_size"), [(8, 0), (8, -4), (8, True), (0, 4), (3, 4), (-8, 4)])
def test_sizes_that_make_no_sense(size: int, page_size: int) -> None:
    with pytest.raises(InvalidArgument, match=f"{size}|{page_size}"):
        PagedTokenToKVPoolAllocator(size, page_size, torch.float16, "cpu", None)


def test_a_remainder_of_the_size_is_no_page() -> None:
    allocator = PagedTokenToKVPoolAllocator(11, 4, torch.float16, "cpu", None)
    assert (allocator.size, allocator.num_pages, allocator.available_size()) == (11, 2, 8)
    assert drained(allocator) == [4, 8]
    with refused(allocator.ledger, ForeignPage):
        allocator.free([12])


def test_last_in_first_out_and_ascending_within_one_free() -> None:
    allocator = make(5)
    drained(allocator)
    allocator.free([21, 5, 13])
    allocator.free([8])
    assert drained(allocator) == [8, 4, 12, 20]


def test_a_group_is_one_free() -> None:
    allocator = make(5)
    drained(allocator)
    with allocator.free_group():
        allocator.free([17])
        allocator.free([4, 9])
        assert allocator.available_size() == 0
        assert allocator.alloc(4) is None
    assert drained(allocator) == [4, 8, 16]
    assert allocator.statistics().groups == 1


def test_a_group_ends_also_when_its_block_raises() -> None:
    allocator = make(4)
    drained(allocator)

    def free_twice() -> None:
        with allocator.free_group():
            allocator.free([4])
            allocator.free([5])  # of the same page

    with pytest.raises(DoubleFree):
        free_twice()
    assert drained(allocator) == [4]
    allocator.free([8])  # no group is open
    assert allocator.available_size() == 4


def test_a_group_within_a_group_is_refused_and_the_outer_one_keeps_its_pages() -> None:
    allocator = make(4)
    drained(allocator)
    with allocator.free_group():
        allocator.free([4])
        with refused(allocator.ledger, GroupMisuse), allocator.free_group():
            pytest.fail("the inner block must not run")
        allocator.free([12])
        assert allocator.available_size() == 0
    assert drained(allocator) == [4, 12]


def test_a_second_end_frees_nothing_again() -> None:
    allocator = make(4)
    drained(allocator)
    allocator.free_group_begin()
    allocator.free([4])
    allocator.free_group_end()
    assert drained(allocator) == [4]
    before = books(allocator.ledger)
    allocator.free_group_end()
    assert books(allocator.ledger) == before


def test_an_upload_or_launch_that_fails_takes_no_pages_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: object, **__: object) -> torch.Tensor:
        raise MemoryError

    verbs: list[tuple[Callable[[], object], int]] = [
        (lambda: allocator.alloc(8), 2),
        (lambda: allocator.alloc_extend([0, 4], [6, 5], [-1, 7], 7), 3),
        (lambda: allocator.alloc_decode([5], [7]), 1),
    ]
    allocator = make(4)
    allocator.alloc(4)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", out_of_memory)
        patch.setattr(torch, "from_numpy", out_of_memory)
        for verb, pages in verbs:
            before = allocator.statistics().freed.get("rollback", 0)
            with pytest.raises(MemoryError):
                verb()
            assert allocator.statistics().freed["rollback"] == before + pages
            assert allocator.ledger.free_list().tolist() == [2, 3, 4]
            allocator.ledger.check()


def test_an_estimate_for_those_who_ask() -> None:
    assert [make(page_size=4).estimated_num_new_pages(*ask) for ask in [(3, 8), (3, 9), (0, 9), (1, 0)]] == [6, 9, 0, 0]


def test_two_rows_cannot_go_on_in_one_page() -> None:
    """At a page boundary they may have the same last slot: whole pages can be shared."""
    allocator = PagedTokenToKVPoolAllocator(64, 4, torch.float32, "cpu", None)
    slots = allocator.alloc_extend([0], [4], [-1], 4)
    assert slots is not None
    last = int(slots[1])
    with pytest.raises(InvalidArgument, match="two rows"):
        allocator.alloc_decode([3, 3], [last, last])
    with pytest.raises(InvalidArgument, match="two rows"):
        allocator.alloc_extend([2, 1], [3, 3], [last, last - 1], 3)
    assert allocator.available_size() == 60
    shared = allocator.alloc_decode([5, 5], [int(slots[3])] * 2)
    assert shared is not None
    assert shared.tolist() == [8, 12]
