"""KV storage of multi-head (and grouped-query) attention: a key and a value per head."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvloom.allocator.errors import InvalidArgument
from kvloom.allocator.kernels import kernels_for
from kvloom.allocator.pools.base import KVCache


class MHATokenToKVPool(KVCache):
    """Keys and values [size + page_size, head_num, head_dim] of each of `layer_num` layers.

    layers     the model's own indices of those layers, 0 .. layer_num - 1 if not given
    layer_num  0 is allowed: a storage that takes no memory, for runners that keep no KV here

    All of it is one buffer [2, layer, slot, head, dim]: one allocation, one set of zeros, and a host copy of all layers
    is one gather.  A layer's part of it is contiguous, so nothing is lost against a buffer per layer.  A token takes
    2 * layer_num * head_num * head_dim numbers of `dtype`.
    Memory starts as zeros: attention may read slots that nobody has written, under a mask, and 0 * NaN is NaN.
    Raises InvalidArgument when the numbers make no sense.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        head_num: int,
        head_dim: int,
        layer_num: int,
        device: torch.device | str,
        layers: Sequence[int] | None = None,
    ) -> None:
        super().__init__(size, page_size, dtype, device, layer_num, layers)
        if head_num < 0 or head_dim < 0:
            raise InvalidArgument(f"head_num={head_num}, head_dim={head_dim} below 0")
        self.head_num = head_num
        self.head_dim = head_dim
        shape = (2, layer_num, size + page_size, head_num, head_dim)
        buffer = torch.zeros(shape, dtype=dtype, device=self.device)
        self._buffers = (buffer.flatten(0, 1),)
        self._by_layer = dict(zip(self.layers, zip(*buffer.unbind(), strict=True), strict=True))
        self._kernels = kernels_for(self.device)

    def set_kv_buffer(self, layer: int, loc: Tensor, key: Tensor, value: Tensor) -> None:
        """Write key and value [T, head_num, head_dim] to slots `loc` [T] of a layer, cast to `dtype`.

        Mutates the buffers.  Raises InvalidArgument, before anything is written, for a layer that is not here or
        shapes that do not fit.
        """
        key_buffer, value_buffer = self.get_kv_buffer(layer)
        shape = (*loc.shape, self.head_num, self.head_dim)
        if len(shape) != 3 or key.shape != shape or value.shape != shape:
            raise InvalidArgument(
                f"key {tuple(key.shape)} and value {tuple(value.shape)} for {tuple(loc.shape)} slots of "
                f"{(self.head_num, self.head_dim)}"
            )
        self._kernels.store_kv(key_buffer, value_buffer, loc, key, value)
