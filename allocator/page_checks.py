"""What a ledger asks before it moves a page.  Each check raises and changes nothing; all are O(pages asked about)."""

import numpy as np
from numpy.typing import NDArray

from kvloom.allocator.books import CACHED, CALLER, FREE, QUARANTINED
from kvloom.allocator.errors import DoubleFree, ForeignPage, InvalidArgument
from kvloom.allocator.indices import counting
from kvloom.allocator.ring import PageArray

Holders = int | NDArray[np.int32]  # one for all pages, or one each
Index = NDArray[np.intp]  # page ids as numpy indexes with them


class PageChecks:
    """The checks of one pool of `pages` pages."""

    def __init__(self, pool: str, pages: int) -> None:
        self._pool = pool
        self._pages = pages
        self._mark = np.zeros(pages + 1, np.int32)  # scratch: finds ids named twice without sorting

    def holders(self, holders: Holders, count: int) -> None:
        """Raise InvalidArgument unless `holders` is the number of a holder, or `count` of them."""
        if isinstance(holders, np.ndarray):
            wrong = holders.shape != (count,) or holders.dtype != np.int32
            if wrong or (count and np.minimum.reduce(holders) < 0):
                raise InvalidArgument(f"pool {self._pool!r}: {count} pages, holders {holders[:8].tolist()}")
        elif not isinstance(holders, int | np.integer) or not 0 <= holders <= CALLER:
            raise InvalidArgument(f"pool {self._pool!r}: holder {holders}; holders are numbers from 0 to {CALLER}")

    def in_pool(self, pages: PageArray) -> None:
        """Raises InvalidArgument or ForeignPage unless all are pages of this pool."""
        if pages.ndim != 1 or pages.dtype.kind not in "iu":
            raise InvalidArgument(f"pages must be a flat row of whole numbers, got {pages.dtype} of {pages.shape}")
        if len(pages) and (np.minimum.reduce(pages) < 1 or np.maximum.reduce(pages) > self._pages):
            wrong = pages[(pages < 1) | (pages > self._pages)]
            raise ForeignPage(f"pool {self._pool!r} has pages 1 to {self._pages}; got {wrong[:8].tolist()}")

    def held(self, holder: NDArray[np.int32], holders: Holders, pages: PageArray) -> Index:
        """The pages as an index.  Raises ForeignPage or DoubleFree unless each is held by its holder."""
        self.holders(holders, len(pages))
        return self.state(holder, holders, pages)

    def state(self, holder: NDArray[np.int32], wanted: Holders, pages: PageArray) -> Index:
        """The same, where `wanted` may be a state."""
        self.in_pool(pages)
        return self.of_holders(holder, wanted, pages)

    def of_holders(self, holder: NDArray[np.int32], wanted: Holders, pages: PageArray) -> Index:
        """The same for pages that are known to be in the pool."""
        index = pages.astype(np.intp)  # once: numpy would do it for each look-up, at three times the price
        wrong = holder[index] != wanted
        if np.count_nonzero(wrong):
            culprits = pages[wrong]
            states = holder[culprits]
            error = DoubleFree if np.all((states == FREE) | (states == QUARANTINED)) else ForeignPage
            raise error(
                f"pool {self._pool!r}: pages {culprits[:8].tolist()} are not held by whoever gives them back "
                f"(holders {states[:8].tolist()}; {FREE} free, {QUARANTINED} quarantined, {CACHED} cached)"
            )
        return index

    def distinct(self, pages: PageArray, index: Index) -> Index:
        """The index again.  Raises DoubleFree when a page is named twice."""
        lasts = self.firsts(index[::-1])
        if np.count_nonzero(lasts) != len(lasts):
            twice = ~lasts[::-1]
            raise DoubleFree(f"pool {self._pool!r}: pages {pages[twice][:8].tolist()} are named twice in one call")
        return index

    def firsts(self, index: Index) -> NDArray[np.bool_]:
        """Which of the pages stand where they come first."""
        order = counting(len(index))
        self._mark[index[::-1]] = order[::-1]  # of several writes to one place the last one stays: the first here
        first: NDArray[np.bool_] = self._mark[index] == order
        return first
