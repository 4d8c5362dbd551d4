"""The ledger and the public allocators once more, slow and plain: lists and dicts, written from their descriptions."""

from collections import Counter
from copy import deepcopy
from typing import Any

from kvloom.allocator import AllocatorError, GroupMisuse, StaleState

FREE, QUARANTINED, CACHED, CALLER = -1, -2, -3, 2**31 - 2
Row = list[int]  # the slots of its tokens, in order


class TwinState:
    """What a twin was.  A page that it had then and has given back since makes it worthless."""

    def __init__(self, saved: dict[str, Any], had: set[int]) -> None:
        self.saved, self.had = saved, had
        self.lost: set[int] = set()


class TwinLedger:
    """`holder[page]` for every page, and lists of pages in the order of taking."""

    def __init__(self, pages: int, need_sort: bool) -> None:
        self.pages, self.need_sort = pages, need_sort
        self.states: list[TwinState] = []
        self.clear()

    def clear(self) -> None:
        self.states.clear()
        self.settled = -1
        self.holder = dict.fromkeys(range(1, self.pages + 1), FREE)
        self.free = list(range(1, self.pages + 1))
        self.released: list[int] = []
        self.waiting: list[tuple[int, list[int], bool]] = []
        self.queued: list[int] = []
        self.allocated = self.failures = self.groups = self.sorts = self.peak = 0
        self.freed: Counter[str] = Counter()

    def held(self) -> dict[int, int]:
        return {page: holder for page, holder in self.holder.items() if holder >= 0}

    def in_state(self, state: int) -> list[int]:
        return [page for page, holder in self.holder.items() if holder == state]

    def free_pages(self) -> int:
        return len(self.free) + len(self.released)

    def take(self, holders: list[int]) -> list[int] | None:
        count = len(holders)
        if count > self.free_pages():
            self.failures += 1
            return None
        if count > len(self.free):
            self.free, self.released = sorted(self.free + self.released), []
            self.sorts += 1
        taken, self.free = self.free[:count], self.free[count:]
        self.holder |= zip(taken, holders, strict=True)
        self.allocated += count
        self.peak = max(self.peak, len(self.held()))
        return taken

    def release(self, pages: list[int], reason: str = "finish", fence: int = -1, front: bool = True) -> None:
        self.leave(pages)
        self.put(pages, reason, fence, front)

    def settle(self, step: int) -> None:
        self.settled = max(self.settled, step)
        for fence, pages, front in self.waiting:
            if fence <= self.settled:
                self.to_free(pages, front)
        self.waiting = [entry for entry in self.waiting if entry[0] > self.settled]

    def queue(self, pages: list[int]) -> None:
        self.leave(pages)
        self.queued += pages
        self.holder |= dict.fromkeys(pages, QUARANTINED)

    def free_queued(self, reason: str = "finish", front: bool = True, ascending: bool = False) -> int:
        pages, self.queued = sorted(self.queued) if ascending else self.queued, []
        self.put(pages, reason, -1, front)
        return len(pages)

    def cache(self, pages: list[int]) -> None:
        self.leave(pages)
        self.holder |= dict.fromkeys(pages, CACHED)

    def evict(self, pages: list[int]) -> None:
        self.leave(pages)
        self.to_free(pages, front=True)
        self.freed["evict"] += len(pages)

    def backup(self) -> TwinState:
        saved = {name: value for name, value in vars(self).items() if name not in ("states", "settled")}
        had = {page for page, holder in self.holder.items() if holder >= 0 or holder == CACHED}
        self.states.append(TwinState(deepcopy(saved), had))
        return self.states[-1]

    def can_restore(self, state: TwinState) -> bool:
        return state in self.states and not state.lost

    def restore(self, state: TwinState) -> None:
        del self.states[self.states.index(state) :]
        vars(self).update(state.saved)
        self.settle(self.settled)

    def leave(self, pages: list[int]) -> None:
        for state in self.states:
            state.lost |= state.had & set(pages)

    def put(self, pages: list[int], reason: str, fence: int, front: bool) -> None:
        if not pages:
            return
        self.groups += 1
        self.freed[reason] += len(pages)
        if fence <= self.settled:
            self.to_free(pages, front)
        else:
            self.holder |= dict.fromkeys(pages, QUARANTINED)
            self.waiting.append((fence, pages, front))

    def to_free(self, pages: list[int], front: bool) -> None:
        home = self.released if self.need_sort else self.free
        home[:] = pages + home if front else home + pages
        self.holder |= dict.fromkeys(pages, FREE)


class TwinAllocator:
    """Token by token: a page from the front of the list where a row stands at a page boundary, else the next slot.

    Freed pages go to the end in the order of the slots (`first_in_first_out`), or to the front, ascending.
    With `window_pages` there is a second list; `peer[page]` is a page's window page, as long as it has one.
    """

    def __init__(
        self, pages: int, page_size: int, need_sort: bool, first_in_first_out: bool, window_pages: int | None = None
    ) -> None:
        self.page_size, self.first_in_first_out = page_size, first_in_first_out
        self.full = TwinLedger(pages, need_sort)
        self.window = None if window_pages is None else TwinLedger(window_pages, need_sort)
        self.pools = [self.full] if self.window is None else [self.full, self.window]
        self.peer: dict[int, int] = {}
        self.group: object = None

    def available_size(self) -> int:
        return min(pool.free_pages() for pool in self.pools) * self.page_size

    def extend(self, rows: list[Row], grown: list[int]) -> list[list[int]] | None:
        """The new slots of each row; the rows stay as they are."""
        begins = [
            [position % self.page_size == 0 for position in range(len(row), len(row) + n)]
            for row, n in zip(rows, grown, strict=True)
        ]
        pages = self.take(sum(map(sum, begins)))
        if pages is None:
            return None
        result = []
        for row, new_page in zip(rows, begins, strict=True):
            slots = row[-1:]
            for is_first in new_page:
                slots.append(pages.pop(0) * self.page_size if is_first else slots[-1] + 1)
            result.append(slots[len(row[-1:]) :])
        return result

    def take(self, count: int) -> list[int] | None:
        short = [pool for pool in reversed(self.pools) if pool.free_pages() < count]
        if short:
            short[0].failures += 1
            return None
        pages, *peers = [pool.take([CALLER] * count) or [] for pool in self.pools]
        for page, peer in zip(pages, *peers, strict=True) if peers else ():
            self.peer[page] = peer
        return pages

    def free(self, slots: list[int]) -> None:
        self.give_back(self.full, self.pages_of(slots))
        self.free_swa(slots)

    def free_swa(self, slots: list[int]) -> None:
        if self.window:
            self.give_back(self.window, [self.peer.pop(page) for page in self.pages_of(slots) if page in self.peer])

    def begin_group(self) -> None:
        self.group = object()

    def end_group(self) -> None:
        self.group = None
        for pool in self.pools:
            pool.free_queued(front=not self.first_in_first_out, ascending=not self.first_in_first_out)

    def clear(self) -> None:
        self.group = None
        self.peer.clear()
        for pool in self.pools:
            pool.clear()

    def backup(self) -> tuple[list[TwinState], object, dict[int, int]]:
        return [pool.backup() for pool in self.pools], self.group, dict(self.peer)

    def refuses(self, state: tuple[list[TwinState], object, dict[int, int]]) -> type[AllocatorError] | None:
        if not all(pool.can_restore(then) for pool, then in zip(self.pools, state[0], strict=True)):
            return StaleState
        return GroupMisuse if self.group not in (None, state[1]) else None

    def restore(self, state: tuple[list[TwinState], object, dict[int, int]]) -> None:
        for pool, then in zip(self.pools, state[0], strict=True):
            pool.restore(then)
        self.group, self.peer = state[1], dict(state[2])

    def pages_of(self, slots: list[int]) -> list[int]:
        pages = list(dict.fromkeys(slot // self.page_size for slot in slots))
        return pages if self.first_in_first_out else sorted(pages)

    def give_back(self, pool: TwinLedger, pages: list[int]) -> None:
        if self.group is not None:
            pool.queue(pages)
        else:
            pool.release(pages if self.first_in_first_out else sorted(pages), front=not self.first_in_first_out)

    def window_slot(self, slot: int) -> int:
        page, within = divmod(slot, self.page_size)
        return self.peer[page] * self.page_size + within if page in self.peer else 0
