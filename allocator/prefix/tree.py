"""Tree: nodes by namespace and the maps of their pages; structure only, it decides nothing."""

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from kvloom.allocator.errors import BrokenInvariant, InvalidArgument
from kvloom.allocator.prefix.base import PageArray
from kvloom.allocator.prefix.keys import TOKEN_BYTES, Tokens
from kvloom.allocator.prefix.node import Node
from kvloom.allocator.prefix.pool_pages import Index, PoolPages

PoolIndex = NDArray[np.intp]  # [pools, pages]: ids, ready to index with


class Tree:
    """A radix tree over pages: one root for each namespace, and no two children of a node begin with the same page.

    nodes  by number; 0 is no node
    ends   int32 by number: pages up to and with a node's last, to tell loose window pages without touching the nodes
    """

    def __init__(self, page_size: int, windows: Mapping[str, int | None]) -> None:
        self.page_size = page_size
        self.page_bytes = page_size * TOKEN_BYTES
        self.pools = tuple(PoolPages(pool, window, page_size) for pool, window in windows.items())
        # With a full pool every node has all its pages there, and leaves only once those go.
        self.has_full = any(not pool.tail for pool in self.pools)
        self.window_pools = tuple(p for p, pool in enumerate(self.pools) if pool.tail)
        self.roots: dict[str, Node] = {}
        self.nodes: list[Node | None] = [None]
        self.ends = np.zeros(64, np.int32)
        self.made = 0
        self._vacant: list[int] = []
        self._roots_swept_at = 64

    @property
    def entries(self) -> int:
        """Live nodes."""
        return len(self.nodes) - 1 - len(self._vacant)

    def walk(self, data: bytes, namespace: str) -> tuple[list[tuple[Node, int]], Node | None]:
        """The nodes along `data` and how many of their first pages agree; and where the path ends, if between nodes."""
        path: list[tuple[Node, int]] = []
        node, at, size = self.roots.get(namespace), 0, self.page_bytes
        while node is not None and (child := node.children.get(data[at * size : (at + 1) * size])):
            same = child.equal_pages(0, data, at)
            path.append((child, same))
            at += same
            node = child if same == child.pages else None
        return path, node

    def node_of(self, pool: int, page: int) -> Node:
        """The node that has this page of the tree."""
        node: Node | None = self.nodes[self.pools[pool].node[page]]
        if node is None:
            raise BrokenInvariant(f"page {page} of pool {self.pools[pool].pool!r} stands in no node")
        return node

    def nodes_of(self, numbers: NDArray[np.int32]) -> list[Node]:
        """The distinct nodes with these numbers, of which equal ones mostly stand together."""
        changes = np.flatnonzero(numbers[1:] != numbers[:-1]) + 1 if len(numbers) > 1 else ()
        firsts = numbers[:1].tolist() + (numbers[changes].tolist() if len(changes) else [])
        return [node for number in dict.fromkeys(firsts) if (node := self.nodes[number]) is not None]

    def root_of(self, namespace: str) -> Node:
        """The root of a namespace, made where there is none."""
        root = self.roots.get(namespace)
        if root is None:
            # Clients choose namespaces: those in which nothing is left must not pile up.
            if len(self.roots) >= self._roots_swept_at:
                self.roots = {name: old for name, old in self.roots.items() if old.children or old.ghosts}
                self._roots_swept_at = max(64, 2 * len(self.roots))
            empty = np.empty((len(self.pools), 0), np.int32)
            root = self.roots[namespace] = Node(None, namespace, self.page_bytes, b"", empty)
        return root

    def place_after(self, namespace: str, page: int) -> tuple[Node | None, int]:
        """Where the pages behind `page` of the first pool begin: a node (None: the root), and its pages before that.

        Raises InvalidArgument unless the tree has it in this namespace.
        """
        if page == 0:
            return None, 0
        pool = self.pools[0]
        if not pool.in_tree(page):
            raise InvalidArgument(f"page {page} of pool {pool.pool!r} is not cached; nothing can follow it")
        node = self.node_of(0, page)
        if node.namespace != namespace:
            raise InvalidArgument(f"page {page} of pool {pool.pool!r} is cached in another namespace")
        return node, int(pool.depth[page]) + 1 - node.start

    def add(self, parent: Node, tokens: Tokens, index: PoolIndex, version: int) -> Node:
        """A new child with these pages, which the maps learn; intp [pools, pages]."""
        node = Node(parent, parent.namespace, self.page_bytes, tokens, index.astype(np.int32))
        parent.children[node.first_page] = node
        self._enter(node)
        self.made += 1
        node.created = self.made
        self.adopt(node, index, version)
        return node

    def extend(self, node: Node, tokens: Tokens, index: PoolIndex, version: int) -> None:
        """More pages at the end of a node."""
        node.append(tokens, index)
        self.ends[node.number] = node.end
        self.adopt(node, index, version)

    def adopt(self, node: Node, index: PoolIndex, version: int) -> None:
        """The maps learn that the pages (0: none) in `index`, intp [pools, n], stand in `node`."""
        for pool, row in zip(self.pools, index, strict=True):
            pool.adopt(row if np.count_nonzero(row) == len(row) else row[row > 0], node.number, version)

    def split(self, node: Node, index: int) -> Node:
        """A new node between `node` and its parent, with its first `index` pages."""
        front = node.split(index)
        self._enter(front)
        for pool, row in zip(self.pools, front.ids, strict=True):
            pool.node[row[row > 0] if pool.tail else row] = front.number
        return front

    def shorten(self, node: Node, count: int) -> tuple[Tokens, PageArray]:
        """The last `count` pages of a leaf go; without any left, it goes too.  The maps still know the pages."""
        first_page, parent = node.first_page, node.parent
        removed = node.pop(count)
        self.ends[node.number] = node.end
        if node.pages == 0 and parent is not None:
            del parent.children[first_page]
            self.nodes[node.number] = None
            self._vacant.append(node.number)
            node.number, node.parent = 0, None
        return removed

    def bury(self, p: int, index: Index) -> None:
        """Tombstones stand where these pages of window pool `p` were; the maps still know them."""
        pool = self.pools[p]
        numbers, depth = pool.node[index], pool.depth[index]
        order = np.argsort(numbers, kind="stable")
        for of_one in np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1):
            node = self.node_of(p, int(index[of_one[0]]))
            node.ids[p, depth[of_one] - node.start] = 0

    def each(self) -> Iterator[Node]:
        """Every live node, parents before their children."""
        waiting = list(self.roots.values())
        while waiting:
            node = waiting.pop()
            waiting += node.children.values()
            if node.number:
                yield node

    def _enter(self, node: Node) -> None:
        """Give a new node its number."""
        if self._vacant:
            node.number = self._vacant.pop()
            self.nodes[node.number] = node
        else:
            node.number = len(self.nodes)
            self.nodes.append(node)
            if node.number >= len(self.ends):
                self.ends = np.concatenate((self.ends, np.zeros_like(self.ends)))
        self.ends[node.number] = node.end
