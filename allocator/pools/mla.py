"""KV storage of multi-head latent attention (DeepSeek-V2): one compressed row per token, shared by all heads."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvloom.allocator.errors import InvalidArgument
from kvloom.allocator.pools.base import KVCache, as_integers


class MLATokenToKVPool(KVCache):
    """Rows [size + page_size, 1, kv_lora_rank + qk_rope_head_dim] of each of `layer_num` layers.

    layers  the model's own indices of those layers, 0 .. layer_num - 1 if not given

    A row is the compressed latent, from which a model makes the keys and values of all heads, then the part of the key
    that is rotated.  Keys are whole rows, values the latent alone: its first `kv_lora_rank` numbers, a view of the
    same memory.  All of it is one buffer [layer, slot, 1, number]; a token takes
    layer_num * (kv_lora_rank + qk_rope_head_dim) numbers of `dtype`.  Memory starts as zeros, as in every storage.
    Raises InvalidArgument when the numbers make no sense.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        layer_num: int,
        device: torch.device | str,
        layers: Sequence[int] | None = None,
    ) -> None:
        super().__init__(size, page_size, dtype, device, layer_num, layers)
        if kv_lora_rank < 1 or qk_rope_head_dim < 0:
            raise InvalidArgument(f"kv_lora_rank={kv_lora_rank} below 1 or qk_rope_head_dim={qk_rope_head_dim} below 0")
        self.kv_lora_rank = kv_lora_rank
        self.qk_rope_head_dim = qk_rope_head_dim
        shape = (layer_num, size + page_size, 1, kv_lora_rank + qk_rope_head_dim)
        buffer = torch.zeros(shape, dtype=dtype, device=self.device)
        self._buffers = (buffer,)
        self._by_layer = {
            layer: (rows, rows[..., :kv_lora_rank]) for layer, rows in zip(self.layers, buffer.unbind(), strict=True)
        }

    def set_kv_buffer(self, layer: int, loc: Tensor, key: Tensor, value: Tensor) -> None:
        """Write T rows to slots `loc` [T] of a layer, cast to `dtype`.

        key    [T, 1, kv_lora_rank], the compressed latent, which is what `get_value_buffer` gives back
        value  [T, 1, qk_rope_head_dim], the rotated part of the key; `get_key_buffer` gives both, side by side

        Mutates the buffers.  Raises InvalidArgument, before anything is written, for a layer that is not here or
        shapes that do not fit.
        """
        rows = as_integers(self.get_key_buffer(layer))
        tokens, rank = tuple(loc.shape), self.kv_lora_rank
        if len(tokens) != 1 or key.shape != (*tokens, 1, rank) or value.shape != (*tokens, 1, self.qk_rope_head_dim):
            raise InvalidArgument(
                f"latent {tuple(key.shape)} and rotated part {tuple(value.shape)} for {tokens} slots of "
                f"{rank} and {self.qk_rope_head_dim}"
            )
        rows[loc, :, :rank] = as_integers(key.to(self.dtype))
        rows[loc, :, rank:] = as_integers(value.to(self.dtype))
