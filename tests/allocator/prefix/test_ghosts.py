"""What a larger cache would have hit."""

import pytest

from kvloom.allocator import InvalidArgument, RadixPrefixCache
from tests.allocator.prefix.helpers import Books, tokens


def regret(books: Books, spelt: str, namespace: str = "") -> int:
    row = tokens(spelt + ".")
    found = books.cache.regret(row, namespace, books.cache.match(row, namespace).tokens)
    books.cache.check()
    return found


def test_tokens_whose_pages_went_are_regretted() -> None:
    books = Books()
    books.put("aaaabbbbcccc")
    assert regret(books, "aaaabbbbcccc") == 0
    books.evict("full", 1)
    assert regret(books, "aaaabbbbcccc") == 4
    books.evict("full", 1)
    assert regret(books, "aaaabbbbcccc") == 8
    books.evict("full", 1)
    assert regret(books, "aaaabbbbccccdddd") == 12
    assert regret(books, "aaaabbbbccc") == 8
    assert regret(books, "aaaabbbbcccx") == 8
    assert regret(books, "aaaxbbbbcccc") == 0
    assert regret(books, "aaaabbbbcccc", "other") == 0


def test_what_is_regretted_is_recorded() -> None:
    books = Books()
    books.put("aaaabbbb")
    books.evict("full", 1)
    regret(books, "aaaabbbb")
    regret(books, "xxxx")
    report = books.cache.statistics()
    assert (report.query_tokens, report.hit_tokens, report.regret_tokens) == (9 + 5, 4, 4)


def test_a_ghost_ends_when_its_tokens_are_cached_again() -> None:
    books = Books()
    books.put("aaaabbbb")
    books.put("aaaacccc")
    books.evict("full", 2)
    assert books.cache.statistics().ghost_pages == 2
    assert [regret(books, "aaaa" + end) for end in ("bbbb", "cccc")] == [4, 4]
    books.put("bbbb", after=1)
    assert [regret(books, "aaaa" + end) for end in ("bbbb", "cccc")] == [0, 4]
    assert books.cache.statistics().ghost_pages == 1


def test_the_oldest_are_forgotten_first() -> None:
    books = Books(cache=RadixPrefixCache(ghost_pages=3))
    for letter in "abc":
        books.put(letter * 8)
    for _ in range(3):
        books.evict("full", 2)
    assert books.cache.statistics().ghost_pages == 2
    assert [regret(books, letter * 8) for letter in "abc"] == [0, 0, 8]


def test_a_ghost_goes_with_what_hangs_below_it() -> None:
    books = Books(cache=RadixPrefixCache(ghost_pages=100))
    books.put("aaaabbbb")
    books.put("aaaacccc")
    books.evict("full", 3)
    assert [regret(books, "aaaa" + end) for end in ("bbbb", "cccc", "dddd")] == [8, 8, 4]
    books.put("aaaaxxxx")
    assert [regret(books, "aaaa" + end) for end in ("bbbb", "cccc", "xxxx")] == [0, 0, 0]
    assert books.cache.statistics().ghost_pages == 0


def test_a_row_that_goes_on_past_ghosts_keeps_those_beside_it() -> None:
    books = Books()
    books.put("aaaabbbb")
    books.evict("full", 1)
    books.put("cccc", after=1)
    books.put("dddd", after=3)
    assert books.cached("aaaaccccdddd") == 12
    assert regret(books, "aaaabbbb") == 4


@pytest.mark.parametrize("end", ["reset", "ttl"])
def test_what_did_not_go_for_want_of_room_is_not_regretted(end: str) -> None:
    books = Books(cache=RadixPrefixCache(ttl=1.0))
    books.cache.tick(0.0)
    books.put("aaaabbbb")
    books.evict("full", 1)
    if end == "reset":
        books.cache.reset()
    else:
        books.cache.tick(1.0)
    assert books.balance() == (0, 0)
    assert regret(books, "aaaabbbb") == 0
    assert books.cache.statistics().ghost_pages == 0


def test_no_ghosts_at_all() -> None:
    books = Books(cache=RadixPrefixCache(ghost_pages=0))
    books.put("aaaabbbb")
    books.evict("full", 2)
    assert books.cache.statistics().ghost_pages == 0
    assert regret(books, "aaaabbbb") == 0


@pytest.mark.parametrize("bounds", [{"ghost_pages": -1}, {"pin_budget_pages": -1}], ids=str)
def test_bounds_below_nothing(bounds: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument):
        RadixPrefixCache(**bounds)  # type: ignore[arg-type]


def test_what_hung_behind_a_ghost_hangs_behind_all_of_it() -> None:
    books = Books()
    books.put("aaaabbbbccccdddd")
    books.evict("full", 1)
    books.evict("full", 2)
    assert regret(books, "aaaabbbbccccdddd") == 12
    assert regret(books, "aaaabbbbdddd") == 4
