"""Sliding windows: how much of a path attention can use."""

from collections.abc import Sequence

import numpy as np

from kvloom.allocator.prefix.base import PageArray
from kvloom.allocator.prefix.pool_pages import PoolPages


def whole_windows(ids: PageArray, pools: Sequence[PoolPages]) -> int:
    """The largest k such that the last min(k, tail) of the first k pages are there in each window pool.

    `ids` is int32 [pools, pages]; 0: not there.
    """
    pages = ids.shape[1]
    if all(row[max(0, pages - pool.tail) :].all() for pool, row in zip(pools, ids, strict=True) if pool.tail):
        return int(pages)
    ends = np.arange(1, pages + 1)  # k; the last missing page up to there is number `gap`, counted from 1
    usable = np.ones(pages, bool)
    for pool, row in zip(pools, ids, strict=True):
        if pool.tail:
            gap = np.maximum.accumulate(np.where(row == 0, ends, 0))
            usable &= ends - gap >= np.minimum(ends, pool.tail)
    fit = np.flatnonzero(usable)
    return int(fit[-1]) + 1 if len(fit) else 0


def visible_tail(ids: PageArray, pools: Sequence[PoolPages]) -> PageArray:
    """`ids`, int32 [pools, pages], with zeros in window pools where attention sees no more."""
    ids = ids.copy()
    for pool, row in zip(pools, ids, strict=True):
        if pool.tail:
            row[: max(0, len(row) - pool.tail)] = 0
    return ids
