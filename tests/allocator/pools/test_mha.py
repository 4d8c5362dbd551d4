"""The KV storage of multi-head attention."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from kvloom.allocator.errors import InvalidArgument
from kvloom.allocator.pools import KVCache, MHATokenToKVPool

HEADS, DIM = 2, 8


def pool(**changes: Any) -> MHATokenToKVPool:
    given: Mapping[str, Any] = {
        "size": 32, "page_size": 4, "dtype": torch.float32, "head_num": HEADS, "head_dim": DIM, "layer_num": 3,
        "device": "cpu",
    }  # fmt: skip
    return MHATokenToKVPool(**{**given, **changes})


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, HEADS, DIM, generator=torch.Generator().manual_seed(seed))


def test_buffers_have_a_dump_page_and_start_as_zeros() -> None:
    storage = pool()
    assert isinstance(storage, KVCache)
    for layer in storage.layers:
        for buffer in storage.get_kv_buffer(layer):
            assert buffer.shape == (32 + 4, HEADS, DIM)
            assert buffer.is_contiguous()
            assert not buffer.any()
    assert storage.bytes_per_token == 2 * 3 * HEADS * DIM * 4
    assert storage.nbytes == 36 * storage.bytes_per_token
    assert (storage.size, storage.page_size) == (32, 4)
    assert (storage.dtype, storage.device) == (torch.float32, torch.device("cpu"))


def test_page_size_1_has_one_row_more_than_tokens() -> None:
    assert pool(page_size=1).get_key_buffer(0).shape[0] == 33


@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
def test_what_is_written_is_there_and_nowhere_else(index_dtype: torch.dtype) -> None:
    storage = pool()
    loc = torch.tensor([35, 4, 17], dtype=index_dtype)
    key, value = tokens(3), tokens(3, seed=1)
    storage.set_kv_buffer(1, loc, key, value)
    assert torch.equal(storage.get_key_buffer(1)[loc], key)
    assert torch.equal(storage.get_value_buffer(1)[loc], value)
    assert int((storage.get_key_buffer(1) != 0).any(dim=(1, 2)).sum()) == 3
    assert not storage.get_key_buffer(0).any()
    assert not storage.get_value_buffer(2).any()


def test_layers_are_known_by_the_models_indices() -> None:
    storage = pool(layer_num=2, layers=(7, 3))
    storage.set_kv_buffer(3, torch.tensor([5]), tokens(1), tokens(1))
    assert storage.layers == (7, 3)
    assert storage.get_key_buffer(3).any()
    assert not storage.get_key_buffer(7).any()
    with pytest.raises(InvalidArgument, match=r"no layer 0 here; the layers are \[7, 3\]"):
        storage.get_kv_buffer(0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2])
def test_kv_is_cast_to_the_pools_dtype(dtype: torch.dtype) -> None:
    storage = pool(dtype=dtype)
    key = tokens(2)
    storage.set_kv_buffer(0, torch.tensor([4, 5]), key, -key)
    assert torch.equal(storage.get_key_buffer(0)[4:6].float(), key.to(dtype).float())
    assert torch.equal(storage.get_value_buffer(0)[4:6].float(), (-key).to(dtype).float())


def test_buffers_are_views() -> None:
    storage = pool()
    storage.get_value_buffer(2)[9] = 1.5
    assert (storage.get_kv_buffer(2)[1][9] == 1.5).all()


def test_no_layers_take_no_memory() -> None:
    storage = pool(size=10**12, layer_num=0, head_num=0, head_dim=0)
    assert storage.nbytes == 0
    assert storage.layers == ()
    assert storage.get_cpu_copy(torch.tensor([3, 4])).nbytes == 0
    storage.load_cpu_copy(storage.get_cpu_copy(torch.tensor([3, 4])), torch.tensor([3, 4]))


@pytest.mark.parametrize(
    ("key_shape", "value_shape", "slots"),
    [
        ((2, HEADS, DIM), (2, HEADS, DIM), [4]),
        ((1, HEADS, DIM), (2, HEADS, DIM), [4]),
        ((1, HEADS, DIM + 1), (1, HEADS, DIM + 1), [4]),
        ((1, HEADS * DIM), (1, HEADS * DIM), [4]),
        ((1, 1, HEADS, DIM), (1, 1, HEADS, DIM), [[4]]),
    ],
)
def test_shapes_that_do_not_fit_write_nothing(
    key_shape: tuple[int, ...], value_shape: tuple[int, ...], slots: list[int]
) -> None:
    storage = pool()
    with pytest.raises(InvalidArgument, match=r"for .* slots"):
        storage.set_kv_buffer(0, torch.tensor(slots), torch.ones(key_shape), torch.ones(value_shape))
    assert not storage.get_key_buffer(0).any()
    assert not storage.get_value_buffer(0).any()


@pytest.mark.parametrize(
    "changes",
    [
        {"size": 0}, {"page_size": 0}, {"head_num": -1}, {"head_dim": -1}, {"layers": (1, 2)}, {"layers": (1, 1, 2)},
        {"layer_num": -1},
    ],
)  # fmt: skip
def test_numbers_that_make_no_sense_are_refused(changes: Mapping[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        pool(**changes)
