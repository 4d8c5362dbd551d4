"""What ends with time, and what a reset leaves."""

import pytest

from kvloom.allocator import InvalidArgument, RadixPrefixCache
from tests.allocator.prefix.helpers import Books, ints, lists, tokens


def test_entries_that_nobody_uses_end() -> None:
    books = Books(cache=RadixPrefixCache(ttl=10.0))
    books.cache.tick(1000.0)
    books.put("aaaa")
    books.put("bbbb")
    assert lists(books.cache.tick(1009.0)) == {"full": []}
    books.use("aaaa")
    assert lists(books.cache.tick(1010.0)) == {"full": [2]}
    assert lists(books.cache.tick(1018.9)) == {"full": []}
    assert lists(books.cache.tick(1019.0)) == {"full": [1]}
    assert books.cache.statistics().evicted == {("full", "ttl"): 2}
    books.cache.check()


def test_what_is_cached_before_the_first_tick_lives_from_there() -> None:
    books = Books(cache=RadixPrefixCache(ttl=10.0))
    books.put("aaaa")
    assert lists(books.cache.tick(5000.0)) == {"full": []}
    assert lists(books.cache.tick(5010.0)) == {"full": [1]}


def test_children_end_before_their_parents() -> None:
    books = Books(cache=RadixPrefixCache(ttl=10.0), windows={"full": None, "swa": 4})
    books.cache.tick(0.0)
    books.put("aaaabbbb")
    books.put("aaaacccc")
    assert sorted(books.cache.tick(10.0)["full"].tolist()) == [1, 2, 4]
    assert books.cache.statistics().entries == 0


def test_what_is_in_use_does_not_end() -> None:
    books = Books(cache=RadixPrefixCache(ttl=10.0))
    books.cache.tick(0.0)
    held = books.hold("aaaabbbb")
    assert lists(books.cache.tick(50.0)) == {"full": []}
    books.drop(held.pages)
    assert lists(books.cache.tick(59.0)) == {"full": []}
    assert sorted(books.cache.tick(60.0)["full"].tolist()) == [1, 2]


def test_nothing_ends_without_a_time_to_live() -> None:
    books = Books()
    books.put("aaaa")
    books.cache.tick(0.0)
    assert lists(books.cache.tick(1e12)) == {"full": []}
    assert len(books.cache._ages) == 0


@pytest.mark.parametrize("ttl", [0.0, -1.0, float("nan")])
def test_a_time_to_live_that_is_none(ttl: float) -> None:
    with pytest.raises(InvalidArgument):
        RadixPrefixCache(ttl=ttl)


def test_a_pin_keeps_pages_for_its_time() -> None:
    books = Books(cache=RadixPrefixCache(pin_budget_pages=4), windows={"full": None, "swa": 4})
    books.put("aaaabbbb")
    books.cache.tick(100.0)
    assert books.cache.pin(books.match("aaaabbbb"), 30.0)
    assert books.cache.statistics().pinned_pages == 3  # two full pages, and the window's one
    assert lists(books.evict("full", 9))["full"] == []
    books.cache.tick(129.0)
    assert books.balance() == (0, 2)
    books.cache.tick(130.0)
    assert books.balance() == (2, 0)
    assert books.cache.statistics().pinned_pages == 0
    books.cache.check()


def test_a_pin_before_the_first_tick_lasts_from_there() -> None:
    books = Books(cache=RadixPrefixCache(pin_budget_pages=4))
    books.put("aaaa")
    assert books.cache.pin(books.match("aaaa"), 30.0)
    books.cache.tick(5000.0)
    books.cache.tick(5029.0)
    assert books.balance() == (0, 1)
    books.cache.tick(5030.0)
    assert books.balance() == (1, 0)


def test_pins_stay_within_their_budget() -> None:
    books = Books(cache=RadixPrefixCache(pin_budget_pages=3))
    books.put("aaaabbbb")
    match, part = books.match("aaaabbbb"), books.match("aaaa")
    assert books.cache.pin(match, 30.0)
    assert not books.cache.pin(match, 30.0)
    assert books.cache.pin(part, 40.0)
    books.cache.unpin(match)
    assert books.balance() == (1, 1)
    with pytest.raises(InvalidArgument, match="not pinned"):
        books.cache.unpin(match)
    books.cache.unpin(part)
    assert books.balance() == (2, 0)
    assert books.cache.statistics().pinned_pages == 0


def test_a_stale_match_is_not_pinned_and_costs_nothing() -> None:
    books = Books(cache=RadixPrefixCache(pin_budget_pages=3))
    books.put("aaaa")
    match = books.match("aaaa")
    books.evict("full", 1)
    with pytest.raises(InvalidArgument, match="stale"):
        books.cache.pin(match, 1.0)
    assert books.cache.statistics().pinned_pages == 0


def test_without_a_budget_nothing_is_pinned() -> None:
    books = Books()
    books.put("aaaa")
    assert not books.cache.pin(books.match("aaaa"), 1.0)


def test_a_reset_leaves_what_is_in_use() -> None:
    books = Books(windows={"full": None, "swa": 8})
    books.put("aaaabbbbcccc")
    books.put("aaaadddd", namespace="other")
    match = books.match("aaaabbbb")
    books.cache.lock(match)
    books.drop({"swa": match.pages["swa"][:1]})
    gone = books.cache.reset()
    books.cache.check()
    assert sorted(gone["full"].tolist()) == [3, 4, 5]
    assert books.balance("full") == (0, 2)
    assert books.balance("swa")[0] == 0
    assert lists({"full": match.pages["full"]}) == {"full": [1, 2]}
    assert {reason for _, reason in books.cache.statistics().evicted} == {"reset"}
    books.put("eeee", after=2)  # and life goes on
    books.cache.check()


def test_a_trunk_of_tombstones_goes_with_its_last_branch() -> None:
    """In a pure-window tree nothing is left where no page is."""
    books = Books(cache=RadixPrefixCache(ttl=10.0), windows={"swa": 3})
    books.cache.tick(0.0)
    for spelt, page in (("aaaabbbb", 1), ("aaaacccc", 2)):
        books.drop(books.cache.insert("", 0, tokens(spelt), {"swa": ints(0, page)}).pages)
    assert sorted(books.cache.tick(10.0)["swa"].tolist()) == [1, 2]
    books.cache.check()
    assert books.cache.statistics().entries == 0


def test_the_front_of_a_split_grows_old_too() -> None:
    """A row goes on from the middle of a node, and touches none of what is before."""
    books = Books(cache=RadixPrefixCache(ttl=10.0))
    books.cache.tick(0.0)
    held = books.hold("aaaabbbbccccdddd").pages["full"]
    other = books.cache.insert("", int(held[1]), tokens("eeee"), {"full": ints(99)})
    books.drop({"full": held})
    books.drop(other.pages)
    assert len(books.cache.tick(10.0)["full"]) + len(books.cache.tick(20.0)["full"]) == 5
    assert books.cache.statistics().entries == 0


@pytest.mark.parametrize("seconds", [0.0, -5.0, float("nan"), float("inf")])
def test_a_pin_of_no_time_or_for_ever(seconds: float) -> None:
    books = Books(cache=RadixPrefixCache(pin_budget_pages=4))
    books.put("aaaabbbb")
    match = books.cache.match(tokens("aaaabbbb."))
    with pytest.raises(InvalidArgument, match="a pin of"):
        books.cache.pin(match, seconds)
    assert books.cache.statistics().pinned_pages == 0


def test_a_reset_ends_pins() -> None:
    """Whoever resets has reason to believe that what is cached is wrong."""
    books = Books(cache=RadixPrefixCache(pin_budget_pages=4))
    books.put("aaaabbbb")
    assert books.cache.pin(books.cache.match(tokens("aaaabbbb.")), 60.0)
    assert sorted(books.cache.reset()["full"].tolist()) == [1, 2]
    books.cache.check()
    assert books.cache.statistics().pinned_pages == 0
