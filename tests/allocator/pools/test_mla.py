"""The KV storage of multi-head latent attention."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from kvloom.allocator.errors import InvalidArgument
from kvloom.allocator.pools import KVCache, MLATokenToKVPool

RANK, ROPE = 6, 3
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def pool(**changes: Any) -> MLATokenToKVPool:
    given: Mapping[str, Any] = {
        "size": 32, "page_size": 4, "dtype": torch.float32, "kv_lora_rank": RANK, "qk_rope_head_dim": ROPE,
        "layer_num": 3, "device": "cpu",
    }  # fmt: skip
    return MLATokenToKVPool(**{**given, **changes})


def tokens(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Latent and rotated part, cut from one tensor as a fused projection gives them, hence not contiguous."""
    fused = torch.randn(count, 1, RANK + ROPE, generator=torch.Generator().manual_seed(seed))
    return fused[..., :RANK], fused[..., RANK:]


def test_one_row_per_token_and_layer_and_a_dump_page() -> None:
    storage = pool()
    assert isinstance(storage, KVCache)
    for layer in storage.layers:
        key_buffer, value_buffer = storage.get_kv_buffer(layer)
        assert key_buffer.shape == (32 + 4, 1, RANK + ROPE)
        assert value_buffer.shape == (32 + 4, 1, RANK)
        assert value_buffer.data_ptr() == key_buffer.data_ptr()
        assert not key_buffer.any()
    assert storage.bytes_per_token == 3 * (RANK + ROPE) * 4
    assert storage.nbytes == 36 * storage.bytes_per_token
    assert pool(dtype=torch.float8_e5m2).bytes_per_token == 3 * (RANK + ROPE)
    assert pool(page_size=1).get_key_buffer(0).shape[0] == 33


@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_written_is_there_and_nowhere_else(dtype: torch.dtype, index_dtype: torch.dtype) -> None:
    storage = pool(dtype=dtype)
    loc = torch.tensor([35, 4, 17], dtype=index_dtype)
    latent, rotated = tokens(3)
    storage.set_kv_buffer(1, loc, latent, rotated)
    rows, values = (buffer.float() for buffer in storage.get_kv_buffer(1))
    assert torch.equal(values[loc], latent.to(dtype).float())
    assert torch.equal(rows[loc], torch.cat((latent, rotated), -1).to(dtype).float())
    assert int((rows != 0).any(dim=(1, 2)).sum()) == 3
    for other in (0, 2):
        assert not storage.get_key_buffer(other).float().any()


def test_a_model_may_have_no_rotated_part_and_its_own_layer_indices() -> None:
    storage = pool(qk_rope_head_dim=0, layer_num=2, layers=(7, 3))
    latent = tokens(1)[0]
    storage.set_kv_buffer(3, torch.tensor([5]), latent, torch.empty(1, 1, 0))
    assert torch.equal(storage.get_key_buffer(3)[5], latent[0])
    assert not storage.get_key_buffer(7).any()
    with pytest.raises(InvalidArgument, match=r"no layer 0 here; the layers are \[7, 3\]"):
        storage.set_kv_buffer(0, torch.tensor([5]), latent, torch.empty(1, 1, 0))


@pytest.mark.parametrize(
    ("latent_shape", "rotated_shape", "slots"),
    [
        ((2, 1, RANK), (2, 1, ROPE), [4]),
        ((1, 1, RANK), (2, 1, ROPE), [4]),
        ((1, 1, RANK + ROPE), (1, 1, ROPE), [4]),
        ((1, 1, RANK), (1, 1, RANK), [4]),
        ((1, RANK), (1, ROPE), [4]),
        ((1, 2, RANK), (1, 2, ROPE), [4]),
        ((1, 1, 1, RANK), (1, 1, 1, ROPE), [[4]]),
    ],
)
def test_shapes_that_do_not_fit_write_nothing(
    latent_shape: tuple[int, ...], rotated_shape: tuple[int, ...], slots: list[int]
) -> None:
    storage = pool()
    with pytest.raises(InvalidArgument, match=r"for .* slots of 6 and 3"):
        storage.set_kv_buffer(0, torch.tensor(slots), torch.ones(latent_shape), torch.ones(rotated_shape))
    assert not storage.get_key_buffer(0).any()


@pytest.mark.parametrize(
    "changes",
    [
        {"size": 0}, {"page_size": 0}, {"kv_lora_rank": 0}, {"qk_rope_head_dim": -1}, {"layers": (1, 2)},
        {"layers": (1, 1, 2)}, {"layer_num": -1},
    ],
)  # fmt: skip
def test_numbers_that_make_no_sense_are_refused(changes: Mapping[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        pool(**changes)
