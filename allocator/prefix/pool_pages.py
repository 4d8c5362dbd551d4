"""PoolPages: where each page of one pool is in the tree, and how many use it."""

import numpy as np
from numpy.typing import NDArray

from kvloom.allocator.errors import DoubleFree, InvalidArgument
from kvloom.allocator.prefix.base import PageArray

Index = NDArray[np.intp]  # page ids, ready to index with


def as_index(pages: PageArray) -> Index:
    """`pages` to index with; those below 0 lie beyond any array."""
    return pages.view(np.uint32).astype(np.intp)


class PoolPages:
    """Arrays indexed by page id, grown on demand; a page id of 0 is never a page.

    node    the number of the node that has it, 0: it is not in the tree
    depth   pages before it in its path; no split or growth of the tree changes it
    born    the version of the cache that adopted it
    users   references; 0 outside the tree

    `cached` pages are in the tree, `idle` of them have no user.  In a window pool `tail` is how many pages at the end
    of a prefix attention can still see, at least one; 0 in a full pool.
    """

    def __init__(self, pool: str, window: int | None, page_size: int) -> None:
        self.pool = pool
        self.tail = 0 if window is None else max(1, -(-(window - 1) // page_size))
        self.node = np.zeros(64, np.int32)
        self.depth = np.zeros(64, np.int32)
        self.born = np.zeros(64, np.int64)
        self.users = np.zeros(64, np.int32)
        self.cached = self.idle = 0
        self._marks = np.zeros(64, np.int32)
        self._places = np.arange(1024, dtype=np.int32)

    def new(self, pages: PageArray, first_depth: int) -> Index:
        """`pages` to index with; their depths, from `first_depth` up, are noted, which means nothing outside the tree.

        Raises InvalidArgument unless they are distinct and not in the tree, or 0 in a window pool.
        """
        index = as_index(pages)
        try:
            nodes = self.node[index]
        except IndexError:
            if pages.min() < 0:
                raise InvalidArgument(f"pool {self.pool!r}: {pages.min()} is no page") from None
            self._grow(int(pages.max()) + 1)
            nodes = self.node[index]
        if not self.tail and np.count_nonzero(index) < len(index):
            raise InvalidArgument(f"pool {self.pool!r}: a page for each position is needed; 0 is none")
        if np.count_nonzero(nodes):
            raise InvalidArgument(f"pool {self.pool!r}: a page is offered that is cached already")
        depth = np.arange(first_depth, first_depth + len(index), dtype=np.int32)
        self.depth[index] = depth
        named_twice = self.depth[index] != depth  # of two equal ones the last one wins
        if np.count_nonzero(named_twice) and np.count_nonzero(index[named_twice]):
            raise InvalidArgument(f"pool {self.pool!r}: a page is offered for two positions")
        return index

    def in_tree(self, page: int) -> bool:
        """Whether the tree has this page."""
        return 0 < page < len(self.node) and self.node[page] > 0

    def fresh(self, pages: PageArray, version: int) -> Index | None:
        """The pages > 0 among `pages`, position by position, if each was here at `version` and never left."""
        at = np.flatnonzero(pages)
        index = pages[at].astype(np.intp)
        if len(index) and not (index.min() > 0 and index.max() < len(self.node)):
            return None
        same = (self.node[index] > 0) & (self.depth[index] == at) & (self.born[index] <= version)
        return index if same.all() else None

    def adopt(self, index: Index, node: int, version: int) -> None:
        """What `new` has let pass is in the tree, with the one user who offered it."""
        self.node[index] = node
        self.born[index] = version
        self.users[index] = 1
        self.cached += len(index)

    def drop(self, pages: PageArray) -> None:
        """Pages without a user leave the tree."""
        self.node[as_index(pages)] = 0
        self.cached -= len(pages)
        self.idle -= len(pages)

    def use(self, index: Index) -> None:
        """One user more for each of these distinct pages."""
        users = self.users[index]
        self.idle -= len(index) - int(np.count_nonzero(users))
        users += 1
        self.users[index] = users

    def use_again(self, pages: PageArray) -> None:
        """One user more for each of the `pages` that is not 0.  Raises InvalidArgument unless they have users."""
        index = pages[pages != 0].astype(np.intp)
        if len(index) and (index.min() < 0 or index.max() >= len(self.users) or not self.users[index].all()):
            raise InvalidArgument(f"pool {self.pool!r}: a page is shared that nobody uses")
        self.users[index] += 1

    def unuse(self, pages: PageArray) -> Index:
        """One user fewer for each of the `pages` that is not 0; those that nobody uses any more.

        Raises DoubleFree unless they are distinct and have users.
        """
        index = as_index(pages if np.count_nonzero(pages) == len(pages) else pages[pages != 0])
        try:
            users = self.users[index]
        except IndexError:
            users = np.zeros(1, np.int32)
        used = np.count_nonzero(users)
        if used < len(users):
            raise DoubleFree(f"pool {self.pool!r}: a page is unlocked that nobody has locked")
        places = self._places[: len(index)]
        if len(places) < len(index):
            places = self._places = np.arange(len(index), dtype=np.int32)
        self._marks[index] = places
        if np.count_nonzero(self._marks[index] != places):  # of two equal ones the last one wins
            raise DoubleFree(f"pool {self.pool!r}: a page is unlocked twice in one call")
        users -= 1
        self.users[index] = users
        still_used = np.count_nonzero(users)
        idle = index if not still_used else index[users == 0]
        self.idle += len(idle)
        return idle

    def idle_of(self, pages: PageArray) -> Index:
        """Those of `pages` that are pages and have no user."""
        idle: Index = pages[(pages > 0) & (self.users[pages] == 0)].astype(np.intp)
        return idle

    def _grow(self, size: int) -> None:
        size = max(size, 2 * len(self.node))
        for name in ("node", "depth", "born", "users", "_marks"):
            old = getattr(self, name)
            new = np.zeros(size, old.dtype)
            new[: len(old)] = old
            setattr(self, name, new)
