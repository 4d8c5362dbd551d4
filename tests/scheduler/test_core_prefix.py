"""The core over a memory with a prefix cache: what is computed, what is reused, what counts as wasted."""

from collections.abc import Callable

import numpy as np

from kvloom.allocator.prefix import RadixPrefixCache
from kvloom.scheduler import Request, SamplingParams
from tests.scheduler.driven import Driven, ids, sizes

Drive = Callable[..., Driven]
BOOM = RuntimeError("boom")


def numbered(request_id: str, number: int) -> int:
    return 40 + number % 50


def test_who_begins_alike_computes_the_rest(drive: Drive) -> None:
    """Also while the other still runs; what is reused is in whole pages, and one token at least is computed."""
    driven = drive(prefix_cache=RadixPrefixCache(), page_size=4, speak=numbered)
    driven.add("a", 10, max_new_tokens=9)
    driven.step()
    driven.add("b", 10, max_new_tokens=2)
    driven.add("other", [99, *range(11, 20)], max_new_tokens=2)
    plan = driven.step()
    assert sizes(plan) == {"a": 1, "b": 2, "other": 10}
    assert plan.prefix_lens.tolist() == [10, 8, 0]
    driven.run()
    driven.add("c", 8, max_new_tokens=1)
    assert sizes(driven.step()) == {"c": 4}, "its second page is cached, but its last token must be computed"
    said = driven.said["a"]
    driven.add("goes on", [*range(10, 20), *said, 3], max_new_tokens=1)  # of 18 tokens with KV, 16 in whole pages
    assert sizes(driven.step()) == {"goes on": 4}
    assert [driven.ends[name].usage.cached_tokens for name in ("a", "b", "other", "c", "goes on")] == [0, 8, 0, 4, 16]
    now = driven.core.statistics()
    assert (now.prompt_tokens_cached, now.prompt_tokens_computed) == (8 + 4 + 16, 10 + 2 + 10 + 4 + 4)


def test_a_namespace_is_an_island(drive: Drive) -> None:
    driven = drive(prefix_cache=RadixPrefixCache())
    for request_id, namespace in (("a", "x"), ("b", "y"), ("c", ""), ("d", "x")):
        prompt = np.arange(10, 20, dtype=np.int32)
        driven.ask(
            Request(id=request_id, prompt=prompt, cache_namespace=namespace, params=SamplingParams(max_new_tokens=1))
        )
        driven.run()
    assert [driven.ends[name].usage.cached_tokens for name in "abcd"] == [0, 0, 0, 8]


def test_a_preempted_request_finds_what_it_has_computed(drive: Drive) -> None:
    """Wasted is what it must compute again: what the cache has given up since, and the page that was not whole."""
    driven = drive(pages=5, page_size=4, speak=numbered, prefix_cache=RadixPrefixCache())
    driven.add("A", [99, *range(11, 18)], max_new_tokens=8)
    driven.step()
    driven.step()
    driven.add("B", 4, max_new_tokens=8)
    while not driven.core.statistics().preempted:
        driven.step()
    (victim,) = (one for one in driven.core.live if one.phase == "preempted")
    computed = victim.computed
    assert computed == 4 + len(driven.said["B"]) - 1 > 4
    assert driven.core.statistics().wasted_tokens.get("preempted", 0) == 0, "not yet: perhaps nothing is"
    before = driven.core.statistics().prompt_tokens_computed
    plans = driven.run()
    (back,) = (plan for plan in plans if "B" in sizes(plan) and sizes(plan)["B"] > 1)
    known = int(back.prefix_lens[ids(back).index("B")])
    assert known == 4, "its second page was not whole"
    now = driven.core.statistics()
    assert now.wasted_tokens["preempted"] == computed - known
    assert (now.prompt_tokens_computed, now.prompt_tokens_cached) == (before, 0), "that was no prompt's first time"
    assert driven.ends["B"].usage.cached_tokens == 0
    assert driven.said == {"A": [40 + i for i in range(8)], "B": [40 + i for i in range(8)]}


def test_who_ends_while_preempted_has_wasted_all_that_it_had(drive: Drive) -> None:
    driven = drive(pages=8, page_size=4, speak=numbered, prefix_cache=RadixPrefixCache())
    driven.add("A", [99, *range(11, 22)], max_new_tokens=12)
    driven.add("B", 12, max_new_tokens=12)
    while not driven.core.statistics().preempted:
        driven.step()
    (victim,) = (one for one in driven.core.live if one.phase == "preempted")
    computed = victim.computed
    driven.abort("B")
    assert driven.core.statistics().wasted_tokens["preempted"] == computed == 12 + len(driven.said["B"]) - 1
    driven.run()
    assert driven.core.statistics().wasted_tokens["preempted"] == computed


def test_what_a_failed_request_leaves_is_for_nobody(drive: Drive) -> None:
    driven = drive(prefix_cache=RadixPrefixCache(), prefill_chunk=4)
    driven.add("fails", 12, max_new_tokens=1)
    driven.step()
    driven.plan()
    driven.abandon(BOOM)
    driven.add("next", 12, max_new_tokens=1)
    driven.run()
    assert driven.ends["next"].usage.cached_tokens == 0
