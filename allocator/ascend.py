"""The paged allocator for devices without Triton."""

import torch

from kvloom.allocator.kernels import torch_kernels
from kvloom.allocator.paged import PagedTokenToKVPoolAllocator
from kvloom.allocator.pools import KVCache


class AscendPagedTokenToKVPoolAllocator(PagedTokenToKVPoolAllocator):
    """PagedTokenToKVPoolAllocator with torch operations only, wherever it runs, and int32 slots.

    Same results otherwise: the plan, and so the answer when the pool is short, is the same host's.
    Raises InvalidArgument when the sizes make no sense, or a slot would exceed int32.
    """

    index_dtype = torch.int32

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        kvcache: KVCache | None,
        need_sort: bool = False,
        *,
        pool: str = "full",
    ) -> None:
        super().__init__(size, page_size, dtype, device, kvcache, need_sort, pool=pool)
        self._kernels = torch_kernels
