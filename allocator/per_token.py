"""The allocator of single slots: page size 1, first in, first out."""

import numpy as np
import torch

from kvloom.allocator.base import BaseTokenToKVPoolAllocator
from kvloom.allocator.errors import InvalidArgument
from kvloom.allocator.indices import whole
from kvloom.allocator.pools.base import KVCache


class TokenToKVPoolAllocator(BaseTokenToKVPoolAllocator):
    """Slots 1 .. size; the free list starts in ascending order and freed slots go to its end."""

    _first_in_first_out = True

    def __init__(
        self,
        size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        kvcache: KVCache | None,
        need_sort: bool = False,
    ) -> None:
        super().__init__(size, 1, dtype, device, kvcache, need_sort)

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """The first `need_size` free slots, int64 [need_size]; None when short, and nothing has changed.

        Raises InvalidArgument below 0.
        """
        need_size = whole("need_size", need_size)
        if need_size < 0:
            raise InvalidArgument(f"cannot allocate {need_size} slots")
        slots = self._take(need_size)
        if slots is None:
            return None
        with self._given_back_on_error(slots):
            return self._to_tensor(slots.astype(np.int64))
