"""RadixPrefixCache: a radix tree over whole pages.

The idea is RadixAttention's (Zheng et al., SGLang, arXiv:2312.07104). Ours locks page by page rather than node by
node, knows windows, and compares whole runs of tokens as memory; ghosts come from ARC (Megiddo and Modha, FAST 2003).
"""

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kvloom.allocator.errors import InvalidArgument
from kvloom.allocator.prefix.base import NO_PAGES, Cut, Evicted, Inserted, Match, PageArray, Part, TokenArray
from kvloom.allocator.prefix.checks import check
from kvloom.allocator.prefix.eviction import EvictionPolicy, policy_of
from kvloom.allocator.prefix.evictor import Evictor
from kvloom.allocator.prefix.expiry import Ages, Pins, Timeline, pinned_pages
from kvloom.allocator.prefix.ghosts import GhostList
from kvloom.allocator.prefix.insertion import Insertion
from kvloom.allocator.prefix.keys import int32_row, whole_pages
from kvloom.allocator.prefix.lookups import LookUps, cuts_of
from kvloom.allocator.prefix.node import Node
from kvloom.allocator.prefix.pool_pages import Index, PoolPages
from kvloom.allocator.prefix.reports import PrefixStatistics
from kvloom.allocator.prefix.tree import PoolIndex, Tree
from kvloom.allocator.prefix.windows import visible_tail, whole_windows


class RadixPrefixCache:
    """Keeps the pages of prefixes in a radix tree; see `PrefixCache` for the contract of the first seven verbs.

    `policy`: lru, lfu, fifo, priority, or an object.  `ttl`: seconds without use after which `tick` drops an entry.
    `pin_budget_pages`: pages of all pools that pins may keep.  `ghost_pages`: evicted pages to remember the tokens of.
    Not thread-safe: one thread (the loop's) owns it.  Host memory: the tokens, and 24 bytes for each page id.
    """

    def __init__(
        self,
        policy: EvictionPolicy | str = "lru",
        *,
        ghost_pages: int = 65_536,
        ttl: float | None = None,
        pin_budget_pages: int = 0,
    ) -> None:
        if ghost_pages < 0 or pin_budget_pages < 0:
            raise InvalidArgument(f"ghost_pages={ghost_pages} and pin_budget_pages={pin_budget_pages}: 0 at least")
        self.pin_budget_pages = pin_budget_pages
        self._policy = policy_of(policy)
        self._ghost_pages = ghost_pages
        self._time = Timeline()
        self._ages = Ages(ttl, self._time)
        self._pins = Pins(pin_budget_pages, self._time)
        self._version = self._uses = 0
        self._inserted = self._duplicates = 0
        self._evicted: Counter[tuple[str, str]] = Counter()
        self._by_name: dict[str, int] = {}  # empty until attached
        self._set_up(1, {})

    def attach(self, page_size: int, windows: Mapping[str, int | None]) -> None:
        """Serve one memory, for ever.  Raises InvalidArgument."""
        if self._by_name:
            raise InvalidArgument("this prefix cache is attached to a memory already")
        page_size = operator.index(page_size)
        if page_size < 1 or not windows or any(window is not None and window < 1 for window in windows.values()):
            raise InvalidArgument(f"page_size={page_size} and windows {dict(windows)}: one pool, and 1 each, at least")
        self._set_up(page_size, windows)

    def match(self, tokens: TokenArray, namespace: str = "") -> Match:
        """The longest cached prefix that leaves a token to compute.  Mutates nothing; O(tokens), one copy of them.

        That is all pages of it in full pools, and in window pools those that attention still sees behind it.
        """
        tree = self._tree
        path, _ = tree.walk(whole_pages(tokens, self._tree.page_size), namespace)
        if not path:
            return Match(0, {pool.pool: NO_PAGES.copy() for pool in tree.pools}, namespace, self._version)
        ids = np.concatenate([node.ids[:, :same] for node, same in path], axis=1)
        if tree.window_pools:
            pages = whole_windows(ids, tree.pools)
            ids = visible_tail(ids[:, :pages], tree.pools)
        by_pool = {pool.pool: row for pool, row in zip(tree.pools, ids, strict=True)}
        return Match(ids.shape[1] * tree.page_size, by_pool, namespace, self._version)

    def lock(self, match: Match) -> None:
        """One user more for each page of `match`; its nodes are used now.  O(pages + nodes).

        Raises InvalidArgument when some of its pages have left the tree since, and changes nothing.
        """
        used = self._fresh(match)
        for pool, index in used:
            pool.use(index)
        if match.tokens:
            nodes = list(self._tree.node_of(0, int(used[0][1][-1])).path())
            for node in nodes:
                node.hits += 1
            self._touch(nodes)

    def unlock(self, pool: str, pages: PageArray) -> None:
        """One user fewer for each of the distinct `pages`; zeros are passed over.  O(pages).

        Raises DoubleFree for a page without a user or named twice, and changes nothing.
        """
        self._unlock(self._pool(pool), int32_row("pages", pages))

    def share(self, pool: str, pages: PageArray) -> None:
        """One user more for each of the distinct `pages` that have users already; zeros are passed over.  O(pages).

        Raises InvalidArgument for a page without a user, and changes nothing.
        """
        self._tree.pools[self._pool(pool)].use_again(int32_row("pages", pages))

    def insert(
        self, namespace: str, after: int, tokens: TokenArray, pages: Mapping[str, PageArray], priority: int = 0
    ) -> Inserted:
        """Cache m whole pages of `tokens` behind page `after` of the first pool; O(m).

        Where the tree has equal tokens its own pages stay, and only tombstones take what is offered.  Raises
        InvalidArgument, and changes nothing: `after` is not cached in this namespace, lengths do not agree, a page is
        none, named twice, cached already, or missing in a full pool.
        """
        priority = operator.index(priority)
        node, index = self._tree.place_after(namespace, operator.index(after))
        data, offered = self._offer(tokens, pages, 0 if node is None else node.start + index)
        node = node or self._tree.root_of(namespace)
        self._version += 1
        insertion = Insertion(self._tree, self._evictor, self._ghosts, data, offered, self._version)
        insertion.run(node, index)
        for node in insertion.visited:
            node.priority = max(node.priority, priority)
        self._touch(reversed(insertion.visited))
        adopted = int(np.count_nonzero(insertion.adopted))
        self._inserted += adopted
        self._duplicates += int(np.count_nonzero(offered)) - adopted
        names = self._by_name
        return Inserted(
            dict(zip(names, insertion.pages, strict=True)), dict(zip(names, insertion.adopted, strict=True))
        )

    def evict(self, pool: str, count: int, reason: str = "capacity") -> Evicted:
        """At least `count` pages of `pool` without a user go, or all there are; all that went, by pool.

        O(pages that go + nodes looked at), whatever the size of the tree.
        """
        p = self._pool(pool)
        if count < 0:
            raise InvalidArgument(f"pool {pool!r}: cannot evict {count} pages")
        self._evictor.take(p, count)
        return self._hand_over(reason)

    def evictable(self, pool: str) -> int:
        """Pages of `pool` in the tree without a user; O(1)."""
        return self._tree.pools[self._pool(pool)].idle

    def forget(self, pages: PageArray) -> Evicted:
        """Of these pages of the first pool, a path, those at the end go that nobody uses or goes on from ("manual")."""
        for page in int32_row("pages", pages)[::-1].tolist():
            if self._tree.pools[0].in_tree(page):
                self._evictor.take_last(self._tree.node_of(0, page), page)
        return self._hand_over("manual")

    def reset(self) -> Evicted:
        """All pages without a user go, all pins end, and all ghosts; O(tree)."""
        for match in self._pins.take_all():
            self._unpin(match)
        for node in reversed(list(self._tree.each())):
            self._evictor.take_end(node, remember=False)
            if node.number:
                self._evictor.take_windows(node)
        self._ghosts.shrink_to(0)
        return self._hand_over("reset")

    def tick(self, now: float) -> Evicted:
        """It is `now`, in seconds: pins whose time is over end, entries that outlived `ttl` go.

        Cheap when nothing is due.  A node in use, or with younger ones behind it, gets its time anew.
        """
        self._time.advance(now)
        for match in self._pins.take_due():
            self._unpin(match)
        for node in self._ages.overdue():
            self._evictor.take_end(node, remember=False)
        return self._hand_over("ttl")

    def pin(self, match: Match, seconds: float) -> bool:
        """Lock `match` for some time; False, nothing changed, when the budget is too small.  Raises as `lock`."""
        self._fresh(match)
        if not self._pins.add(match, pinned_pages(match), seconds):
            return False
        self.lock(match)
        return True

    def unpin(self, match: Match) -> None:
        """End the pin of this very `match`.  Raises InvalidArgument when it is not pinned (any more)."""
        self._pins.take(match)
        self._unpin(match)

    def regret(self, tokens: TokenArray, namespace: str, matched_tokens: int, host_tokens: int = 0) -> int:
        """Tokens beyond a match that would have been cached, had their pages not been evicted of late.

        Those that the host has kept are none of them.  Records the look-up: all tokens, those matched, those from the
        host and those regretted.  Mutates nothing else.
        """
        data = whole_pages(tokens, self._tree.page_size)
        return self._look_ups.record(data, namespace, len(tokens), matched_tokens, host_tokens)

    def cuts(self, evicted: Evicted) -> Sequence[Cut]:
        """What the last `evict` gave up, `evicted`, and what is remembered of it, oldest first.

        Raises InvalidArgument with window pools: there it is not all pages of whole tokens that go.
        """
        if self._tree.window_pools:
            raise InvalidArgument("what window pools give up is no run of whole pages")
        return cuts_of(evicted, self._evictor.cut, self._ghosts, self._tree.page_bytes)

    def parts_behind(self, tokens: TokenArray, match: Match) -> tuple[Part, ...]:
        """What bodies have of `tokens` directly behind their `match`, leaving a token to compute; O(tokens)."""
        return self._look_ups.parts_behind(whole_pages(tokens, self._tree.page_size), match)

    def statistics(self) -> PrefixStatistics:
        """An immutable report."""
        pools = self._tree.pools
        return PrefixStatistics(
            entries=self._tree.entries,
            pages={pool.pool: pool.cached for pool in pools},
            locked={pool.pool: pool.cached - pool.idle for pool in pools},
            inserted=self._inserted,
            duplicates=self._duplicates,
            evicted=dict(self._evicted),
            **self._look_ups.tokens,
            pinned_pages=self._pins.pages,
            ghost_pages=self._ghosts.pages,
        )

    def check(self) -> None:
        """Raise BrokenInvariant unless tree, maps, counters and candidates agree; O(tree)."""
        check(self._tree, self._evictor, self._ghosts)

    def _set_up(self, page_size: int, windows: Mapping[str, int | None]) -> None:
        self._tree = Tree(page_size, windows)
        self._ghosts = GhostList(self._ghost_pages, self._tree.page_bytes)
        self._look_ups = LookUps(self._tree, self._ghosts)
        self._evictor = Evictor(self._tree, self._policy, self._ghosts, self._ages)
        self._by_name = {pool.pool: p for p, pool in enumerate(self._tree.pools)}

    def _pool(self, name: str) -> int:
        if name not in self._by_name:
            raise InvalidArgument(f"no pool {name!r}; there are {', '.join(self._by_name) or 'none: attach first'}")
        return self._by_name[name]

    def _offer(self, tokens: Any, pages: Mapping[str, Any], first_depth: int) -> tuple[bytes, PoolIndex]:
        """Tokens as bytes and page ids as intp [pools, m], checked."""
        tree, row = self._tree, int32_row("tokens", tokens)
        if pages.keys() != self._by_name.keys() or not pages:
            raise InvalidArgument(f"pages of the pools {sorted(pages)}; there are {sorted(self._by_name)}")
        rows = [int32_row("pages", pages[name]) for name in self._by_name]
        count, rest = divmod(len(row), tree.page_size)
        if rest or any(len(ids) != count for ids in rows):
            raise InvalidArgument(
                f"{len(row)} tokens and {[len(ids) for ids in rows]} pages of {tree.page_size} tokens do not agree"
            )
        offered = [pool.new(ids, first_depth) for pool, ids in zip(tree.pools, rows, strict=True)]
        return row.tobytes(), np.stack(offered) if len(offered) > 1 else offered[0][None]

    def _fresh(self, match: Match) -> list[tuple[PoolPages, Index]]:
        """The pages of `match`, by pool.  Raises InvalidArgument unless all are where they were."""
        used: list[tuple[PoolPages, Index]] = []
        if match.tokens == 0:
            return used
        for pool in self._tree.pools:
            ids = match.pages.get(pool.pool)
            index = None if ids is None else pool.fresh(ids, match.version)
            if index is None or len(index) == 0:
                raise InvalidArgument(f"a match of {match.tokens} tokens is stale: its pages have left the cache")
            used.append((pool, index))
        return used

    def _touch(self, nodes: Iterable[Node]) -> None:
        """They are used now; children before parents, which so count as used later."""
        for node in nodes:
            self._uses += 1
            node.last_used = self._uses
            self._ages.touch(node)

    def _unlock(self, p: int, pages: PageArray) -> None:
        idle = self._tree.pools[p].unuse(pages)
        if len(idle):
            self._evictor.became_idle(p, idle)

    def _unpin(self, match: Match) -> None:
        for name, pages in match.pages.items():
            self._unlock(self._by_name[name], pages)

    def _hand_over(self, reason: str) -> Evicted:
        evicted = self._evictor.end()
        for name, pages in evicted.items():
            if len(pages):
                self._evicted[name, reason] += len(pages)
        return evicted
