"""KV storage of models that mix full and sliding-window attention: two storages under one set of slots."""

from torch import Tensor

from kvloom.allocator.errors import InvalidArgument
from kvloom.allocator.pools.base import KVCache


class SWAKVPool(KVCache):
    """`full` holds the layers that look back on everything, `swa` (fewer slots, as a rule) those with a window.

    Every slot that a caller names is one of `full`.  For a window layer it is translated by
    `full_to_swa_index_mapping` (int64, one entry per slot of `full`, 0: no window slot, that is the dump): the tensor
    that the allocator keeps up to date, None until an allocator of this storage is made.
    `size` is that of `full`.  Layout: that of the two storages, one after the other.
    Raises InvalidArgument when the two differ in page size or device, or share a layer.
    """

    def __init__(self, full: KVCache, swa: KVCache) -> None:
        layers = full.layers + swa.layers
        super().__init__(full.size, full.page_size, full.dtype, full.device, len(layers), layers)
        if (full.page_size, full.device) != (swa.page_size, swa.device):
            raise InvalidArgument(
                f"full has pages of {full.page_size} on {full.device}, swa of {swa.page_size} on {swa.device}"
            )
        self.full = full
        self.swa = swa
        self.full_to_swa_index_mapping: Tensor | None = None
        self._buffers = full._buffers + swa._buffers
        self._by_layer = {**full._by_layer, **swa._by_layer}

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in all layers while it is inside the window; later, those of `full`."""
        return self.full.bytes_per_token + self.swa.bytes_per_token

    def set_kv_buffer(self, layer: int, loc: Tensor, key: Tensor, value: Tensor) -> None:
        """Write the KV of T tokens to slots `loc` (int64 or int32 [T], of `full`) of a layer, cast to its dtype.

        Mutates the buffers.  Raises InvalidArgument, before anything is written, for a layer that is not here, shapes
        that do not fit, or a window layer before there is an allocator.
        """
        if layer in self.swa.layers:
            self.swa.set_kv_buffer(layer, self._window_slots(loc), key, value)
        else:
            self.full.set_kv_buffer(layer, loc, key, value)

    def _window_slots(self, slots: Tensor) -> Tensor:
        if self.full_to_swa_index_mapping is None:
            raise InvalidArgument("no allocator has mapped the slots of this storage to window slots yet")
        return self.full_to_swa_index_mapping[slots]

    def _places(self, slots: Tensor) -> list[tuple[Tensor, Tensor]]:
        slots = self._on_device(slots)
        return self.full._places(slots) + self.swa._places(self._window_slots(slots))
