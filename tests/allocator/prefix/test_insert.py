"""What an insertion makes of the tree, and what it refuses."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from kvloom.allocator import InvalidArgument, NullPrefixCache, PrefixCache, RadixPrefixCache
from tests.allocator.prefix.helpers import Books, ints, lists, tokens

BOTH: Mapping[str, int | None] = {"full": None, "swa": 8}


def test_it_goes_on_behind_a_page_without_its_prefix() -> None:
    books = Books()
    first = books.put("aaaabbbb")
    books.put("ccccdddd", after=int(first.pages["full"][-1]))
    assert books.cached("aaaabbbbccccdddd") == 16
    books.put("eeee", after=1)  # in the middle of what is one node by now
    assert books.cached("aaaaeeee") == 8
    assert books.cached("aaaabbbbccccdddd") == 16


def test_what_is_there_stays_and_the_rest_is_adopted() -> None:
    books = Books()
    books.put("aaaabbbb")
    found = books.hold("aaaabbbbcccc")
    assert lists(found.pages) == {"full": [1, 2, 5]}
    assert lists(found.adopted) == {"full": [False, False, True]}
    assert books.balance() == (0, 3)
    assert books.cache.statistics()[3:5] == (3, 2)


def test_a_row_that_goes_on_makes_one_node() -> None:
    """And its arrays are copied as often as their length doubles, not for each page."""
    books = Books(1)
    after, copies, ids = 0, 0, None
    for page in range(1, 1001):
        books.cache.insert("", after, ints(page % 7), {"full": ints(page)})
        after = page
        node = next(books.cache._tree.each())
        copies += node.ids is not ids
        ids = node.ids
    books.cache.check()
    assert books.cache.statistics().entries == 1
    assert copies < 20


def test_a_second_branch_leaves_the_first_alone() -> None:
    books = Books()
    trunk = books.put("aaaabbbb")
    end = int(trunk.pages["full"][-1])
    books.put("cccc", after=end)
    books.put("dddd", after=end)
    books.put("eeee", after=end)
    assert books.cache.statistics().entries == 4
    assert [books.cached("aaaabbbb" + tail) for tail in ("cccc", "dddd", "eeee", "ffff")] == [12, 12, 12, 8]


def test_a_tombstone_is_healed_by_what_is_offered() -> None:
    books = Books(windows=BOTH)
    row = tokens("aaaabbbb")
    books.cache.insert("", 0, row, {"full": ints(1, 2), "swa": ints(0, 0)})
    assert books.cached("aaaabbbb") == 0
    found = books.cache.insert("", 0, row, {"full": ints(3, 4), "swa": ints(0, 4)})
    books.cache.check()
    assert lists(found.pages) == {"full": [1, 2], "swa": [0, 4]}
    assert lists(found.adopted) == {"full": [False, False], "swa": [False, True]}
    assert books.cached("aaaabbbb") == 0  # a window of 8 reads both
    found = books.cache.insert("", 0, row[:4], {"full": ints(5), "swa": ints(5)})
    assert lists(found.adopted) == {"full": [False], "swa": [True]}
    assert books.cached("aaaabbbb") == 8
    assert books.balance("swa") == (0, 2)


def test_who_offers_no_page_uses_none() -> None:
    books = Books(windows=BOTH)
    first = books.put("aaaabbbb")
    found = books.cache.insert("", 0, tokens("aaaabbbb"), {"full": ints(8, 9), "swa": ints(0, 0)})
    assert lists(found.pages) == lists(first.pages)  # it says what is there all the same
    assert books.balance("full") == (0, 2)
    assert books.balance("swa") == (2, 0)


def test_a_window_alone_keeps_no_pages_of_nothing() -> None:
    books = Books(windows={"swa": 8})
    found = books.cache.insert("", 0, tokens("aaaabbbbcccc"), {"swa": ints(0, 1, 0)})
    books.cache.check()
    assert lists(found.pages) == {"swa": [0, 1, 0]}
    assert lists(found.adopted) == {"swa": [False, True, False]}
    found = books.cache.insert("", 0, tokens("xxxx"), {"swa": ints(0)})
    assert books.cache.statistics().entries == 1


@pytest.mark.parametrize(
    "change",
    [
        {"after": 9},
        {"after": -1},
        {"after": 2**31},
        {"namespace": "other"},
        {"tokens": tokens("ccccddd")},
        {"tokens": tokens("cccc")},
        {"pages": {"full": ints(5, 6)}},
        {"pages": {"full": ints(5, 6), "swa": ints(5, 6), "more": ints(5, 6)}},
        {"pages": {"full": ints(5, 0), "swa": ints(5, 6)}},
        {"pages": {"full": ints(5, 5), "swa": ints(5, 6)}},
        {"pages": {"full": ints(5, 6), "swa": ints(6, 6)}},
        {"pages": {"full": ints(5, -6), "swa": ints(5, 6)}},
        {"pages": {"full": ints(5, 6), "swa": ints(5, -6)}},
        {"pages": {"full": ints(5, 1), "swa": ints(5, 6)}},
        {"pages": {"full": ints(5, 6), "swa": ints(0, 2)}},
        {"pages": {"full": ints(5, 6), "swa": ints(5)}},
        {"pages": {"full": np.array([5.0, 6.0]), "swa": ints(5, 6)}},
    ],
    ids=str,
)
def test_misuse_raises_and_changes_nothing(change: dict[str, Any]) -> None:
    books = Books(windows=BOTH)
    books.put("aaaabbbb")
    sound: dict[str, Any] = {
        "namespace": "",
        "after": 2,
        "tokens": tokens("ccccdddd"),
        "pages": {"full": ints(5, 6), "swa": ints(0, 6)},
    }
    before = books.cache.statistics()
    with pytest.raises(InvalidArgument):
        books.cache.insert(**sound | change)
    books.cache.check()
    assert books.cache.statistics() == before
    assert books.cached("aaaabbbb") == 8
    books.cache.insert(**sound)  # and as it should be, it works
    books.cache.check()


def test_what_an_insertion_says_is_the_callers_to_change() -> None:
    books = Books()
    ids = ints(1, 2)
    found = books.cache.insert("", 0, tokens("aaaabbbb"), {"full": ids})
    ids[:] = found.pages["full"][:] = 77
    assert books.match("aaaabbbb").pages["full"].tolist() == [1, 2]
    books.cache.check()


@pytest.mark.parametrize(
    ("page_size", "windows"), [(0, {"full": None}), (-4, {"full": None}), (4, {}), (4, {"swa": 0}), (4, {"swa": -1})]
)
def test_nobody_attaches_nonsense(page_size: int, windows: Mapping[str, int | None]) -> None:
    with pytest.raises(InvalidArgument):
        RadixPrefixCache().attach(page_size, windows)


def test_one_memory_for_one_cache() -> None:
    cache = RadixPrefixCache()
    assert cache.match(tokens("aaaa")).tokens == 0
    with pytest.raises(InvalidArgument, match="attach first"):
        cache.evictable("full")
    cache.attach(4, {"full": None})
    with pytest.raises(InvalidArgument, match="already"):
        cache.attach(4, {"full": None})


def test_namespaces_that_are_empty_do_not_pile_up() -> None:
    books = Books(cache=RadixPrefixCache(ghost_pages=0))
    for client in range(1000):
        books.put("aaaa", namespace=f"client {client}")
        books.evict("full", 1)
    assert len(books.cache._tree.roots) < 200


@pytest.mark.parametrize("cache", [NullPrefixCache(), RadixPrefixCache()], ids=["null", "radix"])
def test_any_cache_serves(cache: PrefixCache) -> None:
    """The verbs in the order in which a memory uses them, for caches of any kind."""
    cache.attach(4, {"full": None})
    row = tokens("aaaabbbb.")
    match = cache.match(row)
    cache.lock(match)
    assert match.tokens == 0
    found = cache.insert("", 0, row[:8], {"full": ints(1, 2)})
    assert lists(found.pages) == {"full": [1, 2] if found.adopted["full"].all() else [0, 0]}
    kept = found.pages["full"][found.adopted["full"]]
    cache.unlock("full", kept)
    assert cache.evictable("full") == len(kept)
    assert sorted(cache.evict("full", 9).get("full", ints()).tolist()) == kept.tolist()
