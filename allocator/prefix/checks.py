"""The books of a prefix cache, looked over from end to end."""

from collections.abc import Iterator

import numpy as np

from kvloom.allocator.errors import BrokenInvariant
from kvloom.allocator.prefix.evictor import Evictor
from kvloom.allocator.prefix.ghosts import Ghost, GhostList, Ghosts
from kvloom.allocator.prefix.node import Node
from kvloom.allocator.prefix.tree import Tree


def check(tree: Tree, evictor: Evictor, ghosts: GhostList) -> None:
    """Raise BrokenInvariant unless tree, maps, counters, candidates and ghosts agree; O(tree)."""
    nodes = list(tree.each())
    found = [
        *wrong_nodes(tree, nodes),
        *wrong_maps(tree, nodes),
        *missing_candidates(tree, evictor, nodes),
        *wrong_ghosts(tree, ghosts, nodes),
    ]
    if found:
        raise BrokenInvariant("prefix cache: " + "; ".join(found[:5]))


def wrong_nodes(tree: Tree, nodes: list[Node]) -> Iterator[str]:
    """Nodes that are not what their numbers, parents or tokens say."""
    if len(nodes) != tree.entries:
        yield f"{len(nodes)} nodes hang in the tree, {tree.entries} are counted"
    for node in (*tree.roots.values(), *nodes):
        for key, child in node.children.items():
            if child.parent is not node or child.first_page != key or child.namespace != node.namespace:
                yield f"node {child.number} hangs in the wrong place"
            if child.start != node.end or child.pages == 0:
                yield f"node {child.number} with {child.pages} pages begins at {child.start} behind {node.end}"
    for node in nodes:
        if tree.nodes[node.number] is not node or tree.ends[node.number] != node.end:
            yield f"node {node.number} is not the one of that number"
        if len(node.tokens) != node.pages * tree.page_bytes:
            yield f"node {node.number} of {node.pages} pages has {len(node.tokens)} bytes of tokens"
        if not tree.has_full and not node.children and not node.held.any():
            yield f"node {node.number} is a leaf without any page"


def wrong_maps(tree: Tree, nodes: list[Node]) -> Iterator[str]:
    """Pages that the maps know elsewhere, and counters that drifted."""
    for p, pool in enumerate(tree.pools):
        seen = np.zeros(len(pool.node), int)
        for node in nodes:
            at = np.flatnonzero(node.held[p])
            ids = node.held[p, at]
            np.add.at(seen, ids, 1)
            if not pool.tail and len(at) < node.pages:
                yield f"node {node.number} lacks pages of full pool {pool.pool!r}"
            if (pool.node[ids] != node.number).any() or (pool.depth[ids] != at + node.start).any():
                yield f"node {node.number} has pages of pool {pool.pool!r} that are known elsewhere"
        if seen.max() > 1 or not np.array_equal(seen > 0, pool.node > 0) or pool.users[seen == 0].any():
            yield f"pool {pool.pool!r}: a page is in two places, or known or used without being there"
        if pool.users.min() < 0:
            yield f"pool {pool.pool!r}: a page has fewer than no users"
        idle = int(np.count_nonzero((seen > 0) & (pool.users == 0)))
        if (pool.cached, pool.idle) != (int(seen.sum()), idle):
            yield f"pool {pool.pool!r}: {pool.cached} pages, {pool.idle} idle are counted, not {seen.sum()}, {idle}"


def missing_candidates(tree: Tree, evictor: Evictor, nodes: list[Node]) -> Iterator[str]:
    """What could go but is not listed, and so never would."""
    for node in nodes:
        if tree.has_full and evictor.can_lose_last(node) and node not in evictor.leaves:
            yield f"leaf {node.number} can be evicted but is no candidate"
    for p in tree.window_pools:
        pool, listed = tree.pools[p], evictor.loose[p].to_set()
        for node in nodes:
            if evictor.has_idle_tail(p, node) and node not in evictor.tails[p]:
                yield f"the tail window of node {node.number} in pool {pool.pool!r} is no candidate"
            loose = pool.idle_of(node.held[p, : max(0, node.pages - pool.tail)])
            if not set(loose.tolist()) <= listed:
                yield f"loose pages of node {node.number} in pool {pool.pool!r} are no candidates"


def wrong_ghosts(tree: Tree, ghosts: GhostList, nodes: list[Node]) -> Iterator[str]:
    """Ghosts that are counted wrongly, or hang where something lives."""
    waiting: list[tuple[Ghosts, Ghost]] = []
    for node in (*tree.roots.values(), *nodes):
        if node.ghosts.keys() & node.children.keys():
            yield f"a ghost hangs beside a live child of node {node.number} that begins alike"
        waiting += [(node.ghosts, ghost) for ghost in node.ghosts.values()]
    pages = 0
    while waiting:
        home, ghost = waiting.pop()
        pages += len(ghost.tokens) // tree.page_bytes
        if ghost.home is not home or home.get(bytes(ghost.tokens[: tree.page_bytes])) is not ghost:
            yield "a ghost hangs in the wrong place"
        waiting += [(ghost.below, below) for below in ghost.below.values()]
    if pages != ghosts.pages:
        yield f"{pages} pages of ghosts are there, {ghosts.pages} are counted"
