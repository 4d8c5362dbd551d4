"""The allocator for models that mix full and sliding-window attention: two pools, one set of slots.

Callers know full slots only.  Which window page backs a full page is a number per page on the host (`_peer`); the
mapping tensor, which the device reads slot by slot, follows from it and is written page by page.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvloom.allocator.errors import BrokenInvariant, ForeignPage, InvalidArgument
from kvloom.allocator.indices import Ints, whole
from kvloom.allocator.paged import PagedTokenToKVPoolAllocator
from kvloom.allocator.pages import PageLedger
from kvloom.allocator.pools import KVCache, SWAKVPool
from kvloom.allocator.reports import PoolStatistics
from kvloom.allocator.staging import Staging


class SWATokenToKVPoolAllocator(PagedTokenToKVPoolAllocator):
    """Slots of a pool of `size` tokens; each page has a peer in a window pool of `size_swa` until it slides out.

    full_to_swa_index_mapping  int64 [size + page_size], for each full slot its window slot, 0 for none; made once,
                               changed in place, and shared with `kvcache` when that is an SWAKVPool

    Both pools keep their own free list in the same way: first in, first out with page size 1, as
    TokenToKVPoolAllocator does, else freed pages go to the front, ascending.  `ledger` is that of the full pool,
    `swa_ledger` that of the window pool.  Raises InvalidArgument when the sizes make no sense.
    """

    def __init__(
        self,
        size: int,
        size_swa: int,
        dtype: torch.dtype,
        device: torch.device | str,
        kvcache: KVCache | None,
        need_sort: bool = False,
        page_size: int = 1,
    ) -> None:
        super().__init__(size, page_size, dtype, device, kvcache, need_sort)
        size_swa = whole("size_swa", size_swa)
        if isinstance(kvcache, SWAKVPool) and kvcache.swa.size < size_swa:
            raise InvalidArgument(f"a window storage of {kvcache.swa.size} tokens for {size_swa}")
        if size_swa < page_size:
            raise InvalidArgument(f"size_swa={size_swa} tokens is less than one page of {page_size}")
        if size_swa + page_size > 2**31:
            raise InvalidArgument(f"size_swa={size_swa}: window slots are int32, at most {2**31 - page_size} tokens")
        self._first_in_first_out = page_size == 1
        self.size_swa = size_swa
        self.swa_ledger = PageLedger(size_swa // page_size, pool="swa", page_size=page_size, need_sort=need_sort)
        self.full_to_swa_index_mapping = torch.zeros(size + page_size, dtype=torch.int64, device=self.device)
        self._mapping_by_page = self.full_to_swa_index_mapping[: (self.num_pages + 1) * page_size].view(-1, page_size)
        self._within_page = torch.arange(page_size, device=self.device)
        self._peer = np.zeros(self.num_pages + 1, np.int32)  # window page of each full page, 0 for none
        # Of its own: the mapping travels beside what the kernels are sent, and must not halve the depth of their ring.
        self._mapping_staging = Staging(self.device)
        if isinstance(kvcache, SWAKVPool):
            if kvcache.full_to_swa_index_mapping is not None:
                raise InvalidArgument("the storage belongs to another allocator, whose mapping it has")
            kvcache.full_to_swa_index_mapping = self.full_to_swa_index_mapping

    @property
    def size_full(self) -> int:
        """Tokens of the full pool: `size`."""
        return self.size

    def full_available_size(self) -> int:
        """Tokens that the full pool could give."""
        return self.ledger.free_pages * self.page_size

    def swa_available_size(self) -> int:
        """Tokens that the window pool could give."""
        return self.swa_ledger.free_pages * self.page_size

    def available_size(self) -> int:
        """Tokens that could be allocated now: the smaller of the two."""
        return min(self.full_available_size(), self.swa_available_size())

    def translate_loc_from_full_to_swa(self, kv_indices: torch.Tensor) -> torch.Tensor:
        """Window slots, int32, of full slots (int64 or int32, any shape); 0, in the dump, where there is none.

        Does not synchronise; the slots are trusted.
        """
        return self.full_to_swa_index_mapping[kv_indices.to(self.device, non_blocking=True)].to(torch.int32)

    def free_swa(self, free_index: Ints) -> None:
        """Give back the window peers of the pages of these slots, which have slid out of the window.

        As in `free`, any one slot of a page names the page: with its peer, all its mapping entries go.  Pages whose
        peers are gone already are passed over.  Raises ForeignPage or DoubleFree, and changes nothing, for pages that
        the caller does not hold.  A device tensor is copied to the host once.
        """
        pages = self._pages_of(free_index)
        self.ledger.require_held(pages)
        self._free_peers(pages)

    def clear(self) -> None:
        """As new: everything free, nothing mapped, no open group.  The mapping stays the same tensor."""
        super().clear()
        self._peer.fill(0)
        self.full_to_swa_index_mapping.zero_()

    def swa_statistics(self) -> PoolStatistics:
        """An immutable report of the window pool; `statistics` is that of the full pool."""
        return self.swa_ledger.statistics()

    def check(self) -> None:
        """Raise BrokenInvariant unless both ledgers balance and pair up; O(pages)."""
        super().check()
        paired = np.flatnonzero(self._peer).astype(np.int32)
        peers = self._peer[paired]
        held = bool((self.ledger.holders_of(paired) >= 0).all() and (self.swa_ledger.holders_of(peers) >= 0).all())
        if not held or not len(np.unique(peers)) == len(peers) == self.swa_ledger.held_pages:
            raise BrokenInvariant(
                f"{len(paired)} full pages have window peers, {self.swa_ledger.held_pages} window pages are held"
            )

    def debug_print(self) -> str:
        """One line of sizes, in tokens."""
        report = self.swa_ledger.statistics()
        return (
            f"{super().debug_print()} full_available={self.full_available_size()} size_swa={self.size_swa} "
            f"swa_available={self.swa_available_size()} swa_held={report.held * self.page_size} "
            f"swa_leaving={report.quarantined * self.page_size}"
        )

    def _ledgers(self) -> tuple[PageLedger, ...]:
        return self.ledger, self.swa_ledger

    def _save_extra(self) -> Any:
        return self._peer.copy(), self.full_to_swa_index_mapping.clone()

    def _load_extra(self, extra: Any) -> None:
        self._peer[:], mapping = extra
        self.full_to_swa_index_mapping.copy_(mapping)

    def _take(self, count: int, op: str = "prefill") -> NDArray[np.int32] | None:
        """`count` full pages, each with a peer.  Nothing is taken before both pools are known to have enough."""
        if count > self.swa_ledger.free_pages:
            return self.swa_ledger.take(count, op=op)  # None; the failure counts in the pool that is short
        pages = self.ledger.take(count, op=op)
        if pages is None:
            return None
        peers = self.swa_ledger.take(count, op=op)
        if peers is None:
            raise BrokenInvariant(f"pool 'swa': {count} pages that were free a moment ago are gone")
        with self._given_back_on_error(pages):
            self._pair(pages, peers)
        return pages

    def _give_back(self, pages: NDArray[np.int32]) -> None:
        super()._give_back(pages)
        peers = self._peer[pages]
        self.swa_ledger.release(peers, reason="rollback")
        self._pair(pages, np.zeros_like(peers))

    def _free_pages(self, pages: NDArray[np.int32]) -> None:
        super()._free_pages(pages)
        self._free_peers(pages)

    def _free_peers(self, pages: NDArray[np.int32]) -> None:
        """Free the peers that `pages` have, or queue them: who they are is settled here, not when the group ends."""
        pages = pages[self._peer[pages] > 0]
        peers = self._peer[pages]
        self._release(self.swa_ledger, peers if self._first_in_first_out else np.sort(peers))
        self._pair(pages, np.zeros_like(peers))

    def _pair(self, pages: NDArray[np.int32], peers: NDArray[np.int32]) -> None:
        """Let `peers` (0: none) back `pages`, in the books, then on the device, without waiting for it."""
        if len(pages) == 0:
            return
        self._peer[pages] = peers
        sent = self._mapping_staging.upload({"pages": pages, "peers": peers})
        by_page = sent["peers"].to(torch.int64)[:, None]
        slots = by_page * self.page_size + self._within_page
        self._mapping_by_page[sent["pages"]] = torch.where(by_page > 0, slots, 0)

    def _require_last_loc(self, last_loc: Ints, prefix: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """And a row that goes on in its last page needs that page's peer."""
        last = super()._require_last_loc(last_loc, prefix)
        if last is not None:
            inside = last[prefix % self.page_size > 0]
            lost = self._peer[inside // self.page_size] == 0
            if lost.any():
                raise ForeignPage(f"rows end at slots {inside[lost][:8].tolist()}, whose window pages are gone")
        return last
