"""In which order pages go, and what it costs to find them."""

import pytest

from kvloom.allocator import InvalidArgument, NodeView, RadixPrefixCache
from tests.allocator.prefix.helpers import Books, ints, lists, tokens


def order(books: Books) -> str:
    """The first letters of what goes, page by page, and of what hangs behind it first."""
    names = {}
    for letter in "abcd":
        for page in books.match(letter * 4).pages["full"].tolist():
            names[page] = letter
    gone = ""
    while books.cache.evictable("full"):
        gone += "".join(names[page] for page in books.evict("full", 1)["full"].tolist())
    return gone


def three(policy: str) -> Books:
    books = Books(cache=RadixPrefixCache(policy))
    for letter, priority in (("a", 2), ("b", 1), ("c", 1)):
        books.put(letter * 4, priority=priority)
    return books


@pytest.mark.parametrize(
    ("policy", "gone"), [("lru", "acb"), ("lfu", "bca"), ("fifo", "abc"), ("priority", "cba")], ids=lambda value: value
)
def test_the_order_of_a_policy(policy: str, gone: str) -> None:
    """Hits: a 3, c 2, b 1; last use: a, c, b; made: a, b, c; priority: b and c below a."""
    books = three(policy)
    for letter in "aaaccb":
        books.use(letter * 4)
    assert order(books) == gone


def test_a_key_that_changes_while_listed_counts() -> None:
    books = three("lru")
    books.cache.lock(books.match("aaaa"))  # listed under its old key, and used
    books.drop({"full": ints(1)})
    assert books.evict("full", 1)["full"].tolist() == [2]


def test_a_priority_that_rises_counts() -> None:
    books = three("priority")
    books.put("bbbb", priority=5)
    assert order(books) == "cab"


def test_a_policy_of_ones_own_whose_keys_fall() -> None:
    """The most recently used first: each use makes a node's key smaller."""

    class MostRecent:
        def key(self, node: NodeView) -> int:
            return -node.last_used

    books = Books(cache=RadixPrefixCache(MostRecent()))
    for letter in "abc":
        books.put(letter * 4)
    books.use("aaaa")
    assert order(books) == "acb"


def test_an_unknown_policy() -> None:
    with pytest.raises(InvalidArgument, match="lru, lfu, fifo, priority"):
        RadixPrefixCache("mru")


def test_pages_go_from_the_end_of_a_leaf() -> None:
    books = Books()
    books.put("aaaabbbbcccc")
    books.put("aaaabbbbdddd")
    assert lists(books.evict("full", 1)) == {"full": [3]}
    assert books.cached("aaaabbbbcccc") == 8
    assert lists(books.evict("full", 2)) == {"full": [6, 2]}
    assert books.cached("aaaabbbb") == 4
    assert books.balance() == (1, 0)


def test_no_more_goes_than_is_asked_for() -> None:
    books = Books()
    books.put("aaaabbbbccccdddd")
    for left in (3, 2, 1, 0, 0):
        books.evict("full", 1)
        assert books.balance() == (left, 0)
    assert lists(books.evict("full", 0)) == {"full": []}
    with pytest.raises(InvalidArgument):
        books.cache.evict("full", -1)


def test_a_parent_is_a_leaf_once_its_children_are_gone() -> None:
    books = Books()
    books.put("aaaa")
    books.put("aaaabbbb", namespace="x")
    books.hold("aaaacccc", namespace="x")
    assert sorted(books.evict("full", 9)["full"].tolist()) == [1, 3]
    assert books.balance() == (0, 2)


def test_reasons_are_counted() -> None:
    books = Books(windows={"full": None, "swa": 8})
    books.put("aaaabbbbcccc")
    books.evict("swa", 1, "watermark")
    books.evict("full", 2)
    assert books.cache.statistics().evicted == {
        ("swa", "watermark"): 1,
        ("full", "capacity"): 2,
        ("swa", "capacity"): 2,
    }


def test_a_report_does_not_change_afterwards() -> None:
    books = Books()
    books.put("aaaa")
    report = books.cache.statistics()
    books.evict("full", 1)
    assert report.pages == {"full": 1}
    assert report.evicted == {}


class Counting:
    """Looks at nodes are what eviction costs beside the pages themselves."""

    def __init__(self) -> None:
        self.looks = 0

    def key(self, node: NodeView) -> int:
        self.looks += 1
        return node.last_used


@pytest.mark.parametrize("used", [False, True], ids=["in order", "all used since"])
def test_eviction_does_not_walk_the_tree(used: bool) -> None:
    """The same looks for the same pages, whether a hundred sequences are cached or ten times as many."""
    looks = []
    for sequences in (100, 1000):
        policy = Counting()
        cache = RadixPrefixCache(policy)
        cache.attach(1, {"full": None})
        for page in range(sequences):
            cache.insert("", 0, ints(page, page), {"full": ints(2 * page + 1, 2 * page + 2)})
            cache.unlock("full", ints(2 * page + 1, 2 * page + 2))
        if used:  # the oldest ten move to the end, and must be looked at again
            for page in range(10):
                match = cache.match(ints(page, page, 0))
                cache.lock(match)
                cache.unlock("full", match.pages["full"])
        policy.looks = 0
        assert len(cache.evict("full", 20)["full"]) == 20
        looks.append(policy.looks)
        cache.check()
    assert looks[0] == looks[1] <= 60


def test_candidates_that_are_gone_do_not_pile_up() -> None:
    """Nodes that time takes leave entries in the heap, which nobody else would ever remove."""
    cache = RadixPrefixCache(ttl=1.0)
    cache.attach(1, {"full": None})
    for now in range(2000):
        cache.insert("", 0, ints(now), {"full": ints(now + 1)})
        cache.unlock("full", ints(now + 1))
        cache.tick(float(now))
    cache.check()
    assert len(cache._evictor.leaves._heap) < 200
    assert len(cache._tree.nodes) < 50


def test_tokens_in_the_middle_of_a_prompt_are_not_its_start() -> None:
    books = Books()
    books.put("aaaabbbb")
    assert books.cache.match(tokens("bbbbaaaa.")).tokens == 0
