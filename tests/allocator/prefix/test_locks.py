"""Who uses what: pages with users stay, and users are counted per page."""

import pytest

from kvloom.allocator import DoubleFree, InvalidArgument, Match
from kvloom.allocator.prefix.base import PageArray
from tests.allocator.prefix.helpers import Books, ints, lists, tokens


def test_b37_locked_nothing_goes_unlocked_all() -> None:
    books = Books(1)
    parent = books.put("abcdefgh")
    books.put("abcdefghijkl")
    books.put("abcdefgh" + "x")  # now 8 tokens stand alone, with 4 behind them
    match = books.match("abcdefghijkl")
    assert match.tokens == 12
    books.cache.lock(match)
    assert books.evict("full", 100)["full"].tolist() == [29]  # the x
    assert books.balance() == (0, 12)
    books.drop(match.pages)
    assert books.balance() == (12, 0)
    assert len(books.evict("full", 100)["full"]) == 12
    assert books.balance() == (0, 0)
    assert len(parent.pages["full"]) == 8


def test_b37_a_node_locked_in_half_loses_the_other_half() -> None:
    books = Books(2)
    inserted = books.put("abcdefghijkl")
    match = books.match("abcdef")
    books.cache.lock(match)
    assert books.balance() == (3, 3)
    assert sorted(books.evict("full", 100)["full"].tolist()) == inserted.pages["full"][3:].tolist()
    assert books.balance() == (0, 3)
    assert books.cached("abcdefghijkl") == 6
    books.drop(match.pages)
    assert books.balance() == (3, 0)
    assert len(books.evict("full", 100)["full"]) == 3


@pytest.mark.parametrize("pages", [ints(1), ints(3), ints(2, 2), ints(0, 2, 1), ints(10_000), ints(-1), ints(2, -1)])
def test_b37_unlock_without_lock(pages: PageArray) -> None:
    books = Books(1)
    books.put("abc")
    books.cache.lock(books.match("ab"))
    books.drop({"full": ints(1)})
    with pytest.raises(DoubleFree):
        books.cache.unlock("full", pages)
    assert books.balance() == (2, 1)
    books.drop({"full": ints(0, 2)})
    assert books.balance() == (3, 0)


def test_b37_a_prompt_shorter_than_a_page() -> None:
    books = Books()
    assert books.cached("abc") == 0
    inserted = books.hold("")
    assert lists(inserted.pages) == {"full": []}
    assert books.cache.statistics().entries == 0
    with pytest.raises(InvalidArgument):
        books.cache.insert("", 0, tokens("abc"), {"full": ints()})


def test_users_are_counted() -> None:
    books = Books()
    books.put("aaaabbbb")
    one, two = books.match("aaaabbbb"), books.match("aaaa")
    books.cache.lock(one)
    books.cache.lock(two)
    books.drop(one.pages)
    assert books.balance() == (1, 1)
    assert books.evict("full", 5)["full"].tolist() == [2]
    books.drop(two.pages)
    assert books.balance() == (1, 0)


@pytest.mark.parametrize("again", [False, True], ids=["gone", "gone and back under the same id"])
def test_a_stale_match_cannot_be_locked(again: bool) -> None:
    books = Books()
    books.put("aaaabbbb")
    match = books.match("aaaabbbb")
    assert books.evict("full", 1)["full"].tolist() == [2]
    if again:
        found = books.cache.insert("", 1, tokens("cccc"), {"full": ints(2)})
        books.drop(found.pages)
    with pytest.raises(InvalidArgument, match="stale"):
        books.cache.lock(match)
    assert books.balance() == (2 if again else 1, 0)


def test_a_match_outlives_all_that_does_not_concern_it() -> None:
    books = Books()
    books.put("aaaabbbbcccc")
    match = books.match("aaaabbbb")
    books.put("aaaabbbbdddd")  # splits the node
    books.put("aaaabbbbddddeeee")
    books.evict("full", 3)
    books.cache.lock(match)
    assert books.balance()[1] == 2


@pytest.mark.parametrize(
    "pages", [{}, *({"full": ints(*ids)} for ids in ((-1, 2), (2, 1), (1, 900), (0, 0)))], ids=lists
)
def test_what_is_no_match_of_this_cache_cannot_be_locked(pages: dict[str, PageArray]) -> None:
    books = Books()
    books.put("aaaabbbb")
    with pytest.raises(InvalidArgument):
        books.cache.lock(Match(8, pages, "", 99))
    assert books.balance() == (2, 0)


def test_an_empty_match_locks_nothing() -> None:
    books = Books()
    books.cache.lock(books.match("aaaa"))
    assert books.balance() == (0, 0)


def test_a_pool_that_is_not_there() -> None:
    books = Books()
    with pytest.raises(InvalidArgument, match="no pool 'swa'"):
        books.cache.evictable("swa")
    with pytest.raises(InvalidArgument, match="no pool 'swa'"):
        books.cache.unlock("swa", ints(1))
    with pytest.raises(InvalidArgument, match="no pool 'swa'"):
        books.cache.evict("swa", 1)
