"""TokenToKVPoolAllocator against a naive twin written from its description, then its edges."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvloom.allocator import (
    AllocatorError,
    DoubleFree,
    ForeignPage,
    GroupMisuse,
    InvalidArgument,
    MHATokenToKVPool,
    TokenToKVPoolAllocator,
)
from tests.allocator.books import books, refused

CONTAINERS: tuple[Callable[[list[int]], Sequence[int] | np.ndarray | torch.Tensor], ...] = (
    list,
    lambda slots: np.array(slots, np.int32),
    lambda slots: torch.tensor(slots, dtype=torch.int64),
    lambda slots: torch.tensor(slots, dtype=torch.int32),
)  # fmt: skip


def make(size: int = 8, need_sort: bool = False) -> TokenToKVPoolAllocator:
    return TokenToKVPoolAllocator(size, torch.float16, "cpu", None, need_sort)


def drained(allocator: TokenToKVPoolAllocator) -> list[int]:
    """All that is left, which must be what was promised."""
    slots = allocator.alloc(allocator.available_size())
    assert slots is not None
    assert allocator.alloc(1) is None
    return slots.tolist()


class NaiveTokens:
    """Fresh list 1 .. size; taken from the front, freed to the end, or to a released list until that is needed."""

    def __init__(self, size: int, need_sort: bool) -> None:
        self.free_slots = list(range(1, size + 1))
        self.released: list[int] = []
        self.need_sort = need_sort
        self.group: list[int] | None = None

    def available_size(self) -> int:
        return len(self.free_slots) + len(self.released)

    def alloc(self, count: int) -> list[int] | None:
        if count > self.available_size():
            return None
        if count > len(self.free_slots):
            self.free_slots, self.released = sorted(self.free_slots + self.released), []
        taken, self.free_slots = self.free_slots[:count], self.free_slots[count:]
        return taken

    def free(self, slots: list[int]) -> None:
        if self.group is not None:
            self.group += slots
        elif self.need_sort:
            self.released += slots
        else:
            self.free_slots += slots

    def end_group(self) -> None:
        slots, self.group = self.group or [], None
        self.free(slots)


class TokenMachine(RuleBasedStateMachine):
    """Random legal calls give the same slots in the same order."""

    @initialize(size=st.integers(1, 12), need_sort=st.booleans(), count=st.integers(0, 12))
    def make(self, size: int, need_sort: bool, count: int) -> None:
        self.size = size
        self.ours = make(size, need_sort)
        self.twin = NaiveTokens(size, need_sort)
        self.live: list[int] = []
        self.alloc(count)

    @rule(count=st.integers(0, 13))
    def alloc(self, count: int) -> None:
        slots = self.ours.alloc(count)
        assert (None if slots is None else slots.tolist()) == self.twin.alloc(count)
        if slots is not None:
            assert slots.dtype == torch.int64
            self.live += slots.tolist()

    @precondition(lambda self: self.live)
    @rule(data=st.data(), container=st.sampled_from(CONTAINERS))
    def free(self, data: st.DataObject, container: Callable[[list[int]], list[int]]) -> None:
        slots = data.draw(st.lists(st.sampled_from(self.live), unique=True, min_size=1))
        self.ours.free(container(slots))
        self.twin.free(slots)
        self.live = [slot for slot in self.live if slot not in slots]

    @rule()
    def alloc_all(self) -> None:
        self.alloc(self.twin.available_size())

    @rule()
    def group(self) -> None:
        """Begin one, or end the one that is open."""
        if self.twin.group is None:
            self.ours.free_group_begin()
            self.twin.group = []
        else:
            self.ours.free_group_end()
            self.twin.end_group()

    @invariant()
    def same(self) -> None:
        assert self.ours.available_size() == self.twin.available_size()
        assert self.ours.ledger.free_list().tolist() == self.twin.free_slots + self.twin.released
        self.ours.ledger.check()

    def teardown(self) -> None:
        if hasattr(self, "ours"):
            self.ours.free_group_end()
            self.ours.free(self.live)
            assert sorted(drained(self.ours)) == list(range(1, self.size + 1))


TestTokens = TokenMachine.TestCase
TestTokens.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


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
        (lambda a: a.free(np.array([2**64 - 8], np.uint64)), ForeignPage),
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
        allocator.load_cpu_copy(None, torch.tensor([1]))


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
