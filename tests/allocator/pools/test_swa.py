"""The KV storage of full and sliding-window layers together."""

import pytest
import torch

from kvloom.allocator import SWATokenToKVPoolAllocator
from kvloom.allocator.errors import InvalidArgument
from kvloom.allocator.pools import KVCache, MHATokenToKVPool, SWAKVPool

FULL_LAYERS, SWA_LAYERS = (1, 3), (0, 2, 4)


def storage_of(
    size: int, layers: tuple[int, ...], page_size: int = 4, dtype: torch.dtype = torch.float32
) -> MHATokenToKVPool:
    return MHATokenToKVPool(size, page_size, dtype, 2, 8, len(layers), "cpu", layers=layers)


def pool(full_size: int = 32, swa_size: int = 16) -> SWAKVPool:
    return SWAKVPool(storage_of(full_size, FULL_LAYERS), storage_of(swa_size, SWA_LAYERS))


def mapped() -> tuple[SWAKVPool, SWATokenToKVPoolAllocator]:
    storage = pool()
    return storage, SWATokenToKVPoolAllocator(32, 16, torch.float32, "cpu", storage, page_size=4)


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 2, 8, generator=torch.Generator().manual_seed(seed))


def test_layers_go_to_their_storage() -> None:
    storage = pool()
    assert isinstance(storage, KVCache)
    assert storage.layers == (1, 3, 0, 2, 4)
    for layer in FULL_LAYERS:
        assert storage.get_key_buffer(layer).shape[0] == 36
        assert storage.get_value_buffer(layer).data_ptr() == storage.full.get_value_buffer(layer).data_ptr()
    for layer in SWA_LAYERS:
        assert storage.get_key_buffer(layer).shape[0] == 20
        assert storage.get_value_buffer(layer).data_ptr() == storage.swa.get_value_buffer(layer).data_ptr()
    with pytest.raises(InvalidArgument, match="no layer 5 here"):
        storage.get_kv_buffer(5)


def test_sizes() -> None:
    storage = pool()
    assert (storage.size, storage.page_size, storage.dtype) == (32, 4, torch.float32)
    assert storage.nbytes == storage.full.nbytes + storage.swa.nbytes == 2 * 16 * 4 * (2 * 36 + 3 * 20)
    assert storage.bytes_per_token == 2 * 16 * 4 * 5


@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
def test_kv_of_full_slots_lies_in_the_peers_of_window_layers(index_dtype: torch.dtype) -> None:
    storage, allocator = mapped()
    allocator.alloc(4)
    first = allocator.alloc(4)
    assert first is not None
    allocator.free_swa(first)  # so that full and window slots differ from here on
    slots = allocator.alloc(8)
    assert slots is not None
    window = allocator.translate_loc_from_full_to_swa(slots)
    assert window.tolist() != slots.tolist()
    for layer in storage.layers:
        storage.set_kv_buffer(layer, slots.to(index_dtype), tokens(8, layer), -tokens(8, layer))
    for layer in storage.layers:
        at = window if layer in SWA_LAYERS else slots
        assert torch.equal(storage.get_key_buffer(layer)[at], tokens(8, layer))
        assert torch.equal(storage.get_value_buffer(layer)[at], -tokens(8, layer))
        assert int((storage.get_key_buffer(layer) != 0).any(dim=(1, 2)).sum()) == 8


def test_what_has_left_the_window_is_written_to_the_dump() -> None:
    storage, allocator = mapped()
    slots = allocator.alloc(8)
    assert slots is not None
    allocator.free_swa(slots[:4])
    storage.set_kv_buffer(0, slots, tokens(8), tokens(8))
    assert not storage.get_key_buffer(0)[4:8].any()
    assert torch.equal(storage.get_key_buffer(0)[8:12], tokens(8)[4:])


def test_the_mapping_is_the_allocators_own() -> None:
    storage, allocator = mapped()
    assert storage.full_to_swa_index_mapping is allocator.full_to_swa_index_mapping


def test_before_there_is_an_allocator() -> None:
    """Full layers work, window layers are refused, and nothing is half done."""
    storage = pool()
    assert storage.full_to_swa_index_mapping is None
    slots = torch.tensor([4, 5])
    storage.set_kv_buffer(1, slots, tokens(2), tokens(2))
    copy = mapped()[0].get_cpu_copy(slots)
    before = storage.get_key_buffer(1).clone()
    for verb in (
        lambda: storage.set_kv_buffer(0, slots, tokens(2), tokens(2)),
        lambda: storage.get_cpu_copy(slots),
        lambda: storage.load_cpu_copy(copy, slots),
        lambda: storage.copy_slots(slots, slots + 4),
    ):
        with pytest.raises(InvalidArgument, match="no allocator"):
            verb()
    assert torch.equal(storage.get_key_buffer(1), before)
    assert not storage.get_key_buffer(0).any()


def test_shapes_that_do_not_fit_write_nothing() -> None:
    storage, _ = mapped()
    for layer in (0, 1):
        with pytest.raises(InvalidArgument, match=r"for .* slots"):
            storage.set_kv_buffer(layer, torch.tensor([4, 5]), tokens(2), tokens(1))
        assert not storage.get_key_buffer(layer).any()


def test_storages_that_do_not_go_together() -> None:
    full = storage_of(32, FULL_LAYERS)
    with pytest.raises(InvalidArgument, match="twice"):
        SWAKVPool(full, storage_of(16, (0, 3)))
    with pytest.raises(InvalidArgument, match="pages of 4 on cpu, swa of 1"):
        SWAKVPool(full, storage_of(16, SWA_LAYERS, page_size=1))
    with pytest.raises(InvalidArgument, match="meta"):
        SWAKVPool(full, MHATokenToKVPool(16, 4, torch.float32, 2, 8, 1, "meta", layers=(0,)))
