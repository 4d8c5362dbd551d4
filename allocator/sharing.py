"""Pages that several rows use: how many, and until which step one of them may still read.

The ledger knows one holder per page; of a shared page it is `SHARED`, and who that is stands here.
"""

import numpy as np

from kvloom.allocator.pages import CALLER, PageLedger
from kvloom.allocator.ring import PageArray
from kvloom.allocator.table import RowArray

SHARED = CALLER - 1  # the holder of pages that more than one row has used; no row has this number


class PageShares:
    """Users of the shared pages of one pool.  A page stays shared until its last user drops it."""

    def __init__(self, ledger: PageLedger) -> None:
        self._ledger = ledger
        self._users = np.zeros(ledger.pages + 1, np.int32)
        self._fence = np.full(ledger.pages + 1, -1, np.int64)
        self.pages = 0  # shared ones

    def add_users(self, pages: PageArray, row: int, count: int) -> None:
        """`count` further rows use these pages of `row`, which may be shared already.  Raises ForeignPage."""
        own = pages[self._ledger.holders_of(pages) != SHARED]
        self._ledger.hand_over(own, row, SHARED)
        self._users[own] = 1
        self._users[pages] += count
        self.pages += len(own)

    def drop(self, pages: PageArray, fence: int) -> dict[int, PageArray]:
        """A user less for each time a page is named, who may read it until step `fence`.

        Returns the pages that nobody uses any more, by the last step that may read them.
        """
        np.subtract.at(self._users, pages, 1)
        np.maximum.at(self._fence, pages, fence)
        left: PageArray = np.unique(pages[self._users[pages] == 0])
        self.pages -= len(left)
        fences = self._fence[left]
        self._fence[left] = -1
        return {int(last): left[fences == last] for last in np.unique(fences)}

    def take_over(self, pages: PageArray, row: int) -> None:
        """These pages, which nobody but `row` uses any more, are its own again."""
        self._ledger.hand_over(pages, SHARED, row)
        self._users[pages] = 0
        self.pages -= len(pages)

    def users(self, pages: PageArray) -> RowArray:
        """How many rows use each page, 0 where it is not shared."""
        return self._users[pages]
