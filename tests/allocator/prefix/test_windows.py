"""Sliding windows: what a row behind a prefix still reads, and which pages go first."""

from collections.abc import Mapping

import pytest

from tests.allocator.prefix.helpers import Books, ints, lists, tokens

BOTH: Mapping[str, int | None] = {"full": None, "swa": 8}
A = "".join(letter * 4 for letter in "abcdefghij")  # 40 tokens, 10 pages; a window of 8 reads the last 2


@pytest.mark.parametrize(
    ("window", "page_size", "needed"),
    [(8, 4, 2), (9, 4, 2), (10, 4, 3), (4, 4, 1), (5, 4, 1), (6, 4, 2), (3, 4, 1), (1, 4, 1), (1, 1, 1), (3, 1, 2)],
)
def test_the_last_whole_window_is_in_a_match(window: int, page_size: int, needed: int) -> None:
    """The next token reads itself and window - 1 tokens before it."""
    books = Books(page_size, {"full": None, "swa": window})
    inserted = books.put("x" * 6 * page_size)
    match = books.match("x" * 6 * page_size)
    assert match.tokens == 6 * page_size
    assert match.pages["full"].tolist() == inserted.pages["full"].tolist()
    assert match.pages["swa"].tolist() == [0] * (6 - needed) + inserted.pages["swa"][6 - needed :].tolist()


def test_a_match_ends_where_the_last_whole_window_is() -> None:
    books = Books(windows=BOTH)
    books.cache.insert("", 0, tokens(A), {"full": ints(*range(1, 11)), "swa": ints(1, 0, 3, 4, 5, 0, 7, 0, 9, 0)})
    assert books.cached(A) == 20  # 4 and 5 are both there
    assert books.cached(A[:16]) == 16  # 3 and 4
    assert books.cached(A[:12]) == 4  # there is only one page before
    assert lists(books.match(A).pages) == {"full": [1, 2, 3, 4, 5], "swa": [0, 0, 0, 4, 5]}


def test_b18_what_lies_outside_of_tail_windows_goes_first() -> None:
    books = Books(windows=BOTH)
    books.put(A)
    others = [letter * 16 for letter in "uvwxyz"]
    for other in others:
        books.put(other)
    loose = 8 + 6 * 2
    gone = books.evict("swa", loose)
    assert lists(gone)["full"] == []
    assert len(gone["swa"]) == loose
    assert books.cached(A) == 40
    assert [books.cached(other) for other in others] == [16] * 6


def test_b18_loose_pages_go_in_the_order_of_coming_loose() -> None:
    books = Books(windows=BOTH)
    a, b = books.hold(A), books.hold("x" * 16)
    books.drop({"swa": b.pages["swa"]})
    books.drop({"swa": a.pages["swa"][2:5]})
    books.drop({"swa": a.pages["swa"][:1]})
    order = [*b.pages["swa"][:2].tolist(), *a.pages["swa"][2:5].tolist(), *a.pages["swa"][:1].tolist()]
    assert [int(books.evict("swa", 1)["swa"][0]) for _ in order] == order


def test_b18_a_tail_that_had_to_go_strands_nothing() -> None:
    books = Books(windows=BOTH)
    books.put(A)
    assert len(books.evict("swa", 10)["swa"]) == 10
    assert books.cached(A) == 0
    assert books.balance("full") == (10, 0)
    assert len(books.evict("full", 10)["full"]) == 10
    assert books.cache.statistics().entries == 0


def test_b18_tails_go_whole_and_in_the_order_of_the_policy() -> None:
    books = Books(windows=BOTH)
    for letter in "abc":
        books.put(letter * 8)
    books.use("a" * 8)
    assert len(books.evict("swa", 1)["swa"]) == 2  # half a window serves nobody
    assert [books.cached(letter * 8) for letter in "abc"] == [8, 0, 8]
    books.evict("swa", 1)
    assert [books.cached(letter * 8) for letter in "abc"] == [8, 0, 0]


def test_what_grows_comes_loose() -> None:
    books = Books(windows=BOTH)
    first = books.put("aaaabbbb")
    books.put("ccccdddd", after=2)
    books.put("x" * 8)
    assert lists(books.evict("swa", 2))["swa"] == first.pages["swa"].tolist()
    assert books.cached("aaaabbbbccccdddd") == 16


def test_a_branch_makes_a_loose_page_worth_keeping() -> None:
    """Where a node is split there is another end, with its own tail window."""
    books = Books(windows={"full": None, "swa": 4})
    books.put("aaaabbbbccccdddd")
    books.put("eeee", after=2)
    gone = lists(books.evict("swa", 2))["swa"]
    assert gone == [1, 3]
    assert [books.cached(end) for end in ("aaaabbbb", "aaaabbbbccccdddd", "aaaabbbbeeee")] == [8, 16, 12]


def test_locked_window_pages_stay_and_hold_their_full_page() -> None:
    books = Books(windows=BOTH)
    inserted = books.put("aaaabbbb")
    match = books.match("aaaabbbb")
    books.cache.lock(match)
    books.drop({"full": match.pages["full"]})
    assert lists(books.evict("swa", 9))["swa"] == []
    assert lists(books.evict("full", 9)) == {"full": [], "swa": []}
    books.drop({"swa": inserted.pages["swa"]})
    assert lists(books.evict("full", 9)) == {"full": [1, 2], "swa": [1, 2]}


def test_a_full_page_takes_its_window_page_along() -> None:
    books = Books(windows=BOTH)
    books.put("aaaabbbbcccc")
    assert lists(books.evict("full", 1)) == {"full": [3], "swa": [3]}
    assert books.cached("aaaabbbb") == 8


def test_windows_alone_a_node_without_pages_goes() -> None:
    books = Books(windows={"swa": 4})
    trunk = books.put("aaaabbbb")
    books.put("cccc", after=int(trunk.pages["swa"][-1]))
    books.put("dddd", after=int(trunk.pages["swa"][-1]))
    assert books.cache.statistics().entries == 3
    books.evict("swa", 1)  # what is loose
    assert [books.cached("aaaabbbb" + end) for end in ("", "cccc", "dddd")] == [8, 12, 12]
    books.use("aaaabbbbcccc")
    books.evict("swa", 1)
    assert [books.cached("aaaabbbb" + end) for end in ("", "cccc", "dddd")] == [8, 12, 8]
    assert books.cache.statistics().entries == 2
    books.evict("swa", 1)  # what a branch and its trunk were used for last counts for the trunk
    assert books.cached("aaaabbbb") == 8
    assert books.cache.statistics().entries == 1
    books.evict("swa", 1)
    assert books.cache.statistics().entries == 0


def test_windows_alone_a_trunk_goes_with_its_last_branch() -> None:
    books = Books(windows={"swa": 4})
    books.put("aaaabbbb")
    books.put("aaaacccc")
    held = books.match("aaaabbbb")
    books.cache.lock(held)
    books.evict("swa", 9)
    assert books.cache.statistics().pages == {"swa": 1}
    assert books.cache.statistics().entries == 2  # the trunk has no page left, but a branch
    books.drop(held.pages)
    books.evict("swa", 1)
    assert books.cache.statistics().entries == 0


def test_windows_alone_a_long_row_is_trimmed_and_found() -> None:
    books = Books(windows={"swa": 8})
    last = books.hold(A[:8])
    for start in range(8, 40, 8):
        inserted = books.hold(A[start : start + 8], after=int(last.pages["swa"][-1]))
        books.drop(last.pages)
        assert len(books.evict("swa", 2)["swa"]) == 2
        last = inserted
    assert books.cache.statistics().pages == {"swa": 2}
    assert books.cached(A) == 40
    assert books.cached(A[:32]) == 0


def test_loose_pages_are_a_tail_again_where_a_leaf_is_cut() -> None:
    books = Books(windows=BOTH)
    books.put("aaaabbbbccccddddeeee")
    held = books.match("aaaabbbbcccc")
    books.cache.lock(held)
    assert sorted(books.evict("swa", 9)["swa"].tolist()) == [1, 4, 5]
    books.drop(held.pages)  # 2 and 3 are loose now
    assert lists(books.evict("full", 2)) == {"full": [4, 5], "swa": []}
    assert books.cached("aaaabbbbcccc") == 12
    assert lists(books.evict("swa", 1))["swa"] == [2, 3]
