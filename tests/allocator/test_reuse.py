"""What requests leave to each other, whatever the cache takes of it."""

from collections.abc import Mapping

import numpy as np

from kvloom.allocator import Inserted, KVMemory, NullPrefixCache, RadixPrefixCache
from kvloom.allocator.prefix.base import PageArray, TokenArray
from tests.allocator.books import ints
from tests.allocator.memories import NOTHING, make


class Picky(NullPrefixCache):
    """Takes nothing, and counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def insert(
        self, namespace: str, after: int, tokens: TokenArray, pages: Mapping[str, PageArray], priority: int = 0
    ) -> Inserted:
        self.asked += 1
        return super().insert(namespace, after, tokens, pages, priority)


def count(row: int, start: int, stop: int) -> TokenArray:
    return np.arange(start, stop, dtype=np.int32)


def published(memory: KVMemory, tokens: int) -> int:
    row = memory.admit(NOTHING, tokens)
    assert row is not None
    memory.publish(ints(row), ints(tokens), count)
    memory.check()
    return row


def test_what_a_cache_does_not_take_stays_with_its_row() -> None:
    cache = Picky()
    memory = make(prefix_cache=cache)
    row = published(memory, 12)
    memory.publish(ints(row), ints(12), count)
    assert cache.asked == 1, "nobody asks twice for nothing"
    pool = memory.statistics().pools["full"]
    assert (pool.held, pool.cached) == (3, 0)
    memory.release([row], [-1])
    assert memory.statistics().pools["full"].free == 8


def test_two_rows_with_the_same_tokens_keep_one_copy() -> None:
    memory = make(prefix_cache=RadixPrefixCache())
    first, second = published(memory, 12), published(memory, 10)
    pool = memory.statistics().pools["full"]
    assert (pool.held, pool.cached, pool.evictable) == (1, 3, 0), "the second holds its last page, partly filled"
    table = memory.tables["full"]
    assert table.pages[first, :2].tolist() == table.pages[second, :2].tolist()
    memory.release([first, second], [-1, -1])
    assert memory.statistics().pools["full"].evictable == 3


def test_a_page_that_was_there_twice_waits_for_the_last_step_that_was_bound() -> None:
    memory = make(prefix_cache=RadixPrefixCache())
    published(memory, 8)
    memory._bound_step = 5
    published(memory, 8)
    assert memory.statistics().pools["full"].quarantined == 2
    memory.settle(4)
    assert memory.statistics().pools["full"].quarantined == 2
    memory.settle(5)
    assert memory.statistics().pools["full"].quarantined == 0
    memory.check()
