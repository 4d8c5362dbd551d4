"""Insertion: pages meet what the tree has already; the rest hangs behind it."""

import numpy as np
from numpy.typing import NDArray

from kvloom.allocator.prefix.base import PageArray
from kvloom.allocator.prefix.evictor import Evictor
from kvloom.allocator.prefix.ghosts import GhostList
from kvloom.allocator.prefix.keys import Tokens
from kvloom.allocator.prefix.node import Node
from kvloom.allocator.prefix.tree import PoolIndex, Tree


class Insertion:
    """One insertion of m whole pages: `data` their tokens, `offered` intp [pools, m] their ids, 0 for none.

    After `run`, `pages` is what the tree has there, int32 [pools, m], `adopted` where an offered page became the
    tree's, bool [pools, m], `visited` the nodes that have them, parents first.  Costs O(m), wherever in the tree it is.
    """

    def __init__(
        self, tree: Tree, evictor: Evictor, ghosts: GhostList, data: bytes, offered: PoolIndex, version: int
    ) -> None:
        self._tree = tree
        self._evictor = evictor
        self._ghosts = ghosts
        self._data = data
        self._offered = offered
        self._version = version
        self.pages: PageArray = offered.astype(np.int32)
        self.adopted: NDArray[np.bool_] = np.zeros(offered.shape, bool)
        self.visited: list[Node] = []

    def run(self, node: Node, index: int) -> None:
        """Insert behind the first `index` pages of `node`."""
        at, total, size = 0, self._offered.shape[1], self._tree.page_bytes
        while at < total:
            if index == node.pages:
                child = node.children.get(self._data[at * size : (at + 1) * size])
                if child is None:
                    break
                node, index = child, 0
            same = node.equal_pages(index, self._data, at)
            if same:
                self._meet(node, index, at, same)
            at, index = at + same, index + same
            if index < node.pages:
                break
        if at:
            self._use(at)
        if at < total:
            self._hang(node, index, at)

    def _meet(self, node: Node, index: int, at: int, count: int) -> None:
        """`count` pages are in the tree already: only its tombstones take what is offered."""
        self.visited.append(node)
        mine, theirs = node.ids[:, index : index + count], self.pages[:, at : at + count]
        if self._tree.window_pools:
            healed = (mine == 0) & (theirs > 0)
            if np.count_nonzero(healed):
                self._tree.adopt(node, np.where(healed, theirs, 0).astype(np.intp), self._version)
                mine[healed] = theirs[healed]
                self.adopted[:, at : at + count] = healed
        theirs[:] = mine

    def _use(self, count: int) -> None:
        """Whoever offers a page at one of the first `count` positions uses the one that was there before."""
        for p, pool in enumerate(self._tree.pools):
            index = self.pages[p, :count].astype(np.intp)
            pool.use(index[(self._offered[p, :count] > 0) & ~self.adopted[p, :count]] if pool.tail else index)

    def _hang(self, node: Node, index: int, at: int) -> None:
        """From page `at` on all is new, behind the first `index` pages of `node`."""
        size = self._tree.page_bytes
        new = self._offered[:, at:]
        if not self._tree.has_full:  # positions without any page, and none behind them that has, are worth nothing
            held = np.flatnonzero(new.any(axis=0))
            if len(held) == 0:
                return
            new = new[:, : int(held[-1]) + 1]
        stop = at + new.shape[1]
        tokens: Tokens = memoryview(self._data)[at * size : stop * size]
        if 2 * len(tokens) < len(self._data):  # a view would keep more alive than it shows
            tokens = bytes(tokens)
        if index < node.pages:
            front = self._tree.split(node, index)
            self._evictor.was_split(front, node)
            if self.visited:
                self.visited[-1] = front
            node = front
        begin, upto = at, at
        while upto < stop:  # in as many nodes as there are places where ghosts hang
            at, (upto, ghosts) = upto, self._ghosts.revive(node.ghosts, self._data, upto, stop)
            node = self._grow(node, tokens[(at - begin) * size : (upto - begin) * size], self._offered[:, at:upto])
            node.ghosts = ghosts
        self.adopted[:, begin:stop] = new > 0 if self._tree.window_pools else True

    def _grow(self, node: Node, tokens: Tokens, new: PoolIndex) -> Node:
        """These pages follow at the end of a node; the one that has them."""
        if node.number and not node.children and not node.ghosts:  # a row that goes on
            before = node.pages
            self._tree.extend(node, tokens, new, self._version)
            self._evictor.grew(node, before)
        else:
            node = self._tree.add(node, tokens, new, self._version)
        self.visited.append(node)
        return node
