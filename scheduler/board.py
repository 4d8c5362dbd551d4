"""The latest picture of something that only one thread may look at, for all threads."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from kvloom.scheduler.ports import Clock

T = TypeVar("T")
_DUE_SECONDS = 0.01


class Board(Generic[T]):
    """`take` makes an immutable picture; it is called on the thread that made the board, and on no other.

    Other threads read the last one without a lock: of now when its owner sleeps, at most 10 ms older than the last
    turn of the loop when it is busy.  Taking one at every turn would be a quarter of a small step's cost.
    """

    def __init__(self, take: Callable[[], T], clock: Clock) -> None:
        self._take = take
        self._clock = clock
        self._thread = threading.get_ident()
        self._due = 0.0
        self.refresh()

    def read(self) -> T:
        """The picture: of this moment on the owner's thread, the latest one on others."""
        return self._take() if threading.get_ident() == self._thread else self._latest

    def refresh(self) -> None:
        """Hang up a new picture."""
        self._latest = self._take()

    def refresh_if_due(self) -> None:
        """Hang up a new picture unless the last one is less than 10 ms old."""
        now = self._clock()
        if now >= self._due:
            self._due = now + _DUE_SECONDS
            self.refresh()
