"""An allocator under suspicion: every hand-out is verified, and what is given back is made unusable."""

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvloom.allocator.base import BaseTokenToKVPoolAllocator
from kvloom.allocator.errors import BrokenInvariant, StaleState
from kvloom.allocator.indices import Ints, host_ints
from kvloom.allocator.pools import KVCache, SWAKVPool
from kvloom.allocator.snapshots import AllocatorState
from kvloom.allocator.wrappers.base import AllocatorWrapper

_FREE, _LIVE, _LEAVING = range(3)  # leaving: given back in a free group that is still open

_POISON = 0xFF  # in every byte: that is NaN in the floats of 16 bits and more, and in float8_e4m3fn and float8_e5m2

PageIds = NDArray[np.int64]


class WatchedPool:
    """The slots of one pool as callers know them, kept apart from the allocator's own books."""

    def __init__(self, pool: str, pages: int, page_size: int, storage: KVCache | None) -> None:
        self._pool, self._page_size, self._storage = pool, page_size, storage
        self._state = np.full((pages + 1, page_size), _FREE, np.int8)

    def hand_out(self, slots: NDArray[np.int64]) -> None:
        """Raise BrokenInvariant unless these are slots of the pool, distinct, and nobody's."""
        state = self._state.reshape(-1)
        self._refuse(slots[(slots < self._page_size) | (slots >= len(state))], "that are not its own")
        self._refuse(slots[state[slots] != _FREE], "that are in use")
        distinct, counts = np.unique(slots, return_counts=True)
        self._refuse(distinct[counts > 1], "twice in one go")
        state[slots] = _LIVE

    def give_back(self, pages: PageIds, in_group: bool) -> None:
        """These pages are nobody's: at once, or from the end of the group on."""
        self._state[pages] = _LEAVING if in_group else _FREE
        self._poison(pages)

    def end_group(self) -> None:
        """What was given back in the group may be handed out."""
        self._state[self._state == _LEAVING] = _FREE

    def save(self) -> NDArray[np.int8]:
        """What `load` takes."""
        return self._state.copy()

    def load(self, state: NDArray[np.int8] | None) -> None:
        """Back to what was saved, or (None) to a fresh pool; what is live no more has thereby been given back."""
        before = self._state
        self._state = np.full_like(before, _FREE) if state is None else state
        self._poison(np.flatnonzero(((before == _LIVE) & (self._state != _LIVE)).any(axis=1)))

    def _poison(self, pages: PageIds) -> None:
        if self._storage is None or len(pages) == 0:
            return
        slots = torch.from_numpy(pages[:, None] * self._page_size + np.arange(self._page_size)).reshape(-1)
        slots = slots.to(self._storage.device)
        for layer in self._storage.layers:
            for buffer in self._storage.get_kv_buffer(layer):
                buffer.view(torch.uint8)[slots] = _POISON

    def _refuse(self, slots: NDArray[np.int64], what: str) -> None:
        if len(slots):
            raise BrokenInvariant(f"pool {self._pool!r} hands out slots {slots[:8].tolist()} {what}")


class CheckedAllocator(AllocatorWrapper):
    """For tests, and for a look at a server that misbehaves.

    After each verb, what was handed out must lie inside the pool and apart from all that is live (in the window pool
    too, if there is one), else BrokenInvariant.  The KV of pages that are given back, be it in an open group or by a
    restored state, is overwritten in all layers with bytes of 0xFF: who still reads it reads NaN.  Without a storage
    there is nothing to overwrite.

    A slot that is in use is refused also to whoever decodes the same position twice, which an allocator, knowing no
    rows, would let pass.

    `inner` must be fresh.  Every verb waits for the device; a group's end, a state and `clear` are O(size).
    """

    def __init__(self, inner: BaseTokenToKVPoolAllocator | AllocatorWrapper) -> None:
        super().__init__(inner)
        self._in_group = False
        self._saved: WeakKeyDictionary[AllocatorState, tuple[Any, ...]] = WeakKeyDictionary()
        storage = self.get_kvcache()
        full, window = (storage.full, storage.swa) if isinstance(storage, SWAKVPool) else (storage, None)
        self._pools = [WatchedPool("full", self.num_pages, self.page_size, full)]
        self._peer = np.zeros(0, np.int64)
        if hasattr(inner, "swa_ledger"):
            self._pools.append(WatchedPool("swa", self.size_swa // self.page_size, self.page_size, window))
            self._peer = np.zeros(self.num_pages + 1, np.int64)  # window page of each full page, 0 for none

    def _call(self, verb: str, **arguments: Any) -> Any:
        answer = super()._call(verb, **arguments)
        if isinstance(answer, Tensor):
            self._hand_out(answer)
        return answer

    def free(self, free_index: Ints) -> None:
        """Poisons the pages; see the allocator's own."""
        super().free(free_index)
        pages = self._pages_of(free_index)
        self._pools[0].give_back(pages, self._in_group)
        self._give_back_peers(pages)

    def free_swa(self, free_index: Ints) -> None:
        """Poisons the window pages; see the allocator's own."""
        super().free_swa(free_index)
        self._give_back_peers(self._pages_of(free_index))

    def free_group_begin(self) -> None:
        """See the allocator's own."""
        super().free_group_begin()
        self._in_group = True

    def free_group_end(self) -> None:
        """See the allocator's own."""
        super().free_group_end()
        self._in_group = False
        for pool in self._pools:
            pool.end_group()

    def clear(self) -> None:
        """Poisons all that was live; see the allocator's own."""
        super().clear()
        self._load(False, np.zeros_like(self._peer), [None] * len(self._pools))

    def backup_state(self) -> AllocatorState:
        """See the allocator's own."""
        state = super().backup_state()
        self._saved[state] = (self._in_group, self._peer.copy(), [pool.save() for pool in self._pools])
        return state

    def restore_state(self, state: AllocatorState) -> None:
        """Poisons what was taken since; see the allocator's own."""
        saved = self._saved.get(state) if isinstance(state, AllocatorState) else None
        if saved is None:
            raise StaleState("not a state that was taken through this CheckedAllocator")
        super().restore_state(state)
        self._load(*saved)

    def _load(self, in_group: bool, peer: PageIds, states: list[NDArray[np.int8] | None]) -> None:
        self._in_group, self._peer = in_group, peer
        for pool, state in zip(self._pools, states, strict=True):
            pool.load(state)

    def _hand_out(self, answer: Tensor) -> None:
        slots = answer.cpu().numpy().astype(np.int64)
        self._pools[0].hand_out(slots)
        if len(self._pools) > 1:
            peers = self.translate_loc_from_full_to_swa(answer).cpu().numpy().astype(np.int64)
            self._pools[1].hand_out(peers)
            self._peer[slots // self.page_size] = peers // self.page_size

    def _pages_of(self, slots: Ints) -> PageIds:
        return np.unique(host_ints("free_index", slots) // self.page_size)

    def _give_back_peers(self, pages: PageIds) -> None:
        if len(self._pools) > 1:
            peers = self._peer[pages]
            self._peer[pages] = 0
            self._pools[1].give_back(peers[peers > 0], self._in_group)
