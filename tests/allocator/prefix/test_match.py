"""What a match finds: whole pages, exact tokens, one token left over, and nothing touched."""

from typing import Any

import numpy as np
import pytest

from kvloom.allocator import InvalidArgument, RadixPrefixCache
from tests.allocator.prefix.helpers import Books, ints, tokens


@pytest.mark.parametrize(("page_size", "cached"), [(4, 4), (1, 7), (8, 0), (2, 6)])
def test_b34_a_token_is_left_to_compute(page_size: int, cached: int) -> None:
    books = Books(page_size)
    first = books.hold("abcdefgh")  # and it is still being read
    match = books.cache.match(tokens("abcdefgh"))
    assert match.tokens == cached
    assert match.pages["full"].tolist() == first.pages["full"][: cached // page_size].tolist()


def test_b34_a_preempted_sequence_finds_its_32_of_40() -> None:
    books = Books(16)
    books.put("x" * 32)
    assert books.cache.match(tokens("x" * 40)).tokens == 32


def test_the_longest_prefix_in_whole_pages() -> None:
    books = Books()
    books.put("aaaabbbbcccc")
    books.put("aaaabbbbdddd")
    assert books.cached("aaaabbbbcccc") == 12
    assert books.cached("aaaabbbbdddd") == 12
    assert books.cached("aaaabbbbcccd") == 8
    assert books.cached("aaaabbb") == 4
    assert books.cached("aaab") == 0
    assert books.cached("") == 0
    assert books.cache.match(ints()).tokens == 0


def test_namespaces_share_nothing() -> None:
    books = Books()
    books.put("aaaabbbb", namespace="one")
    books.put("aaaa", namespace="two")
    assert [books.cached("aaaabbbb", name) for name in ("one", "two", "three")] == [8, 4, 0]


def test_b36_minus_one_and_minus_two_are_different_tokens() -> None:
    """In Python they have the same hash."""
    cache = RadixPrefixCache()
    cache.attach(2, {"full": None})
    cache.insert("", 0, ints(-1, -1), {"full": ints(1)})
    cache.insert("", 0, ints(-2, -2), {"full": ints(2)})
    assert cache.match(ints(-1, -1, 0)).pages["full"].tolist() == [1]
    assert cache.match(ints(-2, -2, 0)).pages["full"].tolist() == [2]
    assert cache.match(ints(-1, -2, 0)).tokens == 0


EQUAL: tuple[Any, ...] = (
    [1, 0, 1, 1, 5],
    (True, False, True, True, 5),
    np.array([1, 0, 1, 1, 5], np.int64),
    np.array([1, 0, 1, 1, 5], np.uint8),
    np.array([1, 0, 1, 1, 5], ">i4"),
    np.array([1, 9, 0, 9, 1, 9, 1, 9, 5, 9], np.int32)[::2],
)


@pytest.mark.parametrize("row", EQUAL, ids=lambda row: f"{type(row).__name__} {getattr(row, 'dtype', '')}")
def test_b36_equal_tokens_match_whatever_holds_them(row: Any) -> None:
    cache = RadixPrefixCache()
    cache.attach(2, {"full": None})
    cache.insert("", 0, row[:4], {"full": ints(1, 2)})
    assert cache.match(row).tokens == 4
    assert cache.match(ints(1, 0, 1, 1, 5)).tokens == 4
    assert cache.match(ints(1, 0, 1, 0, 5)).tokens == 2


@pytest.mark.parametrize("row", [[2**31, 1, 1], [1.0, 1.0, 1.0], [[1, 1, 1]], [-(2**31) - 1, 1, 1]])
def test_b36_what_is_no_token_of_32_bits_never_matches_by_accident(row: Any) -> None:
    """2**31 + n cut to 32 bits is a token that may well be cached."""
    books = Books(1)
    with pytest.raises(InvalidArgument):
        books.cache.match(row)
    with pytest.raises(InvalidArgument):
        books.cache.insert("", 0, row, books.fresh(3))


def test_b36_two_equal_prompts_of_one_step_end_with_one_copy() -> None:
    books = Books()
    first, second = books.hold("aaaabbbb"), books.hold("aaaabbbb")
    assert first.adopted["full"].tolist() == [True, True]
    assert second.adopted["full"].tolist() == [False, False]
    assert second.pages["full"].tolist() == first.pages["full"].tolist() == [1, 2]
    report = books.cache.statistics()
    assert (report.inserted, report.duplicates, report.pages["full"]) == (2, 2, 2)
    books.drop(first.pages)
    assert books.balance() == (0, 2)
    books.drop(second.pages)
    assert books.balance() == (2, 0)


def test_a_match_mutates_nothing() -> None:
    """Not even a node is split, where a prompt ends in the middle of one."""
    books = Books(windows={"full": None, "swa": 5})
    books.put("aaaabbbbccccdddd")
    books.hold("aaaabbbbeeee")
    before = state(books.cache)
    for spelt in ("aaaa", "aaaabbbbcccc", "aaaabbbbccccddddeeee", "bbbb", "aaaabbbbeeeeffff"):
        books.match(spelt)
        books.match(spelt, "elsewhere")
    assert state(books.cache) == before


def state(thing: Any) -> Any:
    """All that hangs together below `thing`, as plain values; what was met before, by the order of meeting."""
    met: dict[int, tuple[int, Any]] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, int | float | str | bytes | type(None)):
            return value
        if id(value) in met:
            return f"#{met[id(value)][0]}"
        met[id(value)] = len(met), value  # kept alive: another thing must not get its id
        if isinstance(value, np.ndarray):
            return value.dtype.str, value.tolist()
        if isinstance(value, bytearray | memoryview):
            return bytes(value)
        if isinstance(value, dict):
            return [(plain(key), plain(inner)) for key, inner in value.items()]
        if isinstance(value, list | tuple) or type(value).__name__ == "deque":
            return [plain(inner) for inner in value]
        slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        named = {name: getattr(value, name) for name in slots} | getattr(value, "__dict__", {})
        return type(value).__name__, repr(value) if not named else plain(named)

    return plain(thing)


def test_the_state_that_is_compared_sees_a_use() -> None:
    """The test of purity would be worth nothing if this did not differ."""
    books = Books()
    books.put("aaaabbbb")
    before = state(books.cache)
    books.cache.lock(books.match("aaaa"))
    assert state(books.cache) != before


def test_what_a_match_says_is_the_callers_to_change() -> None:
    books = Books(windows={"full": None, "swa": 5})
    books.put("aaaabbbb")
    match = books.match("aaaabbbb")
    for ids in match.pages.values():
        ids[:] = 99
    assert books.match("aaaabbbb").pages["full"].tolist() == [1, 2]
    books.cache.check()
