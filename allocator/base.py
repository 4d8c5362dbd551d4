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

from kvloom.allocator.devices import device_of
from kvloom.allocator.errors import ForeignPage, GroupMisuse, InvalidArgument, StaleState
from kvloom.allocator.indices import Ints, host_ints, whole
from kvloom.allocator.kernels import kernels_for
from kvloom.allocator.pages import PageLedger
from kvloom.allocator.pools import HostCopy, KVCache
from kvloom.allocator.reports import PoolStatistics
from kvloom.allocator.snapshots import AllocatorState
from kvloom.allocator.staging import Staging


class BaseTokenToKVPoolAllocator(ABC):
    """Slots of one KV pool.  `size` is in tokens; slot 0 (page 0) is the dump for padding and never handed out.

    dtype is the KV dtype; slots are int64.  `kvcache` is the storage, None for bookkeeping alone.  `need_sort`: freed
    pages go to a released list, merged in ascending order when the free list alone cannot serve.
    Raises InvalidArgument when the sizes make no sense.
    """

    index_dtype = torch.int64
    # Freed pages come back behind all others, in the order in which they were named; else in front, ascending.
    _first_in_first_out = False

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
        last_slot, most = size // page_size * page_size + page_size - 1, torch.iinfo(self.index_dtype).max
        if last_slot > most:
            raise InvalidArgument(f"size={size} puts the last slot at {last_slot}; {self.index_dtype} ends at {most}")
        self.size = size
        self.page_size = page_size
        self.dtype = dtype
        self.device = device_of(device)
        self.need_sort = need_sort
        self.num_pages = size // page_size
        self.ledger = PageLedger(self.num_pages, pool=pool, page_size=page_size, need_sort=need_sort)
        self._kvcache = kvcache
        if kvcache is not None and (kvcache.size < size or kvcache.page_size != page_size):
            raise InvalidArgument(
                f"a storage of {kvcache.size} tokens on pages of {kvcache.page_size} for {size} on pages of {page_size}"
            )
        self._kernels = kernels_for(self.device)
        self._staging = Staging(self.device)
        self._group: object | None = None  # the open free group; each is an object of its own

    def available_size(self) -> int:
        """Tokens that could be allocated now; what waits in an open free group does not count."""
        return self.ledger.free_pages * self.page_size

    def get_kvcache(self) -> KVCache | None:
        """The KV storage."""
        return self._kvcache

    def get_cpu_copy(self, indices: torch.Tensor) -> HostCopy:
        """KV of the slots `indices` on its way to the host; see the storage.  Raises InvalidArgument without one."""
        return self._storage().get_cpu_copy(indices)

    def load_cpu_copy(self, copy: HostCopy, indices: torch.Tensor) -> None:
        """Write what `get_cpu_copy` gave to the slots `indices`.  Raises InvalidArgument without a storage."""
        self._storage().load_cpu_copy(copy, indices)

    def estimated_num_new_pages(self, bs: int, extend_num_tokens: int) -> int:
        """bs * ceil(extend_num_tokens / page_size): an upper bound that callers know; nothing here decides by it."""
        return bs * -(-extend_num_tokens // self.page_size)

    @abstractmethod
    def alloc(self, need_size: int) -> torch.Tensor | None:
        """`need_size` free slots, int64; None when short, and nothing has changed."""

    def free(self, free_index: Ints) -> None:
        """Give back the pages of these slots; any one slot of a page frees the page.

        In an open free group they become free with its end.  Raises ForeignPage or DoubleFree and changes nothing.
        A device tensor is copied to the host once.
        """
        self._free_pages(self._pages_of(free_index))

    def free_group_begin(self) -> None:
        """Queue frees from here on.  Raises GroupMisuse inside an open group, which keeps what it has."""
        if self._group is not None:
            raise GroupMisuse("a free group is open already; groups do not nest")
        self._group = object()

    def free_group_end(self) -> None:
        """Free what was queued, as one.  Harmless when no group is open."""
        self._group = None
        in_front = not self._first_in_first_out
        for ledger in self._ledgers():
            ledger.free_queued(front=in_front, ascending=in_front)

    @contextmanager
    def free_group(self) -> Iterator[None]:
        """`with allocator.free_group():` ends the group also when the block raises."""
        self.free_group_begin()
        try:
            yield
        finally:
            self.free_group_end()

    def backup_state(self) -> AllocatorState:
        """A state that `restore_state` can come back to: who holds what, all orders, the open group, the counters.

        The bytes in the KV storage are not part of it.  O(pages); forgetting a state is enough to be rid of it.  A plan
        that may come to nothing:

        >>> import torch
        >>> from kvloom.allocator import PagedTokenToKVPoolAllocator
        >>> allocator = PagedTokenToKVPoolAllocator(32, 4, torch.float16, "cpu", None)
        >>> state = allocator.backup_state()
        >>> fits = [allocator.alloc_extend([0], [n], [-1], n) is not None for n in (10, 20, 5)]
        >>> allocator.restore_state(state)
        >>> fits, allocator.available_size()
        ([True, True, False], 32)
        """
        return AllocatorState(
            self, tuple(ledger.backup_state() for ledger in self._ledgers()), self._group, self._save_extra()
        )

    def restore_state(self, state: AllocatorState) -> None:
        """Be as `backup_state` found it.  Pages taken since are free, whether or not they were freed in between.

        A free group that was open then is open again, with its queue.  Ends `state` and the states taken after it, but
        not older ones.  No launch that is still to run may use pages taken since.
        Raises StaleState for a state of another allocator, one that has been restored already, one taken after a state
        that has been restored since, one from before a `clear`, or when pages that were held then have been given back
        since; GroupMisuse in a free group that was not open then; ForeignPage while rows of a request table hold pages.
        Changes nothing when it raises.
        """
        if not isinstance(state, AllocatorState) or state.owner is not self:
            raise StaleState(f"not a state of this {type(self).__name__}")
        self._require_no_rows()
        saved = tuple(zip(self._ledgers(), state.ledgers, strict=True))
        for ledger, then in saved:
            ledger.require_restorable(then)
        if self._group is not None and self._group is not state.group:
            raise GroupMisuse("a free group is open that was not open when the state was taken; end it first")
        for ledger, then in saved:
            ledger.restore_state(then)
        self._group = state.group
        self._load_extra(state.extra)

    def clear(self) -> None:
        """As new: everything free, no open group.  No state outlives this.

        Raises ForeignPage while rows of a request table hold pages, which would not hear of it.
        """
        self._require_no_rows()
        self._group = None
        for ledger in self._ledgers():
            ledger.clear()

    def statistics(self) -> PoolStatistics:
        """An immutable report of the pool."""
        return self.ledger.statistics()

    def check(self) -> None:
        """Raise BrokenInvariant unless the books balance; O(pages)."""
        for ledger in self._ledgers():
            ledger.check()

    def debug_print(self) -> str:
        """One line of sizes, in tokens."""
        report = self.ledger.statistics()
        return (
            f"{type(self).__name__}: size={self.size} page_size={self.page_size} available={self.available_size()} "
            f"held={report.held * self.page_size} leaving={report.quarantined * self.page_size}"
        )

    def _require_no_rows(self) -> None:
        for ledger in self._ledgers():
            if pages := ledger.pages_of_rows():
                raise ForeignPage(f"pool {ledger.pool!r}: {pages} pages belong to rows of a request table")

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
            self._give_back(pages)
            raise

    def _to_tensor(self, slots: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(slots).to(self.device, self.index_dtype, non_blocking=True)

    def _pages_of(self, free_index: Ints) -> NDArray[np.int32]:
        """The distinct pages of these slots, in the order in which they come back.  Raises ForeignPage."""
        slots = host_ints("free_index", free_index)
        self._require_slots(slots)
        pages = (slots // self.page_size).astype(np.int32)
        return self.ledger.distinct(pages) if self._first_in_first_out else np.unique(pages)

    def _release(self, ledger: PageLedger, pages: NDArray[np.int32]) -> None:
        """Free pages of one ledger, or queue them in an open group."""
        if self._group is not None:
            ledger.queue(pages)
        else:
            ledger.release(pages, front=not self._first_in_first_out)

    def _ledgers(self) -> tuple[PageLedger, ...]:
        return (self.ledger,)

    def _save_extra(self) -> Any:
        """What else `backup_state` must keep; a copy."""
        return None

    def _load_extra(self, extra: Any) -> None:  # noqa: B027 - most have nothing
        """Put back what `_save_extra` gave; the ledgers have been restored."""

    def _take(self, count: int, op: str = "prefill") -> NDArray[np.int32] | None:
        """`count` pages for `op`; None when short, and nothing has changed."""
        return self.ledger.take(count, op=op)

    def _give_back(self, pages: NDArray[np.int32]) -> None:
        """Undo a `_take`."""
        self.ledger.release(pages, reason="rollback")

    def _free_pages(self, pages: NDArray[np.int32]) -> None:
        self._release(self.ledger, pages)
