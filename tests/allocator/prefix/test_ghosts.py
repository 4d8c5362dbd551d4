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


def test_what_hangs_below_a_ghost_stays_when_it_is_cached_again() -> None:
    books = Books(cache=RadixPrefixCache(ghost_pages=100))
    books.put("aaaabbbb")
    books.put("aaaacccc")
    books.evict("full", 3)
    assert [regret(books, "aaaa" + end) for end in ("bbbb", "cccc", "dddd")] == [8, 8, 4]
    books.put("aaaaxxxx")
    assert [regret(books, "aaaa" + end) for end in ("bbbb", "cccc", "xxxx")] == [4, 4, 0]
    assert books.cache.statistics().ghost_pages == 2
    books.put("aaaabbbb")
    assert [regret(books, "aaaa" + end) for end in ("bbbb", "cccc", "xxxx")] == [0, 4, 0]


def test_conversations_that_share_a_system_prompt_are_told_apart() -> None:
    books = Books(page_size=16)
    system = "s" * 64
    for letter in "ab":
        books.put(system + letter * 64)
    books.evict("full", 12)
    books.put(system + "c" * 64)
    assert [regret(books, system + letter * 64) for letter in "abc"] == [64, 64, 0]
    assert books.cached(system) == 64


@pytest.mark.parametrize("namespace", ["", "tenant"])
def test_what_lives_again_only_at_the_front_leaves_the_rest(namespace: str) -> None:
    books = Books()
    books.put("aaaabbbbccccdddd", namespace=namespace)
    books.evict("full", 4)
    books.put("aaaabbbb", namespace=namespace)
    assert regret(books, "aaaabbbbccccdddd", namespace) == 8
    books.put("aaaabbbbccccxxxx", namespace=namespace)
    assert regret(books, "aaaabbbbccccdddd", namespace) == 4
    assert books.cache.statistics().ghost_pages == 1
    books.put("aaaabbbbccccdddd", namespace=namespace)
    assert books.cache.statistics().ghost_pages == 0
    assert [books.cached("aaaabbbbcccc" + end, namespace) for end in ("dddd", "xxxx")] == [16, 16]


def test_a_chain_of_ghosts_without_branches_lives_again_as_one_entry() -> None:
    books = Books()
    books.put("aaaabbbbccccdddd")
    for _ in range(4):
        books.evict("full", 1)
    books.put("aaaabbbbccccdddd")
    assert (books.cache.statistics().entries, books.cache.statistics().ghost_pages) == (1, 0)


def test_each_ghost_is_told_its_pages() -> None:
    books = Books(windows={"full": None, "other": None})
    kept = {letter: books.put(letter * 8).pages for letter in "abc"}
    cuts = books.cache.cuts(books.evict("full", 5))
    assert [bytes(cut.ghost.tokens[::4]).decode() for cut in cuts] == ["aaaaaaaa", "bbbbbbbb", "cccc"]
    for letter, cut in zip("abc", cuts, strict=True):
        for pool in ("full", "other"):
            assert cut.pages[pool].tolist() == kept[letter][pool][-len(cut.pages[pool]) :].tolist()
    with_windows = Books(windows={"full": None, "swa": 4})
    with pytest.raises(InvalidArgument):
        with_windows.cache.cuts(with_windows.evict("full", 1))


class Body:
    """A copy that counts how often it is told of its end."""

    ends = 0

    def gone(self) -> None:
        self.ends += 1


def with_bodies(books: Books, count: int) -> list[Body]:
    """Evicts; each ghost that comes of it gets one."""
    bodies = []
    for cut in books.cache.cuts(books.evict("full", count)):
        cut.ghost.body = body = Body()
        bodies.append(body)
    return bodies


def parts(books: Books, spelt: str) -> list[tuple[object, int, int]]:
    found = books.cache.parts_behind(tokens(spelt + "."), books.match(spelt))
    return [(part.body, part.first, part.pages) for part in found]


def test_bodies_are_found_behind_the_match() -> None:
    books = Books()
    pages = books.put("aaaabbbbccccdddd").pages["full"]
    (end,) = with_bodies(books, 1)
    (cut,) = books.cache.cuts(books.evict("full", 2))
    assert cut.pages["full"].tolist() == pages[1:3].tolist()
    front = cut.ghost.body = Body()
    assert parts(books, "aaaabbbbccccdddd") == [(front, 0, 2), (end, 0, 1)]
    assert parts(books, "aaaabbbbccccxxxx") == [(front, 0, 2)]
    assert parts(books, "aaaabbbbxxxxdddd") == [(front, 0, 1)]
    assert books.cache.parts_behind(tokens("aaaabbbbcccc"), books.match("aaaabbbb")) == ((front, 0, 1),)
    assert parts(books, "xxxxbbbb") == []
    books.put("bbbb", after=1)
    assert parts(books, "aaaabbbbccccdddd") == [(front, 1, 1), (end, 0, 1)]
    cut.ghost.body = None
    assert parts(books, "aaaabbbbccccdddd") == [], "nothing is found behind a hole"


def test_bodies_hear_of_the_end_of_their_ghosts() -> None:
    books = Books(cache=RadixPrefixCache(ghost_pages=2))
    books.put("aaaabbbbcccc")
    (first,) = with_bodies(books, 1)
    (second,) = with_bodies(books, 1)
    assert (first.ends, second.ends) == (0, 0)
    with_bodies(books, 1)
    assert (first.ends, second.ends) == (1, 0), "the oldest ghost is forgotten"
    books.put("aaaabbbb")
    assert (first.ends, second.ends) == (1, 1), "cached again"
    (third,) = with_bodies(books, 2)
    books.cache.reset()
    assert third.ends == 1


def test_what_is_forgotten_at_once_is_not_handed_out() -> None:
    books = Books(cache=RadixPrefixCache(ghost_pages=2))
    books.put("aaaabbbbcccc")
    assert with_bodies(books, 3) == []
    books.put("xxxxyyyy")
    books.put("aaaabbbb")
    assert len(with_bodies(books, 4)) == 1, "one of the two entries"


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
