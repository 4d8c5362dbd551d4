"""Waiting for a place in the queue, in the order of coming."""

from collections.abc import Callable
from itertools import islice

import anyio


class QueuePlaces:
    """Those who wait in front of a full queue; `is_full` says whether one more fits.

    Whoever is told to go on keeps its place in the line until it has gone: nobody passes it on its way, and when
    somebody who would not wait has taken its place, it is still where it was.
    """

    def __init__(self, is_full: Callable[[], bool]) -> None:
        self._is_full = is_full
        self._turns: dict[int, anyio.Event] = {}  # by ticket, in the order of coming
        self._tickets = 0

    def __len__(self) -> int:
        return len(self._turns)

    async def wait(self) -> None:
        """Return at once when there is a place and nobody waits for one, else when granted one."""
        if not self._turns and not self._is_full():
            return
        ticket = self._tickets
        self._tickets += 1
        try:
            while True:
                turn = self._turns[ticket] = anyio.Event()
                await turn.wait()
                if not self._is_full():
                    return
        finally:
            del self._turns[ticket]
            self.grant(1)  # it may have given up a place it was granted; the next looks whether there is one

    def grant(self, count: int) -> None:
        """Let the first `count` go on."""
        for turn in islice(self._turns.values(), count):
            turn.set()
