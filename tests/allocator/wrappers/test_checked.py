"""CheckedAllocator: what it finds, and what it does to the KV of freed pages; no answer changes: see `conformance`."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvloom.allocator import (
    BrokenInvariant,
    CheckedAllocator,
    DoubleFree,
    MHATokenToKVPool,
    MLATokenToKVPool,
    PagedTokenToKVPoolAllocator,
    StaleState,
    SWAKVPool,
    SWATokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from tests.allocator.test_cases import paged, per_token, taken


def poisoned(buffer: torch.Tensor) -> list[int]:
    """Slots of which every byte is 0xFF; the others must not have one."""
    full = buffer.view(torch.uint8).reshape(len(buffer), -1) == 0xFF
    assert torch.equal(full.all(dim=1), full.any(dim=1))
    return full.all(dim=1).nonzero().reshape(-1).tolist()


def everywhere(allocator: CheckedAllocator) -> list[int]:
    """The poisoned slots, the same in all layers, keys and values."""
    storage = allocator.get_kvcache()
    first, *others = [poisoned(buffer) for layer in storage.layers for buffer in storage.get_kv_buffer(layer)]
    assert all(other == first for other in others)
    return first


def checked(dtype: torch.dtype = torch.float16, pages: int = 4) -> CheckedAllocator:
    storage = MHATokenToKVPool(pages * 4, 4, dtype, 2, 3, 2, "cpu", layers=[5, 7])
    return CheckedAllocator(PagedTokenToKVPoolAllocator(pages * 4, 4, dtype, "cpu", storage))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8]
)
def test_who_reads_a_freed_slot_reads_nan(dtype: torch.dtype) -> None:
    allocator = checked(dtype)
    row = taken(allocator.alloc_extend([0], [6], [-1], 6))
    allocator.alloc(4)
    assert everywhere(allocator) == []
    allocator.free(row[:1])
    assert everywhere(allocator) == [4, 5, 6, 7]
    if dtype.is_floating_point:
        assert allocator.get_kvcache().get_key_buffer(5)[4:8].float().isnan().all()


def test_a_latent_storage_too() -> None:
    storage = MLATokenToKVPool(16, 4, torch.bfloat16, 4, 2, 2, "cpu")
    allocator = CheckedAllocator(PagedTokenToKVPoolAllocator(16, 4, torch.bfloat16, "cpu", storage))
    allocator.free(taken(allocator.alloc(8))[4:])
    assert everywhere(allocator) == [8, 9, 10, 11]


def test_freed_in_a_group() -> None:
    allocator = checked()
    row = taken(allocator.alloc(8))
    with allocator.free_group():
        allocator.free(row[4:])
        assert everywhere(allocator) == [8, 9, 10, 11]
    assert taken(allocator.alloc(12)).tolist() == list(range(8, 20))


def test_rolled_back_or_cleared() -> None:
    allocator = checked()
    allocator.alloc(4)
    state = allocator.backup_state()
    allocator.alloc(4)
    allocator.restore_state(state)
    assert everywhere(allocator) == [8, 9, 10, 11]
    assert taken(allocator.alloc(4)).tolist() == [8, 9, 10, 11]
    allocator.clear()
    assert everywhere(allocator) == list(range(4, 12))
    assert taken(allocator.alloc(16)).tolist() == list(range(4, 20))


def test_a_refused_free_poisons_nothing() -> None:
    allocator = checked()
    allocator.alloc(4)
    with pytest.raises(DoubleFree):
        allocator.free([4, 8])
    assert everywhere(allocator) == []


def window_pool(full: int = 4, window: int = 4) -> CheckedAllocator:
    storages = [
        MHATokenToKVPool(n * 4, 4, torch.float16, 1, 2, 1, "cpu", layers=[i]) for i, n in enumerate((full, window))
    ]
    storage = SWAKVPool(*storages)
    return CheckedAllocator(SWATokenToKVPoolAllocator(full * 4, window * 4, torch.float16, "cpu", storage, page_size=4))


def test_each_pool_of_a_window_allocator() -> None:
    """Layer 0 is in the full pool, layer 1 in the window pool, whose slots are others."""
    allocator = window_pool(full=4, window=3)
    storage = allocator.get_kvcache()
    first = taken(allocator.alloc(4))
    allocator.free_swa(taken(allocator.alloc(4)))
    assert [poisoned(storage.get_key_buffer(layer)) for layer in (0, 1)] == [[], [8, 9, 10, 11]]
    third = taken(allocator.alloc(4))
    assert third.tolist() == [12, 13, 14, 15]
    assert allocator.translate_loc_from_full_to_swa(third).tolist() == [8, 9, 10, 11]
    allocator.free(torch.cat((first, third)))
    assert poisoned(storage.get_key_buffer(0)) == [4, 5, 6, 7, 12, 13, 14, 15]
    assert poisoned(storage.get_key_buffer(1)) == [4, 5, 6, 7, 8, 9, 10, 11]


def test_a_window_page_that_has_moved_on_is_its_new_owners() -> None:
    allocator = window_pool(full=4, window=2)
    keys = allocator.get_kvcache().get_key_buffer(1)
    first = taken(allocator.alloc(4))
    allocator.free_swa(first)
    second = taken(allocator.alloc(8))
    keys[:] = 1
    allocator.free(first)
    assert poisoned(keys) == []
    allocator.free_swa(second[:4])
    assert poisoned(keys) == [4, 5, 6, 7]


def test_without_a_storage_there_is_nothing_to_poison() -> None:
    allocator = CheckedAllocator(paged(4, 4))
    allocator.free(taken(allocator.alloc(8)))
    assert allocator.available_size() == 16


def double_free(allocator: Any) -> None:
    """A ledger that has lost track: pages 1 and 2, which are live, are in the free list."""
    books = allocator.ledger._books
    books.free.push_front(np.array([1, 2], np.int32))


def misplace(slot: int) -> Callable[[Any], None]:
    def damage(allocator: Any) -> None:
        make = allocator.inner._to_tensor
        allocator.inner._to_tensor = lambda slots: make(np.full_like(slots, slot))

    return damage


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (double_free, r"\[4, 5, 6, 7\] that are in use"),
        (misplace(4), "in use"),
        (misplace(20), "twice"),
        (misplace(0), r"\[0, 0, 0, 0\] that are not its own"),
        (misplace(3), "not its own"),
        (misplace(-1), "not its own"),
        (misplace(36), "not its own"),
    ],
)
def test_a_hand_out_that_must_not_be(damage: Callable[[Any], None], match: str) -> None:
    allocator = checked(pages=8)
    allocator.alloc(8)
    damage(allocator)
    with pytest.raises(BrokenInvariant, match=match):
        allocator.alloc(4)


def test_a_page_that_waits_in_a_group_is_not_free_yet() -> None:
    allocator = checked(pages=8)
    allocator.alloc(8)
    allocator.free_group_begin()
    allocator.free([4, 8])
    double_free(allocator)
    with pytest.raises(BrokenInvariant, match="in use"):
        allocator.alloc(4)


def test_a_window_page_with_two_owners() -> None:
    allocator = window_pool()
    allocator.alloc(8)
    allocator.swa_ledger._books.free.push_front(np.array([2, 1], np.int32))
    with pytest.raises(BrokenInvariant, match=r"pool 'swa' hands out slots \[8, 9, 10, 11\] that are in use"):
        allocator.alloc(4)


def test_decode_into_a_slot_that_is_in_use() -> None:
    """The page's owner is trusted with his last slot; giving the same one twice is found."""
    allocator = CheckedAllocator(paged(4, 4))
    row = taken(allocator.alloc_extend([0], [2], [-1], 2))
    allocator.alloc_decode([3], row[-1:])
    with pytest.raises(BrokenInvariant, match=r"\[6\]"):
        allocator.alloc_decode([3], row[-1:])


def test_states_are_taken_through_it() -> None:
    inner = per_token(8)
    allocator = CheckedAllocator(inner)
    with pytest.raises(StaleState, match="CheckedAllocator"):
        allocator.restore_state(inner.backup_state())


def test_what_is_no_verb_is_forwarded() -> None:
    inner = per_token(8)
    allocator = CheckedAllocator(CheckedAllocator(inner))
    assert (allocator.size, allocator.page_size, allocator.device) == (8, 1, inner.device)
    assert allocator.ledger is inner.ledger
    assert allocator.debug_print() == inner.debug_print()
    with pytest.raises(AttributeError, match="alloc_decode"):
        allocator.alloc_decode([1], [-1])
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = allocator.no_such_thing
    assert isinstance(inner, TokenToKVPoolAllocator)
