"""What all wrappers share: every verb is handed on, as is all that is no verb."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from kvloom.allocator.base import BaseTokenToKVPoolAllocator
from kvloom.allocator.indices import Ints
from kvloom.allocator.snapshots import AllocatorState


class AllocatorWrapper:
    """`inner`, verb by verb.  From here on it is to be used through the wrapper only.

    Verbs that `inner` does not have raise AttributeError when they are called.
    """

    def __init__(self, inner: "BaseTokenToKVPoolAllocator | AllocatorWrapper") -> None:
        self.inner: Any = inner

    def __getattr__(self, name: str) -> Any:
        """Sizes, reports, the storage: whatever is no verb."""
        if name == "inner" or name.startswith("__"):  # asked for before there is one, as when copied
            raise AttributeError(name)
        return getattr(self.inner, name)

    def _call(self, verb: str, **arguments: Any) -> Any:
        """Every verb passes here."""
        return getattr(self.inner, verb)(**arguments)

    def alloc(self, need_size: int) -> Tensor | None:
        """See the allocator's own, as for all verbs."""
        slots: Tensor | None = self._call("alloc", need_size=need_size)
        return slots

    def alloc_extend(self, prefix_lens: Ints, seq_lens: Ints, last_loc: Ints, extend_num_tokens: int) -> Tensor | None:
        """For paged allocators."""
        slots: Tensor | None = self._call(
            "alloc_extend",
            prefix_lens=prefix_lens,
            seq_lens=seq_lens,
            last_loc=last_loc,
            extend_num_tokens=extend_num_tokens,
        )
        return slots

    def alloc_decode(self, seq_lens: Ints, last_loc: Ints) -> Tensor | None:
        """For paged allocators."""
        slots: Tensor | None = self._call("alloc_decode", seq_lens=seq_lens, last_loc=last_loc)
        return slots

    def free(self, free_index: Ints) -> None:
        """Give back."""
        self._call("free", free_index=free_index)

    def free_swa(self, free_index: Ints) -> None:
        """For allocators with a window pool."""
        self._call("free_swa", free_index=free_index)

    def free_group_begin(self) -> None:
        """Queue frees from here on."""
        self._call("free_group_begin")

    def free_group_end(self) -> None:
        """Free what was queued."""
        self._call("free_group_end")

    @contextmanager
    def free_group(self) -> Iterator[None]:
        """Both, around a block; through the wrapper, unlike the inner allocator's own."""
        self.free_group_begin()
        try:
            yield
        finally:
            self.free_group_end()

    def clear(self) -> None:
        """As new."""
        self._call("clear")

    def backup_state(self) -> AllocatorState:
        """A state of the inner allocator, to be restored through this wrapper."""
        state: AllocatorState = self._call("backup_state")
        return state

    def restore_state(self, state: AllocatorState) -> None:
        """Back to it."""
        self._call("restore_state", state=state)
