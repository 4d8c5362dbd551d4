"""KV to the host and back, and from slot to slot: the same for every storage."""

import dataclasses
from collections.abc import Callable
from typing import cast

import pytest
import torch

from kvloom.allocator import SWATokenToKVPoolAllocator
from kvloom.allocator.errors import InvalidArgument
from kvloom.allocator.pools import HostCopy, KVCache, MHATokenToKVPool, MLATokenToKVPool, SWAKVPool
from kvloom.allocator.pools.base import as_integers

Make = Callable[[torch.dtype], KVCache]


def mha(dtype: torch.dtype) -> KVCache:
    return MHATokenToKVPool(32, 4, dtype, 2, 5, 3, "cpu")


def mla(dtype: torch.dtype) -> KVCache:
    return MLATokenToKVPool(32, 4, dtype, 6, 3, 2, "cpu")


def swa(dtype: torch.dtype) -> KVCache:
    """All 32 slots are mapped, in an order of their own."""
    full = MHATokenToKVPool(32, 4, dtype, 2, 5, 1, "cpu", layers=(1,))
    storage = SWAKVPool(full, MHATokenToKVPool(32, 4, dtype, 1, 4, 2, "cpu", layers=(0, 2)))
    allocator = SWATokenToKVPoolAllocator(32, 32, dtype, "cpu", storage, page_size=4)
    slots = allocator.alloc(32)
    allocator.free([20, 8])
    assert slots is not None
    assert allocator.alloc(8) is not None
    return storage


def state(storage: KVCache) -> list[torch.Tensor]:
    """All bytes, by layer."""
    return [as_integers(buffer).clone() for layer in storage.layers for buffer in storage.get_kv_buffer(layer)]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def at(storage: KVCache, slots: torch.Tensor) -> list[torch.Tensor]:
    """The KV of full slots, by layer."""
    found = []
    for layer in storage.layers:
        window = isinstance(storage, SWAKVPool) and layer in storage.swa.layers
        mapping = storage.full_to_swa_index_mapping if isinstance(storage, SWAKVPool) else None
        rows = mapping[slots] if window and mapping is not None else slots
        found += [as_integers(buffer)[rows] for buffer in storage.get_kv_buffer(layer)]
    return found


def fill(storage: KVCache) -> None:
    """Another number everywhere, whatever the dtype; among them NaNs."""
    generator = torch.Generator().manual_seed(0)
    for layer in storage.layers:
        for buffer in storage.get_kv_buffer(layer):
            numbers = as_integers(buffer)
            numbers.copy_(torch.randint(-128, 127, numbers.shape, generator=generator).to(numbers.dtype))


every_storage = pytest.mark.parametrize("make", [mha, mla, swa])
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])


@every_storage
@every_dtype
def test_a_copy_comes_back_to_other_slots(make: Make, dtype: torch.dtype) -> None:
    storage = make(dtype)
    fill(storage)
    source, target = torch.tensor([6, 4, 9]), torch.tensor([20, 30, 11], dtype=torch.int32)
    expected = at(storage, source)
    copy = storage.get_cpu_copy(source)
    assert copy.ready
    assert {tensor.dtype for tensor in copy.tensors} == {dtype}
    assert copy.nbytes == 3 * storage.bytes_per_token
    for layer in storage.layers:
        for buffer in storage.get_kv_buffer(layer):
            as_integers(buffer).fill_(0)  # the copy is no view
    storage.load_cpu_copy(copy, target)
    assert same(at(storage, target), expected)
    others = torch.tensor([slot for slot in range(36) if slot not in (20, 30, 11)])
    assert not any(part.any() for part in at(storage, others))


@every_storage
@every_dtype
def test_slots_are_copied_to_slots(make: Make, dtype: torch.dtype) -> None:
    storage = make(dtype)
    fill(storage)
    source, target = torch.tensor([4, 5, 6], dtype=torch.int32), torch.tensor([5, 6, 21])  # overlapping
    expected = at(storage, source)
    kept = torch.tensor([4, *range(7, 21), *range(22, 36)])
    rest = at(storage, kept)
    storage.copy_slots(source, target)
    assert same(at(storage, target), expected)
    assert same(at(storage, kept), rest)


@every_storage
def test_no_slots_are_fine(make: Make) -> None:
    storage = make(torch.bfloat16)
    fill(storage)
    before = state(storage)
    nothing = torch.empty(0, dtype=torch.int64)
    copy = storage.get_cpu_copy(nothing)
    assert copy.nbytes == 0
    storage.load_cpu_copy(copy, nothing)
    storage.copy_slots(nothing, nothing)
    assert same(state(storage), before)


@every_storage
def test_what_does_not_fit_changes_nothing(make: Make) -> None:
    storage = make(torch.bfloat16)
    fill(storage)
    slots = torch.tensor([4, 5])
    others = [other(dtype) for other in (mha, mla, swa) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
    wrong = [
        other.get_cpu_copy(slots) for other in others if (type(other), other.dtype) != (type(storage), storage.dtype)
    ]
    own = storage.get_cpu_copy(slots)
    cut = HostCopy(tuple(tensor[:1] for tensor in own.tensors))
    before = state(storage)
    for copy in (*wrong, cut, HostCopy(())):
        with pytest.raises(InvalidArgument, match="a copy of"):
            storage.load_cpu_copy(copy, slots)
    for count in (slots[:1], torch.tensor([4, 5, 6]), slots[None]):
        with pytest.raises(InvalidArgument, match="a copy of"):
            storage.load_cpu_copy(own, count)
        with pytest.raises(InvalidArgument, match="cannot be copied"):
            storage.copy_slots(slots, count)
    assert same(state(storage), before)


class Event:
    """Stands in for a device's: what it is about arrives when somebody waits for it."""

    def __init__(self, arrive: Callable[[], object]) -> None:
        self.arrive, self.over = arrive, False

    def query(self) -> bool:
        return self.over

    def synchronize(self) -> None:
        self.arrive()
        self.over = True


def late(copy: HostCopy) -> HostCopy:
    """The same, but not there yet."""
    here = [tensor.clone() for tensor in copy.tensors]
    for tensor in copy.tensors:
        tensor.zero_()
    event = Event(lambda: [tensor.copy_(right) for tensor, right in zip(copy.tensors, here, strict=True)])
    return HostCopy(copy.tensors, cast(torch.Event, event))


def test_a_copy_says_when_it_is_there() -> None:
    storage = mha(torch.bfloat16)
    here = storage.get_cpu_copy(torch.tensor([4]))
    assert here.ready
    here.wait()
    copy = late(here)
    assert not copy.ready
    copy.wait()
    assert copy.ready
    with pytest.raises(dataclasses.FrozenInstanceError):
        copy.event = None


@every_storage
def test_a_storage_on_the_cpu_waits_for_a_copy_before_it_reads_it(make: Make) -> None:
    storage = make(torch.float16)
    fill(storage)
    slots = torch.tensor([4, 9])
    expected = at(storage, slots)
    storage.load_cpu_copy(late(storage.get_cpu_copy(slots)), slots + 4)
    assert same(at(storage, slots + 4), expected)
