"""Every public allocator, bare and wrapped, each with what its twin needs to know."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvloom.allocator import (
    AscendPagedTokenToKVPoolAllocator,
    BaseTokenToKVPoolAllocator,
    CheckedAllocator,
    MHATokenToKVPool,
    PagedTokenToKVPoolAllocator,
    RecordingAllocator,
    SWAKVPool,
    SWATokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from tests.allocator.twins import TwinAllocator

Make = Callable[[int, int, bool, str], BaseTokenToKVPoolAllocator]  # pages, window pages, need_sort, device


@dataclass(frozen=True)
class Kind:
    """An allocator class at one page size."""

    name: str
    page_size: int
    maker: Make
    index_dtype: torch.dtype = torch.int64
    first_in_first_out: bool = False
    grows_rows: bool = True  # has alloc_extend and alloc_decode
    has_window: bool = False

    def make(self, pages: int, window_pages: int, need_sort: bool, device: str = "cpu") -> BaseTokenToKVPoolAllocator:
        return self.maker(pages, window_pages, need_sort, device)

    def twin(self, pages: int, window_pages: int, need_sort: bool) -> TwinAllocator:
        window = window_pages if self.has_window else None
        return TwinAllocator(pages, self.page_size, need_sort, self.first_in_first_out, window)


def storage(tokens: int, page_size: int, device: str, layer: int = 0) -> MHATokenToKVPool:
    return MHATokenToKVPool(tokens, page_size, torch.float16, 1, 2, 1, device, layers=[layer])


def token(pages: int, _: int, need_sort: bool, device: str) -> TokenToKVPoolAllocator:
    return TokenToKVPoolAllocator(pages, torch.float16, device, storage(pages, 1, device), need_sort)


def paged(page_size: int, of: type[PagedTokenToKVPoolAllocator] = PagedTokenToKVPoolAllocator) -> Make:
    def make(pages: int, _: int, need_sort: bool, device: str) -> PagedTokenToKVPoolAllocator:
        size = pages * page_size
        return of(size, page_size, torch.float16, device, storage(size, page_size, device), need_sort)

    return make


def swa(page_size: int) -> Make:
    def make(pages: int, window_pages: int, need_sort: bool, device: str) -> SWATokenToKVPoolAllocator:
        size, size_swa = pages * page_size, window_pages * page_size
        kv = SWAKVPool(storage(size, page_size, device), storage(size_swa, page_size, device, layer=1))
        return SWATokenToKVPoolAllocator(size, size_swa, torch.float16, device, kv, need_sort, page_size)

    return make


PAGED = [Kind(f"paged_{size}", size, paged(size)) for size in (1, 3, 4, 16, 64)]
ASCEND = [
    Kind(f"ascend_{size}", size, paged(size, AscendPagedTokenToKVPoolAllocator), index_dtype=torch.int32)
    for size in (1, 4)
]
SWA = [
    Kind(f"swa_{size}", size, swa(size), first_in_first_out=size == 1, has_window=True) for size in (1, 3, 4, 16)
]  # fmt: skip
KINDS = [Kind("token", 1, token, first_in_first_out=True, grows_rows=False), *PAGED, *ASCEND, *SWA]

WRAPPINGS: dict[str, Callable[[BaseTokenToKVPoolAllocator], Any]] = {
    "bare": lambda allocator: allocator,
    "checked": CheckedAllocator,
    "recorded": lambda allocator: RecordingAllocator(CheckedAllocator(allocator)),
}
