"""What all public allocators share: sizes, free groups and the way to the KV storage.

The verbs and their results are those that users of the field's token-to-KV-pool allocators know; the ledger underneath
is ours.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvloom.allocator.errors import ForeignPage, GroupMisuse, InvalidArgument
from kvloom.allocator.indices import Ints, host_ints, whole
from kvloom.allocator.kernels import kernels_for
from kvloom.allocator.pages import PageLedger
from kvloom.allocator.pools.base import KVCache
from kvloom.allocator.reports import PoolStatistics
from kvloom.allocator.staging import Staging


class BaseTokenToKVPoolAllocator(ABC):
    """Slots of one KV pool.  `size` is in tokens; slot 0 (page 0) is the dump for padding and never handed out.

    dtype is the KV dtype; slots are int64.  `kvcache` is the storage, None for bookkeeping alone.  `need_sort`: freed
    pages go to a released list, merged in ascending order when the free list alone cannot serve.
    Raises InvalidArgument when the sizes make no sense.
    """

    index_dtype = torch.int64

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
        size, page_size = whole("size", size), whole("page_size", page_size)
        if page_size < 1:
            raise InvalidArgument(f"page_size={page_size} must be at least 1")
        if size < page_size:
            raise InvalidArgument(f"size={size} tokens is less than one page of {page_size}")
        self.size = size
        self.page_size = page_size
        self.dtype = dtype
        self.device = torch.device(device)
        self.need_sort = need_sort
        self.num_pages = size // page_size
        self.ledger = PageLedger(self.num_pages, pool=pool, page_size=page_size, need_sort=need_sort)
        self._kvcache = kvcache
        self._kernels = kernels_for(self.device)
        self._staging = Staging(self.device)
        self._in_group = False

    def available_size(self) -> int:
        """Tokens that could be allocated now; what waits in an open free group does not count."""
        return self.ledger.free_pages * self.page_size

    def get_kvcache(self) -> KVCache | None:
        """The KV storage."""
        return self._kvcache

    def get_cpu_copy(self, indices: torch.Tensor) -> Any:
        """KV of the slots `indices` on the host; see the storage.  Raises InvalidArgument without one."""
        return self._storage().get_cpu_copy(indices)

    def load_cpu_copy(self, copy: Any, indices: torch.Tensor) -> None:
        """Write what `get_cpu_copy` gave to the slots `indices`.  Raises InvalidArgument without a storage."""
        self._storage().load_cpu_copy(copy, indices)

    def estimated_num_new_pages(self, bs: int, extend_num_tokens: int) -> int:
        """bs * ceil(extend_num_tokens / page_size): an upper bound that callers know; nothing here decides by it."""
        return bs * -(-extend_num_tokens // self.page_size)

    def free(self, free_index: Ints) -> None:
        """Give back the pages of these slots; any one slot of a page frees the page.

        In an open free group they become free with its end.  Raises ForeignPage or DoubleFree and changes nothing.
        A device tensor is copied to the host once.
        """
        pages = self._pages_of(host_ints("free_index", free_index))
        if len(pages) == 0:
            return
        if self._in_group:
            self.ledger.queue(pages)
        else:
            self._free_pages(pages)

    def free_group_begin(self) -> None:
        """Queue frees from here on.  Raises GroupMisuse inside an open group, which keeps what it has."""
        if self._in_group:
            raise GroupMisuse("a free group is open already; groups do not nest")
        self._in_group = True

    def free_group_end(self) -> None:
        """Free what was queued, as one.  Harmless when no group is open."""
        self._in_group = False
        self._flush_group()

    @contextmanager
    def free_group(self) -> Iterator[None]:
        """`with allocator.free_group():` ends the group also when the block raises."""
        self.free_group_begin()
        try:
            yield
        finally:
            self.free_group_end()

    def clear(self) -> None:
        """As new: everything free, no open group."""
        self._in_group = False
        self.ledger.clear()

    def statistics(self) -> PoolStatistics:
        """An immutable report of the pool."""
        return self.ledger.statistics()

    def debug_print(self) -> str:
        """One line of sizes, in tokens."""
        report = self.ledger.statistics()
        return (
            f"{type(self).__name__}: size={self.size} page_size={self.page_size} available={self.available_size()} "
            f"held={report.held * self.page_size} leaving={report.quarantined * self.page_size}"
        )

    def _storage(self) -> KVCache:
        if self._kvcache is None:
            raise InvalidArgument("this allocator was made without a KV storage")
        return self._kvcache

    def _require_slots(self, slots: NDArray[np.int64]) -> None:
        """Raise ForeignPage for a slot of the dump page or outside the pool."""
        first, last = self.page_size, (self.num_pages + 1) * self.page_size - 1
        wrong = (slots < first) | (slots > last)
        if wrong.any():
            raise ForeignPage(f"slots run from {first} to {last}; got {slots[wrong][:8].tolist()}")

    @contextmanager
    def _given_back_on_error(self, pages: NDArray[np.int32]) -> Iterator[None]:
        """An upload or a launch that fails, for want of device memory say, takes no pages with it."""
        try:
            yield
        except BaseException:
            self.ledger.release(pages, reason="rollback")
            raise

    def _to_tensor(self, slots: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(slots).to(self.device, self.index_dtype, non_blocking=True)

    @abstractmethod
    def _pages_of(self, slots: NDArray[np.int64]) -> NDArray[np.int32]:
        """The pages to free for these slots, in the order in which a free of them is queued."""

    @abstractmethod
    def _free_pages(self, pages: NDArray[np.int32]) -> None:
        """Free them at once."""

    @abstractmethod
    def _flush_group(self) -> None:
        """Free what the ledger has queued."""
