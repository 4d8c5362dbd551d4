"""Node: a run of whole pages in the radix tree."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvloom.allocator.errors import BrokenInvariant
from kvloom.allocator.prefix.base import PageArray
from kvloom.allocator.prefix.ghosts import Ghosts
from kvloom.allocator.prefix.keys import Tokens, equal_bytes


class Node:
    """`pages` pages that follow its parent's, their tokens and their ids in every pool.

    tokens     bytes of int32, pages * page_bytes of them: a view of those that were inserted, shared by the parts of
               what is split, and an array of its own once the node grows
    ids        int32 [pools, capacity], of which the first `pages` columns count; 0: not held in that pool
    start      pages before it in its path
    number     what the maps of the pools know it by; 0: the root of a namespace, which has no pages
    children   by the bytes of their first page
    ghosts     what was cut off behind its last page, likewise

    Structure only: who changes one keeps the maps of the pools right (`Tree`).
    """

    __slots__ = (
        "children",
        "created",
        "ghosts",
        "hits",
        "ids",
        "last_used",
        "namespace",
        "number",
        "page_bytes",
        "pages",
        "parent",
        "priority",
        "start",
        "tokens",
    )

    def __init__(self, parent: "Node | None", namespace: str, page_bytes: int, tokens: Tokens, ids: PageArray) -> None:
        self.parent = parent
        self.namespace = namespace
        self.page_bytes = page_bytes
        self.tokens: Tokens = tokens
        self.ids = ids
        self.pages: int = ids.shape[1]
        self.start: int = 0 if parent is None else parent.end
        self.number = 0
        self.children: dict[bytes, Node] = {}
        self.ghosts: Ghosts = {}
        self.last_used = self.hits = self.created = self.priority = 0

    @property
    def end(self) -> int:
        """Pages up to and with its last."""
        return self.start + self.pages

    @property
    def first_page(self) -> bytes:
        """What its parent knows it by."""
        return bytes(self.tokens[: self.page_bytes])

    @property
    def held(self) -> PageArray:
        """The ids that count, int32 [pools, pages]: a view to write to."""
        return self.ids[:, : self.pages]

    def equal_pages(self, index: int, data: bytes, at: int) -> int:
        """How many whole pages from `index` on are those of `data` from page `at` on."""
        size = self.page_bytes
        if index == 0 and data.startswith(self.tokens, at * size):  # the usual case needs no copy
            return self.pages
        length = min(self.pages - index, len(data) // size - at) * size
        mine, theirs = index * size, at * size
        return equal_bytes(self.tokens[mine : mine + length], data[theirs : theirs + length]) // size

    def append(self, tokens: Tokens, ids: NDArray[np.integer]) -> None:
        """Grow at the end, amortised: the arrays are copied as often as their length doubles."""
        pages = self.pages + ids.shape[1]
        if pages > self.ids.shape[1]:
            roomy = np.empty((len(ids), pages + pages // 2 + 4), np.int32)
            roomy[:, : self.pages] = self.held
            self.ids = roomy
        self.ids[:, self.pages : pages] = ids
        if not isinstance(self.tokens, bytearray):
            self.tokens = bytearray(self.tokens)
        self.tokens += tokens
        self.pages = pages

    def pop(self, count: int) -> tuple[Tokens, PageArray]:
        """Lose the last `count` pages; their tokens and ids."""
        left = self.pages - count
        tokens, ids = self.tokens, self.ids[:, left : self.pages]
        if left:
            tokens, ids = tokens[left * self.page_bytes :], ids.copy()
            if isinstance(self.tokens, bytearray):
                del self.tokens[left * self.page_bytes :]  # without a copy of what stays
            else:
                self.tokens = self.tokens[: left * self.page_bytes]
        self.pages = left  # of a node that is no more, the arrays go to the caller
        return tokens, ids

    def split(self, index: int) -> "Node":
        """A new parent with the first `index` pages, 0 < index < pages; the node keeps the rest and its children."""
        if self.parent is None:
            raise BrokenInvariant("a root has no pages to split")
        at = index * self.page_bytes
        front = Node(self.parent, self.namespace, self.page_bytes, self.tokens[:at], self.ids[:, :index].copy())
        front.last_used, front.hits = self.last_used, self.hits
        front.created, front.priority = self.created, self.priority
        self.parent.children[front.first_page] = front
        self.tokens = self.tokens[at:]
        self.ids = self.ids[:, index : self.pages].copy()
        self.pages -= index
        self.start += index
        self.parent = front
        front.children[self.first_page] = self
        return front

    def path(self) -> "Iterator[Node]":
        """The node, its parent, and so on; without the root."""
        node: Node | None = self
        while node is not None and node.number:
            yield node
            node = node.parent
