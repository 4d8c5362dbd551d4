"""Ghosts: what was evicted not long ago, to tell how much a larger cache would have hit.

A ghost hangs beside the live node that it was cut from, under the bytes of its first page; what had been evicted behind
it before hangs below it.  So remembering is a slice of bytes and one dictionary entry, and a look-up goes on from the
end of the live path.  There is a bound on their pages, and the oldest go first: those below a ghost are older than it.
"""

from collections import OrderedDict

from kvloom.allocator.prefix.keys import Tokens, equal_bytes


class Ghost:
    """Tokens of pages that are gone; it hangs in `home`."""

    __slots__ = ("below", "home", "tokens")

    def __init__(self, tokens: Tokens, below: "Ghosts", home: "Ghosts") -> None:
        self.tokens = tokens
        self.below = below
        self.home = home


Ghosts = dict[bytes, Ghost]


class GhostList:
    """All ghosts of a cache, oldest first, at most `pages_max` pages of them."""

    def __init__(self, pages_max: int, page_bytes: int) -> None:
        self.pages = 0
        self._pages_max = pages_max
        self._page_bytes = page_bytes
        self._by_age: OrderedDict[Ghost, None] = OrderedDict()

    def remember(self, tokens: Tokens, below: Ghosts, home: Ghosts) -> None:
        """`tokens` were cut off where `home` hangs; `below` hung behind them.  Forgets the oldest beyond the bound."""
        key = bytes(tokens[: self._page_bytes])
        if key in home:
            self.forget(home, key)
        ghost = home[key] = Ghost(tokens, below, home)
        self._by_age[ghost] = None
        self.pages += len(tokens) // self._page_bytes
        while self.pages > self._pages_max:
            oldest = next(iter(self._by_age))
            self.forget(oldest.home, bytes(oldest.tokens[: self._page_bytes]))

    def forget(self, home: Ghosts, key: bytes) -> None:
        """What hangs there under `key`, if anything, is live again or worth nothing; all below it goes as well."""
        ghost = home.pop(key, None)
        doomed = [] if ghost is None else [ghost]
        while doomed:
            ghost = doomed.pop()
            doomed += ghost.below.values()
            del self._by_age[ghost]
            self.pages -= len(ghost.tokens) // self._page_bytes

    def forget_all(self, home: Ghosts) -> None:
        """Nothing hangs at `home` any more."""
        for key in list(home):
            self.forget(home, key)

    def pages_along(self, ghosts: Ghosts, data: bytes, at: int) -> int:
        """How many pages of `data` from page `at` on are ghosts, one behind the other."""
        size, first = self._page_bytes, at
        while ghost := ghosts.get(data[at * size : (at + 1) * size]):
            theirs = data[at * size : at * size + len(ghost.tokens)]
            equal = equal_bytes(ghost.tokens[: len(theirs)], theirs)
            at += equal // size
            if equal < len(ghost.tokens):
                break
            ghosts = ghost.below
        return at - first
