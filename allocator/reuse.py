"""What requests leave to each other: the prefix cache, the ledgers and the lines of the rows kept in step.

A page in the cache belongs to the cache, whoever wrote it; a row that reads it is a user, counted by the cache.  A row
enters with the pages of a match.  Whole pages of settled tokens go over to the cache (`publish`), from the front of a
line, so that what is reused is always the first part of it.  If the cache has such a page already, the row's line names
the cache's from then on and its own goes back, behind the fence of the last step that may name it.  A row that leaves
is a user until the last step that names it is settled.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from kvloom.allocator.errors import BrokenInvariant, InvalidArgument
from kvloom.allocator.host_prefixes import HostPrefixes
from kvloom.allocator.memory_pool import MemoryPool
from kvloom.allocator.pages import CACHED
from kvloom.allocator.ports import TokenArray
from kvloom.allocator.prefix import Evicted, Inserted, KeptPrefixCache, Match
from kvloom.allocator.ring import PageArray
from kvloom.allocator.step_binding import StepBinding
from kvloom.allocator.table import RowArray
from kvloom.allocator.tally import Tally, TallyState

EVICTION_SECONDS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0)  # bounds of the buckets
TICK_SECONDS = 0.1  # between two looks at what has outlived its time: a step is shorter than that
TokensOf = Callable[[int, int, int], TokenArray]  # of a row, from one place to another: int32


class PrefixReuse:
    """The only one that tells the prefix cache of a memory anything, and the only writer of `table.reused`."""

    def __init__(
        self,
        cache: KeptPrefixCache,
        pools: Mapping[str, MemoryPool],
        page_size: int,
        binding: StepBinding,
        watermarks: tuple[float, float],
        host: HostPrefixes,
    ) -> None:
        self.cache = cache
        self._host = host
        self._pools = pools
        self._first = next(iter(pools.values()))
        self._page_size = page_size
        self._binding = binding
        self._names: dict[int, tuple[str, int]] = {}  # namespace and priority of each row in use
        self._found: dict[int, int] = {}  # how many pages each of these rows began with, computed by others
        self._silent: set[int] = set()  # rows that cannot publish any more
        self._leaving: deque[tuple[int, str, PageArray]] = deque()  # (fence, pool, pages) whose user is on its way out
        self._doubtful: list[tuple[int, PageArray]] = []  # (fence, pages) whose KV may be wrong
        self._settled = -1
        self._cache_ticks_at = -math.inf
        low, high = watermarks if _two_numbers(watermarks) else (1, 0)
        if not 0 <= low <= high <= 1:
            raise InvalidArgument(f"watermarks={watermarks} must be shares of a pool, the lower one first")
        sizes = [(pool, pool.allocator.num_pages) for pool in pools.values()]
        self._marks = [(pool, int(low * pages), int(high * pages)) for pool, pages in sizes]
        self._eviction_seconds = Tally(EVICTION_SECONDS)
        # Last: if anything is wrong, the cache is still free for others.
        cache.attach(page_size, {name: pool.spec.window for name, pool in pools.items()})

    def match(self, tokens: TokenArray, namespace: str) -> Match:
        """The longest cached prefix, and what the host has behind it.  Mutates nothing."""
        return self._host.match(tokens, self.cache.match(tokens, namespace))

    def enter(self, row: int, match: Match, priority: int = 0) -> None:
        """A new row begins with the pages of a match, which has been locked for it."""
        self._names[row] = (match.namespace, priority)
        self._found[row] = match.tokens // self._page_size
        if match.tokens:
            for name, pool in self._pools.items():
                pages = match.pages[name]
                pool.table.reuse(row, pages, int(np.count_nonzero(pages == 0)), match.tokens)
                self._binding.changed(name, row, slice(0, len(pages)))
                self._count_idle(pool)

    def fork(self, row: int, rows: RowArray) -> None:
        """Rows have begun with the line of another: they use what it uses."""
        for name, pool in self._pools.items():
            table = pool.table
            used = table.pages[row, table.first[row] : table.reused[row]]
            for new in rows.tolist():
                self.cache.share(name, used)
                self._binding.changed(name, new, slice(int(table.first[new]), int(table.page_counts[new])))
        self._names |= dict.fromkeys(rows.tolist(), self._names[row])
        self._found |= dict.fromkeys(rows.tolist(), int(self._first.table.reused[row]))

    def namespace(self, row: int) -> str:
        """The namespace of a row in use."""
        return self._names[row][0]

    def lock(self, match: Match) -> None:
        """Whoever enters with this match uses its pages.  Raises InvalidArgument when it is gone."""
        self.cache.lock(match)

    def unlock(self, match: Match) -> None:
        """Nobody enters with this match, which has been locked."""
        for name, pages in match.pages.items():
            self._unlock(name, pages[pages > 0], -1)

    def publish(self, rows: RowArray, lengths: RowArray, tokens_of: TokensOf, fence: int) -> None:
        """The first `lengths[i]` tokens of each row are settled: whole pages that are new go to the cache.

        Pages that the cache has already are given back once step `fence` is settled.
        """
        whole = lengths // np.int32(self._page_size)
        for i in (whole > self._first.table.reused[rows]).nonzero()[0].tolist():
            if (row := int(rows[i])) not in self._silent:
                self._publish_row(row, int(whole[i]), tokens_of, fence)

    def drop_users(self, rows: RowArray, fence: int, *, forget: bool) -> None:
        """Rows leave: they use no page of the cache any more, once step `fence` is settled.

        `forget`: what they have published may be wrong, and goes where nobody uses it.
        """
        for row in rows.tolist():
            for name, pool in self._pools.items():
                table = pool.table
                self._unlock(name, table.pages[row, table.first[row] : table.reused[row]].copy(), fence)
            if forget:
                table = self._first.table
                self._doubtful.append((fence, table.pages[row, self._found[row] : table.reused[row]].copy()))
            del self._names[row], self._found[row]
            self._silent.discard(row)
        self._forget_doubtful()

    def trim(self, pool: MemoryPool, rows: RowArray, lengths: RowArray, tokens_of: TokensOf, fence: int) -> None:
        """Rows whose settled lengths are `lengths` give back the pages of a window pool that are left of the window."""
        table, first = pool.table, pool.first_in_window(lengths)
        if pool is self._first and np.count_nonzero(first >= table.reused[rows]):
            # What is published next hangs on the last page published, and in this pool that must not go before.
            due = first >= table.reused[rows]
            self.publish(rows[due], lengths[due], tokens_of, fence)
            upto = table.reused[rows]
            keeps_up = ~due | (upto == lengths // np.int32(self._page_size))  # others cannot publish, and never will
            first = np.where(keeps_up, np.minimum(first, np.maximum(upto - 1, 0)), first)
        begin, end = table.first[rows], np.minimum(first, table.reused[rows])
        for i in (end > begin).nonzero()[0].tolist():
            self._unlock(pool.name, table.pages[rows[i], begin[i] : end[i]].copy(), -1)
        pool.rows.trim(rows, first)

    def settle(self, step: int) -> None:
        """Step `step` is over: who left with it uses nothing any more."""
        self._settled = max(self._settled, step)
        for _ in range(len(self._leaving)):
            fence, pool, pages = self._leaving.popleft()
            self._unlock(pool, pages, fence)
        self._forget_doubtful()

    def make_room(self, wanted: Sequence[tuple[MemoryPool, int]]) -> bool:
        """Whether so many pages are free in each pool, some of them given up by the cache if need be.

        Nothing is given up when even that would not do in one of them.
        """
        short = [(pool, pages - pool.free_pages) for pool, pages in wanted if pages > pool.free_pages]
        if any(pages > self.cache.evictable(pool.name) for pool, pages in short):
            return False
        for pool, pages in short:
            self.give_up(pool, pages)
        return True

    def give_up(self, pool: MemoryPool, pages: int, reason: str = "capacity") -> bool:
        """Whether the cache gives up any of `pages` pages, as many as it can; they are free then."""
        if not self.cache.evictable(pool.name):
            return False
        begin = perf_counter()
        evicted = self.cache.evict(pool.name, pages, reason)
        self._host.save(evicted)
        self._free(evicted)
        self._eviction_seconds.add(perf_counter() - begin)
        return True

    def tick(self, now: float) -> None:
        """It is `now`: what has outlived its time goes; where less than `low` is free, the cache gives up to `high`."""
        for pool, low, high in self._marks:
            pool.allocator.ledger.sampling.tick(now)
            if (free := pool.free_pages) < low:
                self.give_up(pool, high - free, "watermark")
        if now >= self._cache_ticks_at:
            self._cache_ticks_at = now + TICK_SECONDS
            self._free(self.cache.tick(now))

    def reset(self) -> None:
        """The cache gives up all that nobody uses."""
        self._free(self.cache.reset())

    def eviction_seconds(self) -> TallyState:
        """Host time of each eviction on demand or below the watermark."""
        return self._eviction_seconds.state()

    def check(self) -> None:
        """Raise BrokenInvariant unless the cache's pages are its own, with as many users as there are."""
        self.cache.check()
        self._host.check()
        for name, pool in self._pools.items():
            users = self._users(pool)
            used = np.flatnonzero(users).astype(np.int32)
            if (pool.allocator.ledger.holders_of(used) != CACHED).any():
                raise BrokenInvariant(f"pool {name!r}: rows reuse pages that are not the cache's")
            cached, listed = pool.allocator.statistics().cached, self.cache.statistics().pages.get(name, 0)
            if cached != listed:
                raise BrokenInvariant(f"pool {name!r}: {cached} pages are cached, the cache knows {listed}")
            if len(used) > cached - self.cache.evictable(name):
                raise BrokenInvariant(
                    f"pool {name!r}: {len(used)} of {cached} cached pages are used; the cache would give up "
                    f"{self.cache.evictable(name)}"
                )

    def _users(self, pool: MemoryPool) -> NDArray[np.int32]:
        """How many rows name each page of the cache, those on their way out included."""
        table, users = pool.table, np.zeros(pool.allocator.num_pages + 1, np.int32)
        rows = table.slots.held_rows()
        counts = np.maximum(table.reused[rows] - table.first[rows], 0)
        np.add.at(users, table.pages_at(rows, table.first[rows], counts), 1)
        for _, name, pages in self._leaving:
            if name == pool.name:
                np.add.at(users, pages, 1)
        users[0] = 0
        return users

    def _forget_doubtful(self) -> None:
        due = [pages for fence, pages in self._doubtful if fence <= self._settled]
        if due:
            self._doubtful = [(fence, pages) for fence, pages in self._doubtful if fence > self._settled]
            for pages in due:
                self._free(self.cache.forget(pages))

    def _free(self, evicted: Evicted) -> None:
        for name, pages in evicted.items():
            if len(pages):
                self._pools[name].allocator.ledger.evict(pages)

    def _publish_row(self, row: int, upto: int, tokens_of: TokensOf, fence: int) -> None:
        """Places up to `upto`, or as many as can be; a row that cannot do all of it does not publish any more."""
        begin = int(self._first.table.reused[row])
        offered = {name: pool.table.pages[row, begin:upto].copy() for name, pool in self._pools.items()}
        # Forks share pages among themselves; the cache gets what stands before.
        count = min(_before(pool.rows.shared(row, offered[name])) for name, pool in self._pools.items())
        after = int(self._first.table.pages[row, begin - 1]) if begin else 0
        if begin and not after:  # what this would hang on has left the window
            count = 0
        if count:
            namespace, priority = self._names[row]
            tokens = tokens_of(row, begin * self._page_size, (begin + count) * self._page_size)
            offered = {name: pages[:count] for name, pages in offered.items()}
            cached = self.cache.insert(namespace, after, tokens, offered, priority)
            count = _before((offered[self._first.name] > 0) & (cached.pages[self._first.name] == 0))
            for name, pool in self._pools.items():
                self._hand_over(row, begin, pool, offered[name][:count], cached, fence)
        if begin + count < upto:
            self._silent.add(row)

    def _hand_over(
        self, row: int, begin: int, pool: MemoryPool, pages: PageArray, cached: Inserted, fence: int
    ) -> None:
        """The cache has these positions of a row: what it adopted is its own, what it had already comes back."""
        theirs, adopted = cached.pages[pool.name][: len(pages)], cached.adopted[pool.name][: len(pages)]
        ledger, mine = pool.allocator.ledger, pages > 0
        ledger.cache(pages[adopted], row)
        twice = pages[mine & ~adopted]
        pool.table.reused[row] = begin + len(pages)
        if len(twice):
            ledger.release(twice, row, reason="rollback", fence=fence)
            pool.table.pages[row, begin : begin + len(pages)] = np.where(mine, theirs, 0)
            self._binding.changed(pool.name, row, slice(begin, begin + len(pages)))
        self._count_idle(pool)

    def _unlock(self, pool: str, pages: PageArray, fence: int) -> None:
        """The pages of one row."""
        if len(pages) == 0:
            return
        if fence > self._settled:
            self._leaving.append((fence, pool, pages))
        else:
            self.cache.unlock(pool, pages)
            self._count_idle(self._pools[pool])
            self._pools[pool].allocator.ledger.sampling.used(pages)

    def _count_idle(self, pool: MemoryPool) -> None:
        pool.allocator.ledger.count_idle(self.cache.evictable(pool.name))


def _before(marks: NDArray[np.bool_]) -> int:
    """How many stand before the first that is marked; all when none is."""
    return int(np.argmax(marks)) if np.count_nonzero(marks) else len(marks)


def _two_numbers(values: object) -> bool:
    return isinstance(values, tuple) and len(values) == 2 and all(isinstance(value, Real) for value in values)
