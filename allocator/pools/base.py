"""What every KV storage offers.  It holds bytes by slot; who owns a slot is the allocators' business."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvloom.allocator.errors import InvalidArgument


class KVCache(ABC):
    """KV of `size` tokens in the layers `layers`, which are the model's own layer indices, in order.

    Slots run from 0 to `size + page_size - 1`; those of page 0, below `page_size`, are the dump: padding writes there
    and nobody reads it.
    Raises InvalidArgument when the numbers make no sense.
    """

    def __init__(
        self, size: int, page_size: int, dtype: torch.dtype, device: torch.device | str, layers: Sequence[int]
    ) -> None:
        if page_size < 1:
            raise InvalidArgument(f"page_size={page_size} must be at least 1")
        if size < 1:
            raise InvalidArgument(f"a KV storage of {size} tokens; at least 1")
        if len(set(layers)) != len(layers):
            raise InvalidArgument(f"layers {list(layers)} name a layer twice")
        self.size = size
        self.page_size = page_size
        self.dtype = dtype
        self.device = torch.device(device)
        self.layers = tuple(layers)

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of device memory, the dump page included."""

    @abstractmethod
    def get_key_buffer(self, layer: int) -> Tensor:
        """Keys of a layer, by slot; a view.  Raises InvalidArgument for a layer that is not here."""

    @abstractmethod
    def get_value_buffer(self, layer: int) -> Tensor:
        """Values of a layer, by slot; a view.  Raises InvalidArgument for a layer that is not here."""

    def get_kv_buffer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Both."""
        return self.get_key_buffer(layer), self.get_value_buffer(layer)

    @abstractmethod
    def set_kv_buffer(self, layer: int, loc: Tensor, key: Tensor, value: Tensor) -> None:
        """Write the KV of T tokens to slots `loc` (int64 or int32 [T]) of a layer, cast to `dtype`.

        Mutates the buffers.  Raises InvalidArgument, before anything is written, for a layer that is not here or
        shapes that do not fit.  Does not synchronise; the slots themselves are trusted.
        """

    @abstractmethod
    def get_cpu_copy(self, indices: Tensor) -> Any:
        """KV of the slots `indices` (int64 or int32 [T]), all layers, on the host.  Waits for the device."""

    @abstractmethod
    def load_cpu_copy(self, copy: Any, indices: Tensor) -> None:
        """Write what `get_cpu_copy` gave to as many slots `indices`.

        Mutates the buffers.  Raises InvalidArgument when the copy is not of that many slots of such a storage.
        """
