"""Ghosts: what was evicted not long ago, to tell how much a larger cache would have hit.

A ghost hangs beside the live node that it was cut from, under the bytes of its first page; what had been evicted behind
it before hangs below it.  So remembering is a slice of bytes and one dictionary entry, and a look-up goes on from the
end of the live path.  There is a bound on their pages, and the oldest go first: those below a ghost are older than it.

Somebody may keep a copy of what a ghost's pages held: its body, of which nothing is known here but whom to tell when
the ghost is no more.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from kvloom.allocator.prefix.keys import Tokens, equal_bytes


class Body(Protocol):
    """A copy of what the pages of a ghost held, as they were when it was cut off."""

    def gone(self) -> None:
        """The ghost is no more: nobody will ask for this copy through it."""


class Ghost:
    """Tokens of pages that are gone; it hangs in `home`.  `body`, for others to write: pages of it from `skip` on."""

    __slots__ = ("below", "body", "home", "skip", "tokens")

    def __init__(self, tokens: Tokens, below: "Ghosts", home: "Ghosts") -> None:
        self.tokens = tokens
        self.below = below
        self.home = home
        self.body: Body | None = None
        self.skip = 0  # pages at its front that live again


Ghosts = dict[bytes, Ghost]


class GhostList:
    """All ghosts of a cache, oldest first, at most `pages_max` pages of them."""

    def __init__(self, pages_max: int, page_bytes: int) -> None:
        self.pages = 0
        self._pages_max = pages_max
        self._page_bytes = page_bytes
        self._by_age: OrderedDict[Ghost, None] = OrderedDict()

    def __contains__(self, ghost: Ghost) -> bool:
        return ghost in self._by_age

    def remember(self, tokens: Tokens, below: Ghosts, home: Ghosts) -> Ghost:
        """`tokens` were cut off where `home` hangs; `below` hung behind them.  Forgets the oldest beyond the bound.

        The new one may be among these.
        """
        key = bytes(tokens[: self._page_bytes])
        if key in home:
            self.forget(home, key)
        ghost = home[key] = Ghost(tokens, below, home)
        self._by_age[ghost] = None
        self.pages += len(tokens) // self._page_bytes
        self.shrink_to(self._pages_max)
        return ghost

    def shrink_to(self, pages: int) -> None:
        """Forget the oldest until at most so many pages are left."""
        while self.pages > pages:
            oldest = next(iter(self._by_age))
            self.forget(oldest.home, bytes(oldest.tokens[: self._page_bytes]))

    def forget(self, home: Ghosts, key: bytes) -> None:
        """What hangs there under `key`, if anything, is worth nothing any more; all below it goes as well."""
        ghost = home.pop(key, None)
        doomed = [] if ghost is None else [ghost]
        while doomed:
            ghost = doomed.pop()
            doomed += ghost.below.values()
            self._end(ghost)

    def forget_all(self, home: Ghosts) -> None:
        """Nothing hangs at `home` any more."""
        for key in list(home):
            self.forget(home, key)

    def revive(self, home: Ghosts, data: bytes, at: int, stop: int) -> tuple[int, Ghosts]:
        """Pages `at` to `stop` of `data` are to live again where `home` hangs; ghosts beside them stay.

        So a live node may go up to some page only: returned with the ghosts that hang behind it there.
        """
        size = self._page_bytes
        key = data[at * size : (at + 1) * size]
        ghost = home.get(key)
        if ghost is None:
            return stop, {}
        equal = self._equal_pages(ghost, data, at, stop)
        del home[key]
        if equal * size == len(ghost.tokens):
            self._end(ghost)
            return at + equal if ghost.below else stop, ghost.below
        ghost.tokens = ghost.tokens[equal * size :]
        ghost.skip += equal
        self.pages -= equal
        ghost.home = {bytes(ghost.tokens[:size]): ghost}
        return at + equal, ghost.home

    def along(self, ghosts: Ghosts, data: bytes, at: int) -> Iterator[tuple[Ghost, int]]:
        """The ghosts along `data` from page `at` on, one behind the other, and how many pages of each agree."""
        while ghost := ghosts.get(data[at * self._page_bytes : (at + 1) * self._page_bytes]):
            equal = self._equal_pages(ghost, data, at, len(data) // self._page_bytes)
            yield ghost, equal
            if equal * self._page_bytes < len(ghost.tokens):
                break
            at += equal
            ghosts = ghost.below

    def _equal_pages(self, ghost: Ghost, data: bytes, at: int, stop: int) -> int:
        """How many of its pages are those of `data` from page `at` to page `stop` at most."""
        size = self._page_bytes
        theirs = data[at * size : min(at * size + len(ghost.tokens), stop * size)]
        return equal_bytes(ghost.tokens[: len(theirs)], theirs) // size

    def _end(self, ghost: Ghost) -> None:
        del self._by_age[ghost]
        self.pages -= len(ghost.tokens) // self._page_bytes
        if ghost.body is not None:
            ghost.body.gone()
