"""KV storage and the sliding-window allocator on a device: nothing waits for it, and copies say when they are there."""

from collections.abc import Callable

import pytest
import torch

from kvloom.allocator import (
    HostCopy,
    KVCache,
    MHATokenToKVPool,
    MLATokenToKVPool,
    SWAKVPool,
    SWATokenToKVPoolAllocator,
)
from kvloom.allocator.kernels import warm_up
from kvloom.allocator.pools.base import as_integers
from tests.gpu.test_kernels import no_synchronisation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),  # says that it is a prototype
]

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
Make = Callable[[torch.dtype, torch.device], KVCache]


@pytest.fixture(scope="module")
def cuda() -> torch.device:
    device = torch.device("cuda", torch.cuda.current_device())
    warm_up(device, (torch.int64, torch.int32))
    return device


def mha(dtype: torch.dtype, device: torch.device) -> KVCache:
    return MHATokenToKVPool(64, 4, dtype, 2, 8, 3, device)


def mla(dtype: torch.dtype, device: torch.device) -> KVCache:
    return MLATokenToKVPool(64, 4, dtype, 512, 64, 3, device)


def swa(dtype: torch.dtype, device: torch.device) -> KVCache:
    """All slots are mapped, in an order of their own."""
    full = MHATokenToKVPool(64, 4, dtype, 2, 8, 1, device, layers=(1,))
    storage = SWAKVPool(full, MHATokenToKVPool(64, 4, dtype, 1, 16, 2, device, layers=(0, 2)))
    allocator = SWATokenToKVPoolAllocator(64, 64, dtype, device, storage, page_size=4)
    allocator.alloc(64)
    allocator.free([20, 8])
    allocator.alloc(8)
    return storage


def shapes(storage: KVCache, layer: int, tokens: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Of the key and the value that a layer writes."""
    if isinstance(storage, MLATokenToKVPool):
        return (tokens, 1, storage.kv_lora_rank), (tokens, 1, storage.qk_rope_head_dim)
    _, heads, dim = storage.get_key_buffer(layer).shape
    return (tokens, heads, dim), (tokens, heads, dim)


def write(storage: KVCache, loc: torch.Tensor) -> None:
    """Random numbers to slots `loc` of all layers."""
    for layer in storage.layers:
        key, value = shapes(storage, layer, len(loc))
        storage.set_kv_buffer(layer, loc, torch.randn(key, device=loc.device), torch.randn(value, device=loc.device))


def bits(copy: HostCopy) -> list[object]:
    return [as_integers(tensor).tolist() for tensor in copy.tensors]


def at(storage: KVCache, slots: torch.Tensor) -> list[object]:
    copy = storage.get_cpu_copy(slots)
    copy.wait()
    return bits(copy)


def written(storage: KVCache, slots: torch.Tensor) -> list[object]:
    """Writes and moves once whatever there is: what is loaded or pinned for the first time may wait."""
    write(storage, slots)
    storage.load_cpu_copy(storage.get_cpu_copy(slots), slots)
    storage.copy_slots(slots, slots)
    return at(storage, slots)


def keep_busy() -> None:
    """The current stream, for about a tenth of a second."""
    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]


every_storage = pytest.mark.parametrize("make", [mha, mla, swa])


@every_storage
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
def test_kv_goes_out_and_comes_back_without_waiting(
    make: Make, dtype: torch.dtype, index_dtype: torch.dtype, cuda: torch.device
) -> None:
    storage = make(dtype, cuda)
    first, second, third = torch.arange(4, 64, device=cuda, dtype=index_dtype).view(3, 20)
    written(storage, first)
    with no_synchronisation():
        write(storage, first)
        copy = storage.get_cpu_copy(first)
        storage.load_cpu_copy(copy, second)
        storage.copy_slots(second, third)
    copy.wait()
    assert all(tensor.is_pinned() for tensor in copy.tensors)
    assert {tensor.dtype for tensor in copy.tensors} == {dtype}
    assert any(as_integers(tensor).any() for tensor in copy.tensors)
    assert at(storage, first) == at(storage, second) == at(storage, third) == bits(copy)


@pytest.mark.parametrize("dtype", DTYPES)
@every_storage
def test_the_device_stores_what_the_cpu_stores(make: Make, dtype: torch.dtype, cuda: torch.device) -> None:
    torch.manual_seed(0)
    there, here = make(dtype, cuda), make(dtype, torch.device("cpu"))
    loc = torch.randperm(60)[:30] + 4
    for layer in here.layers:
        key, value = (torch.randn(shape) for shape in shapes(here, layer, len(loc)))
        here.set_kv_buffer(layer, loc, key, value)
        there.set_kv_buffer(layer, loc.to(cuda), key.to(cuda), value.to(cuda))
    everyone = torch.arange(4, 68)
    assert at(there, everyone.to(cuda)) == at(here, everyone)


@every_storage
def test_a_copy_is_of_the_moment_at_which_it_was_asked_for(make: Make, cuda: torch.device) -> None:
    storage = make(torch.bfloat16, cuda)
    slots = torch.arange(4, 24, device=cuda)
    expected = written(storage, slots)
    keep_busy()
    copy = storage.get_cpu_copy(slots)
    assert not copy.ready
    write(storage, slots)  # the slots have a new owner at once
    copy.wait()
    assert copy.ready
    assert bits(copy) == expected != at(storage, slots)


@every_storage
def test_a_stream_waits_for_a_copy_from_another(make: Make, cuda: torch.device) -> None:
    storage = make(torch.bfloat16, cuda)
    slots = torch.arange(4, 24, device=cuda)
    expected = written(storage, slots)
    torch.cuda.synchronize()
    out, back = (torch.cuda.Stream() for _ in range(2))  # type: ignore[no-untyped-call]
    with torch.cuda.stream(out):
        keep_busy()
        copy = storage.get_cpu_copy(slots)
    with torch.cuda.stream(back):
        storage.load_cpu_copy(copy, slots + 40)
    assert not copy.ready
    back.synchronize()
    assert at(storage, slots + 40) == expected


@pytest.mark.parametrize("need_sort", [False, True])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_two_pools_without_waiting(page_size: int, need_sort: bool, cuda: torch.device) -> None:
    """With host arguments; the slots and the mapping are those of the CPU."""

    def serve(allocator: SWATokenToKVPoolAllocator) -> list[torch.Tensor]:
        size = page_size
        results = [allocator.alloc(2 * size), allocator.alloc_extend([0, 0], [2 * size + 1, 1], [-1, -1], 2 * size + 2)]
        first = size  # slots are the same on both devices: known without asking
        allocator.free_swa(range(first, first + size))
        results.append(allocator.alloc_decode([2 * size + 1], [3 * size - 1]))
        with allocator.free_group():
            allocator.free(range(first, first + 2 * size))
            allocator.free_swa(range(first + 2 * size, first + 3 * size))
        results.append(allocator.alloc(2 * size))
        assert allocator.alloc(allocator.available_size() + size) is None
        results.append(allocator.translate_loc_from_full_to_swa(torch.arange(12 * size)))
        taken = [result for result in results if result is not None]
        assert len(taken) == len(results)
        return taken

    def fresh(device: torch.device) -> SWATokenToKVPoolAllocator:
        return SWATokenToKVPoolAllocator(12 * page_size, 9 * page_size, torch.half, device, None, need_sort, page_size)

    here, there = fresh(torch.device("cpu")), fresh(cuda)
    serve(there)
    there.clear()
    with no_synchronisation():
        results = serve(there)
    assert [result.tolist() for result in results] == [result.tolist() for result in serve(here)]
    assert there.full_to_swa_index_mapping.tolist() == here.full_to_swa_index_mapping.tolist()
    there.check()
