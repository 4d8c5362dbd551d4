"""Snapshots: taking an allocator back to where it was, for planning that may come to nothing.

A snapshot undoes what was *taken* since.  What was *given back* since cannot be undone: whoever did it has forgotten
the page, and to hold it again in his name would lose it for ever.  So each ledger tells the states that may still be
restored when a page leaves its holder, and a state that has lost a page is refused.

States nest.  Restoring one ends it and all that were taken after it; the older ones remain.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import numpy as np

from kvloom.allocator.books import CACHED, Books
from kvloom.allocator.errors import StaleState
from kvloom.allocator.ring import PageArray

_LOST = -5  # in the books of a state: held (or cached) then, and given back since


@dataclass(slots=True, eq=False, repr=False, weakref_slot=True)
class LedgerState:
    """The books of a ledger as they were, for `Snapshots` alone."""

    books: Books
    ended: str | None = None  # why it cannot be restored any more


@dataclass(frozen=True, slots=True, eq=False, repr=False, weakref_slot=True)
class AllocatorState:
    """What an allocator's `backup_state` gives and its `restore_state` takes; opaque to everybody else."""

    owner: object
    ledgers: tuple[LedgerState, ...]
    group: object  # the free group that was open, None if there was none
    extra: Any


class Snapshots:
    """The states of one ledger that may still be restored, oldest first.

    They are known weakly: a state that its taker has forgotten costs nothing from then on.
    """

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self.outstanding: list[ref[LedgerState]] = []  # to ask, before `lose`, whether there are any

    def take(self, books: Books) -> LedgerState:
        """A state to come back to; copies `books`."""
        state = LedgerState(books.copy())
        self.outstanding.append(ref(state, self.outstanding.remove))
        return state

    def lose(self, pages: PageArray) -> None:
        """These pages leave the holder that they have had, perhaps for longer than some states."""
        for state in self._alive():
            holders = state.books.holder
            then = holders[pages]
            holders[pages[(then >= 0) | (then == CACHED)]] = _LOST

    def require(self, state: LedgerState) -> None:
        """Raise StaleState unless `state` can be restored."""
        if state.ended is not None:
            raise StaleState(f"pool {self._pool!r}: {state.ended}")
        if state not in self._alive():
            raise StaleState(f"pool {self._pool!r}: this state is of another ledger")
        lost = np.flatnonzero(state.books.holder == _LOST)
        if len(lost):
            raise StaleState(
                f"pool {self._pool!r}: {len(lost)} pages that were held then have been given back since: "
                f"{lost[:8].tolist()}"
            )

    def give(self, state: LedgerState) -> Books:
        """The books of a state, which ends with this, as do younger ones.  Raises StaleState and changes nothing."""
        self.require(state)
        alive = self._alive()
        place = alive.index(state)
        self._end(alive[place:], "a state taken before this one has been restored since")
        state.ended = "this state has been restored already"
        return state.books

    def end_all(self) -> None:
        """The ledger begins anew."""
        self._end(self._alive(), "this state is from before a clear()")

    def _alive(self) -> list[LedgerState]:
        """Held by name while we look at them, so that none can vanish from the list meanwhile."""
        return [state for known in tuple(self.outstanding) if (state := known()) is not None]

    def _end(self, states: Sequence[LedgerState], why: str) -> None:
        for state in states:
            state.ended = why
        self.outstanding[:] = [known for known in self.outstanding if known() not in states]
