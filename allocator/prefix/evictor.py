"""Evictor: which pages go next.

Pages without a user go, and only these.  In a full pool a page goes from the end of a leaf, for what hangs behind a
missing page is lost; it takes its window pages along.  In a window pool only the last window before the end of a node
lets anybody continue there, so pages outside of these (loose ones) go first, in the order in which they came loose;
then whole tail windows, in the order of the policy.  What a window pool loses leaves a tombstone: the full pages stay,
and can be evicted like all others.
"""

import numpy as np

from kvloom.allocator.errors import BrokenInvariant
from kvloom.allocator.prefix.base import NO_PAGES, Evicted, PageArray
from kvloom.allocator.prefix.candidates import Candidates, LoosePages
from kvloom.allocator.prefix.eviction import EvictionPolicy
from kvloom.allocator.prefix.expiry import Ages
from kvloom.allocator.prefix.ghosts import Ghost, GhostList
from kvloom.allocator.prefix.node import Node
from kvloom.allocator.prefix.pool_pages import Index
from kvloom.allocator.prefix.tree import Tree


class Evictor:
    """Keeps the candidates right as the tree changes; the only one who takes pages out of it.

    leaves  nodes without children whose last page has no user in any pool; unused where no pool is full
    tails   for each window pool, nodes that may have pages without a user in their last window
    loose   for each window pool, pages without a user outside of it
    cut     the ghosts that came of the last `take`, first to last
    """

    def __init__(self, tree: Tree, policy: EvictionPolicy, ghosts: GhostList, ages: Ages) -> None:
        self._tree = tree
        self._ghosts = ghosts
        self._ages = ages
        self.leaves = Candidates(policy)
        self.tails = {p: Candidates(policy) for p in tree.window_pools}
        self.loose = {p: LoosePages() for p in tree.window_pools}
        self.cut: list[Ghost] = []
        self._taken: list[list[PageArray]] = [[] for _ in tree.pools]

    def became_idle(self, p: int, index: Index) -> None:
        """These pages of pool `p` have lost their last user."""
        tree, pool = self._tree, self._tree.pools[p]
        numbers = pool.node[index]
        if pool.tail:
            loose = pool.depth[index] < tree.ends[numbers] - pool.tail
            self.loose[p].push(index[loose])
            for node in tree.nodes_of(numbers[~loose]):
                self.tails[p].push(node)
        for node in tree.nodes_of(numbers):
            self._consider_leaf(node)

    def grew(self, node: Node, before: int) -> None:
        """A leaf had `before` pages and has more now: some of its tail windows came loose."""
        for p in self._tree.window_pools:
            pool = self._tree.pools[p]
            self.loose[p].push(pool.idle_of(node.held[p, max(0, before - pool.tail) : max(0, node.pages - pool.tail)]))

    def was_split(self, front: Node, back: Node) -> None:
        """`front` is new: there is another end, with a tail window that was loose.  `back` may be left with nothing."""
        if back in self._ages:
            self._ages.touch(front)
        self._consider_tails(front)
        self._prune(back)

    def take(self, p: int, count: int) -> None:
        """At least `count` pages of pool `p` go, or all that can; `end` hands them over."""
        self.cut.clear()
        if p not in self.tails:
            self._take_leaves(count)
            return
        while count > 0 and len(index := self.loose[p].take(count)):
            count -= self._bury(p, self._still_loose(p, index))
        while count > 0 and (node := self.tails[p].pop()):
            count -= self._bury(p, self._idle_tail(p, node))

    def take_end(self, node: Node, *, remember: bool) -> None:
        """All pages at the end of a node go that nobody uses; none when it has children."""
        if not node.children and (count := self.unused_at_end(node, node.pages)):
            parent = node.parent
            self._cut(node, count, remember=remember)
            self._prune(node if node.pages else parent)

    def take_last(self, node: Node, page: int) -> None:
        """The last page of a leaf goes if it is this one of the first pool, and nobody uses it."""
        if node.pages and node.ids[0, node.pages - 1] == page and self.can_lose_last(node):
            parent = node.parent
            self._cut(node, 1, remember=False)
            self._prune(node if node.pages else parent)

    def take_windows(self, node: Node) -> None:
        """All window pages of a node go that nobody uses."""
        for p in self._tree.window_pools:
            self._bury(p, self._tree.pools[p].idle_of(node.held[p]))

    def end(self) -> Evicted:
        """What was taken since the last time, by pool, int32; only now do the maps forget it, all at once."""
        evicted: Evicted = {}
        for pool, parts in zip(self._tree.pools, self._taken, strict=True):
            pages = evicted[pool.pool] = np.concatenate(parts) if parts else NO_PAGES.copy()
            parts.clear()
            pool.drop(pages)
        return evicted

    def unused_at_end(self, node: Node, limit: int) -> int:
        """How many of its last pages, at most `limit`, nobody uses in any pool."""
        count = min(limit, node.pages)
        for pool, row in zip(self._tree.pools, node.ids, strict=True):
            users = pool.users[row[node.pages - count : node.pages].astype(np.intp)]  # tombstones have none
            if np.count_nonzero(users):
                count = int((users[::-1] != 0).argmax())
        return count

    def can_lose_last(self, node: Node) -> bool:
        """Whether `node` is a leaf whose last page nobody uses in any pool."""
        last = node.pages - 1
        return not node.children and not any(
            pool.users[row[last]] for pool, row in zip(self._tree.pools, node.ids, strict=True)
        )

    def has_idle_tail(self, p: int, node: Node) -> bool:
        """Whether some page of its last window has no user in window pool `p`."""
        return len(self._idle_tail(p, node)) > 0

    def _idle_tail(self, p: int, node: Node) -> Index:
        pool = self._tree.pools[p]
        return pool.idle_of(node.held[p, -pool.tail :])

    def _still_loose(self, p: int, index: Index) -> Index:
        """Those that are in the tree, without a user, and outside the tail window of their node."""
        pool = self._tree.pools[p]
        numbers = pool.node[index]
        loose = (numbers > 0) & (pool.users[index] == 0)
        still: Index = index[loose & (pool.depth[index] < self._tree.ends[numbers] - pool.tail)]
        return still

    def _take_leaves(self, count: int) -> None:
        while count > 0 and (node := self.leaves.pop()):
            if not node.children and (free := self.unused_at_end(node, count)):
                self._cut(node, free, remember=True)
                count -= free

    def _cut(self, node: Node, count: int, *, remember: bool) -> None:
        """The last `count` pages of a leaf go, in all pools; whoever is at the end now is a candidate."""
        tree, parent, below = self._tree, node.parent, node.ghosts
        tokens, ids = tree.shorten(node, count)
        for pool, row, taken in zip(tree.pools, ids, self._taken, strict=True):
            taken.append(row[row > 0] if pool.tail else row)
        last = node if node.pages else parent
        if last is None:
            raise BrokenInvariant("a root has no pages to cut")
        if node.pages:
            node.ghosts = {}
        else:
            self._forget(node)
        if remember:
            self.cut.append(self._ghosts.remember(tokens, below, last.ghosts))
        else:
            self._ghosts.forget_all(below)
        self._consider_leaf(last)
        self._consider_tails(last)

    def _bury(self, p: int, index: Index) -> int:
        """These pages leave window pool `p`; nodes that have none left go, where there is no full pool."""
        if len(index) == 0:
            return 0
        nodes = [] if self._tree.has_full else self._tree.nodes_of(self._tree.pools[p].node[index])
        self._tree.bury(p, index)
        self._taken[p].append(index.astype(np.int32))
        for node in nodes:
            self._prune(node)
        return len(index)

    def _prune(self, node: Node | None) -> None:
        """A leaf without a single page goes, and then perhaps its parent; only where no pool is full."""
        while node is not None and node.number and not node.children and not np.count_nonzero(node.held):
            parent = node.parent
            self._cut(node, node.pages, remember=True)
            node = parent

    def _consider_leaf(self, node: Node) -> None:
        """List it if it is a leaf that can lose its last page."""
        if self._tree.has_full and node.number and self.can_lose_last(node):
            self.leaves.push(node)

    def _consider_tails(self, node: Node) -> None:
        """List it if some page of its last window has no user."""
        for p, tails in self.tails.items():
            if node.number and self.has_idle_tail(p, node):
                tails.push(node)

    def _forget(self, node: Node) -> None:
        """The node is no more."""
        self._ages.discard(node)
        for candidates in (self.leaves, *self.tails.values()):
            candidates.discard(node)
