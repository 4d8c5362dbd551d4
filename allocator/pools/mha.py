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
    is one gather.  A layer's part of it is contiguous, so nothing is lost against a buffer per layer.
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
        super().__init__(size, page_size, dtype, device, range(layer_num) if layers is None else layers)
        if len(self.layers) != layer_num:
            raise InvalidArgument(f"layer_num={layer_num}, but the layers are {list(self.layers)}")
        if head_num < 0 or head_dim < 0:
            raise InvalidArgument(f"head_num={head_num}, head_dim={head_dim} below 0")
        self.head_num = head_num
        self.head_dim = head_dim
        shape = (2, layer_num, size + page_size, head_num, head_dim)
        self._buffer = torch.zeros(shape, dtype=dtype, device=self.device)
        # Views made once: an attention layer asks in each step.
        self._by_layer = dict(zip(self.layers, zip(*self._buffer.unbind(), strict=True), strict=True))
        self._kernels = kernels_for(self.device)

    @property
    def nbytes(self) -> int:
        """Bytes of device memory, the dump page included."""
        return self._buffer.nbytes

    def get_key_buffer(self, layer: int) -> Tensor:
        """Keys of a layer, a view [size + page_size, head_num, head_dim].  Raises InvalidArgument."""
        return self.get_kv_buffer(layer)[0]

    def get_value_buffer(self, layer: int) -> Tensor:
        """Values of a layer, a view [size + page_size, head_num, head_dim].  Raises InvalidArgument."""
        return self.get_kv_buffer(layer)[1]

    def get_kv_buffer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Both.  Raises InvalidArgument for a layer that is not here."""
        try:
            key_buffer, value_buffer = self._by_layer[layer]
        except KeyError:
            raise InvalidArgument(f"no layer {layer} here; the layers are {list(self.layers)}") from None
        return key_buffer, value_buffer

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

    def get_cpu_copy(self, indices: Tensor) -> Tensor:
        """KV of the slots `indices` [T] on the host: [2, layer, T, head, dim].  Waits for the device."""
        return self._buffer.index_select(2, indices.to(self.device)).cpu()

    def load_cpu_copy(self, copy: Tensor, indices: Tensor) -> None:
        """Write `copy` [2, layer, T, head, dim] to the slots `indices` [T].

        Mutates the buffers.  Raises InvalidArgument when the shapes do not fit.
        """
        expected = (2, len(self.layers), *indices.shape, self.head_num, self.head_dim)
        if tuple(copy.shape) != expected:
            raise InvalidArgument(f"a copy of shape {tuple(copy.shape)} where {expected} is due")
        self._buffer[:, :, indices.to(self.device)] = copy.to(self.device, self.dtype)
