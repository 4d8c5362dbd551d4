"""Who gets one more token this step: running sequences, oldest first.

Pages that a step in flight may use are never taken away (rule R3).  When pages run short, the youngest sequence makes
room: at once when no plan out names it, else it is marked and its pages come back when its last step commits, while
the hungry stall.  There is no loop that preempts its way through a step in flight, so no cascade.
"""

from collections.abc import Callable

from kvloom.scheduler.plan import IntArray
from kvloom.scheduler.ports import Memory
from kvloom.scheduler.rows import Rows


def grow(rows: Rows, memory: Memory, budget: int, preempt: Callable[[int], None]) -> IntArray:
    """Reserve one more token for up to `budget` running rows; returns those that got it, oldest first.

    Mutates `memory`, marks at most one victim in `rows.doomed`, and calls `preempt(row)` for victims not in flight.
    """
    ready = rows.decodable()
    if len(ready) > budget:
        ready = ready[:budget]
    while len(ready):
        shortfall = memory.reserve(ready, rows.scheduled[ready] + 1)
        if shortfall is None:
            return ready
        victim = _victim(rows)
        if victim is None or rows.in_flight(victim):
            if victim is not None:
                rows.doom(victim)
                ready = ready[ready != victim]
            ready = ready[: shortfall.fits]
        else:
            preempt(victim)
            ready = ready[ready != victim]
    return ready


def make_room(rows: Rows, preempt: Callable[[int], None], hungry: int) -> bool:
    """The youngest makes room for a row that nobody is older than: True when it has, at once.

    Marks it when a plan out names it.  The hungry one itself stays: whoever is older will be done some time.
    """
    victim = _victim(rows)
    if victim is None or victim == hungry:
        return False
    if rows.in_flight(victim):
        rows.doom(victim)
        return False
    preempt(victim)
    return True


def _victim(rows: Rows) -> int | None:
    """The youngest running row; None when it is also the oldest, or when a victim is on its way out already."""
    order = rows.order
    if len(order) < 2 or rows.dooms:
        return None
    return int(order[-1])
