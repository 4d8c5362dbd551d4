"""Long random streams on a cache and on its twin: same matches, same counts, and what goes may go."""

import random
from collections.abc import Mapping

import numpy as np
import pytest

from kvloom.allocator import DoubleFree, InvalidArgument, Match, RadixPrefixCache
from tests.allocator.prefix.helpers import ints, lists
from tests.allocator.prefix.twin import Prefix, TwinCache, is_stale

Held = dict[str, list[int]]
Windows = Mapping[str, int | None]
OPERATIONS = ("match", "lock", "unlock", "unlock", "insert", "insert", "grow", "evict", "tick")


class Stream:
    """Both caches, and rows that hold pages of them."""

    def __init__(self, seed: int, page_size: int, windows: Windows, policy: str, ttl: float | None) -> None:
        self.chance = random.Random(seed)
        self.cache = RadixPrefixCache(policy, ttl=ttl, ghost_pages=20)
        self.cache.attach(page_size, windows)
        self.twin = TwinCache(page_size, windows)
        self.page_size, self.windows = page_size, windows
        self.first = next(iter(windows))
        self.free = {pool: list(range(1, 200)) for pool in windows}
        self.rows: list[tuple[Held, Prefix]] = []
        self.matches: list[tuple[Match, dict[str, list[int | None]], Prefix]] = []
        self.now = 0.0
        self.seen = dict.fromkeys(("hit", "stale", "healed", "duplicate", "evicted", "blocked"), 0)

    def tokens(self, pages: int) -> list[int]:
        """Few different pages, some of which differ in their last token only."""
        made = [[value] * (self.page_size - 1) + [value + self.chance.choice((0, 0, 0, 7))] for value in range(3)]
        return [token for _ in range(pages) for token in self.chance.choice(made)]

    def prompt(self) -> tuple[str, list[int]]:
        known = sorted(self.twin.pages[self.first])
        namespace, start = self.chance.choice(known) if known and self.chance.random() < 0.7 else ("", ())
        keep = self.chance.randint(0, len(start) // self.page_size) * self.page_size
        return self.chance.choice((namespace, "other")), [*start[:keep], *self.tokens(self.chance.randint(0, 4))]

    def match(self) -> None:
        namespace, tokens = self.prompt()
        tokens += [0] * self.chance.randint(0, self.page_size)
        match = self.cache.match(np.array(tokens, np.int64), namespace)
        expected = self.twin.match(tokens, namespace)
        assert lists(match.pages) == expected
        assert match.tokens == len(expected[self.first]) * self.page_size
        self.seen["hit"] += match.tokens > 0
        prefix = namespace, tuple(tokens[: match.tokens])
        self.matches.append((match, self.twin.births_of(expected), prefix))

    def lock(self) -> None:
        if not self.matches:
            return
        match, births, prefix = self.matches.pop(self.chance.randrange(len(self.matches)))
        if is_stale(match, births, self.twin):
            self.seen["stale"] += 1
            with pytest.raises(InvalidArgument):
                self.cache.lock(match)
            return
        self.cache.lock(match)
        self.take(lists(match.pages), prefix)

    def take(self, pages: Held, prefix: Prefix, count: bool = True) -> None:
        held = {pool: [page for page in ids if page] for pool, ids in pages.items()}
        for pool, ids in held.items() if count else ():
            for page in ids:
                self.twin.use(pool, page)
        self.rows.append((held, prefix))

    def unlock(self) -> None:
        """A row lets go of all, or of some: windows are trimmed, and nobody says in which order."""
        if not self.rows:
            return
        at = self.chance.randrange(len(self.rows))
        held, _ = self.rows[at]
        for pool, ids in held.items():
            self.chance.shuffle(ids)
            left = ids[: self.chance.choice((0, 0, len(ids) // 2, len(ids)))]
            gone = ids[len(left) :]
            self.cache.unlock(pool, ints(0, *gone))
            for page in gone:
                self.twin.unuse(pool, page)
            held[pool] = left
        if not any(held.values()):
            del self.rows[at]
        for pool in self.windows:
            with pytest.raises(DoubleFree):
                self.cache.unlock(
                    pool, ints(next((page for page in range(1, 200) if not self.users(pool, page)), 5000))
                )

    def users(self, pool: str, page: int) -> int:
        return self.twin.users[pool].get(page, 0)

    def offer(self, start: Prefix, after: int, tokens: list[int]) -> None:
        count = len(tokens) // self.page_size
        if any(len(self.free[pool]) < count for pool in self.windows):
            return
        offered: Held = {}
        for pool, window in self.windows.items():
            self.chance.shuffle(self.free[pool])
            trimmed = 0 if window is None else self.chance.choice((0, 0, 0, count // 2, count))
            offered[pool] = [0] * trimmed + [self.free[pool].pop() for _ in range(count - trimmed)]
        found = self.cache.insert(
            start[0], after, np.array(tokens, np.int32), {p: ints(*i) for p, i in offered.items()}
        )
        pages, adopted = self.twin.insert(start, tokens, offered)
        assert lists(found.pages) == pages
        assert lists(found.adopted) == adopted
        for pool, ids in offered.items():
            duplicates = [page for page, new in zip(ids, adopted[pool], strict=True) if page and not new]
            self.free[pool] += duplicates
            self.seen["duplicate"] += len(duplicates)
            self.seen["healed"] += adopted[pool] != sorted(adopted[pool])
        used = {pool: [p for p, mine in zip(pages[pool], ids, strict=True) if mine] for pool, ids in offered.items()}
        self.take(used, (start[0], (*start[1], *tokens)), count=False)

    def insert(self) -> None:
        namespace, tokens = self.prompt()
        self.offer((namespace, ()), 0, tokens)

    def grow(self) -> None:
        """A row goes on, behind any page that it holds."""
        held = [ids for ids, _ in self.rows if ids[self.first]]
        if held:
            after = self.chance.choice(self.chance.choice(held)[self.first])
            self.offer(self.twin.after(after), after, self.tokens(self.chance.randint(1, 3)))

    def evict(self) -> None:
        pool, count = self.chance.choice(list(self.windows)), self.chance.randint(0, 12)
        removable = self.twin.removable(pool)
        self.seen["blocked"] += len(removable) < len(self.twin.idle(pool))
        evicted = lists(self.cache.evict(pool, count))
        assert len(evicted[pool]) >= min(count, len(removable))
        if self.windows[pool] is None:
            assert len(evicted[pool]) == min(count, len(removable))
        gone = self.remove(evicted)
        assert gone[pool] <= removable
        if self.windows[pool] is not None:
            assert not any(evicted[other] for other in self.windows if other != pool)
        self.seen["evicted"] += len(evicted[pool])

    def remove(self, evicted: Held) -> dict[str, set[Prefix]]:
        gone = {pool: {self.twin.remove(pool, page) for page in ids} for pool, ids in evicted.items()}
        assert not self.twin.holes()
        for pool, ids in evicted.items():
            self.free[pool] += ids
        return gone

    def tick(self) -> None:
        self.now += 1
        self.remove(lists(self.cache.tick(self.now)))

    def run(self, operations: int) -> None:
        for _ in range(operations):
            getattr(self, self.chance.choice(OPERATIONS))()
            self.cache.check()
            report = self.cache.statistics()
            for pool, held in self.twin.pages.items():
                assert report.pages[pool] == len(held)
                assert self.cache.evictable(pool) == len(self.twin.idle(pool))
                assert report.locked[pool] + self.cache.evictable(pool) + len(self.free[pool]) == 199
        while self.rows:
            self.unlock()
        self.remove(lists(self.cache.reset()))
        assert not any(self.twin.pages.values())
        assert self.cache.statistics().entries == self.cache.statistics().ghost_pages == 0


TWO: Windows = {"full": None, "swa": 9}


@pytest.mark.parametrize(
    ("page_size", "windows", "policy", "ttl", "operations"),
    [
        (4, {"full": None}, "lru", None, 10_000),
        (1, {"full": None}, "lfu", None, 1_500),
        (2, {"full": None, "other": None}, "fifo", 40.0, 1_500),
        (4, TWO, "lru", None, 3_000),
        (4, TWO, "priority", 30.0, 1_500),
        (4, {"full": None, "swa": 3}, "lru", None, 1_500),  # smaller than a page
        (4, {"full": None, "swa": 4}, "lru", None, 1_500),  # as large as one
        (1, {"full": None, "swa": 1}, "lru", None, 1_500),
        (2, {"swa": 5, "full": None, "wide": 9}, "lfu", None, 1_500),  # the first pool has a window
        (4, {"swa": 9}, "lru", None, 3_000),
        (2, {"swa": 3, "wide": 7}, "fifo", 40.0, 1_500),
    ],
    ids=str,
)
def test_b37_random_streams(page_size: int, windows: Windows, policy: str, ttl: float | None, operations: int) -> None:
    stream = Stream(operations + page_size, page_size, windows, policy, ttl)
    stream.run(operations)
    happened = {name for name, times in stream.seen.items() if times}
    expected = {"hit", "stale", "duplicate", "evicted"}
    expected |= {"blocked"} if None in windows.values() else set()
    expected |= {"healed"} if any(windows.values()) else set()
    assert happened >= expected, "the stream is too tame to show anything"
