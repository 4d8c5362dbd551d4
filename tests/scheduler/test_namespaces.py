"""Namespaces that differ are different strings."""

from itertools import product

from kvloom.scheduler import cache_namespace


def test_different_calls_give_different_strings() -> None:
    words = ("", "a", "1:a", "aa", "1:", ":")
    images: tuple[tuple[str, ...], ...] = ((), ("",), ("a",), ("a", ""), ("", "a"), ("aa",), ("1:a",))
    calls = list(product(words, words, words, images))
    made = [cache_namespace(tenant=t, adapter=a, salt=s, images=i) for t, a, s, i in calls]
    assert len(set(made)) == len(calls)


def test_nothing_is_the_namespace_of_those_who_name_none() -> None:
    assert cache_namespace() == ""
