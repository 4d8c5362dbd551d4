"""The three verbs of a prefix cache on many cached conversations, timed one call at a time."""

import gc
from collections.abc import Iterator

import numpy as np

from benchmarks.clock import Clock, now
from kvloom.allocator import RadixPrefixCache
from kvloom.allocator.prefix.base import PageArray, TokenArray

PAGE_SIZE = 16
SHARED = 1024  # tokens, as of a system prompt
LENGTH = 8192
EVICTED = 1000  # pages


class Crowd:
    """A cache of `sequences` prompts that share their first tokens, and the free pages of its pool."""

    def __init__(self, sequences: int, rounds: int) -> None:
        rng = np.random.default_rng(0)
        self.need = LENGTH // PAGE_SIZE
        self.pages = sequences * self.need
        self.cache = RadixPrefixCache()
        self.cache.attach(PAGE_SIZE, {"full": None})
        prompts = rng.integers(0, 150_000, (3 * rounds + 1, LENGTH + 1), dtype=np.int32)
        prompts[:, :SHARED] = prompts[0, :SHARED]
        self.prompts: Iterator[TokenArray] = iter(prompts)
        self.free: PageArray = np.arange(1, self.pages + 4 * rounds * self.need, dtype=np.int32)
        for _ in range(sequences):
            cached = prompts[0].copy()
            cached[SHARED:] = rng.integers(0, 150_000, len(cached) - SHARED)
            self.insert(cached, None)

    def insert(self, prompt: TokenArray, clock: Clock | None) -> None:
        """A row computes a prompt, hands it to the cache, and ends."""
        pages, self.free = self.free[: self.need], self.free[self.need :]
        start = now()
        inserted = self.cache.insert("", 0, prompt[:LENGTH], {"full": pages})
        spent = now() - start
        if clock is not None:
            clock.add(insert=spent)
        self.cache.unlock("full", inserted.pages["full"])

    def look_up(self, prompt: TokenArray, clock: Clock) -> None:
        """The whole prompt is cached, and one token more is asked for."""
        start = now()
        match = self.cache.match(prompt)
        clock.add(look_up=now() - start)
        assert match.tokens == LENGTH

    def evict(self, clock: Clock) -> None:
        """Room for about two prompts."""
        start = now()
        evicted = self.cache.evict("full", EVICTED)
        clock.add(evict=now() - start)
        assert len(evicted["full"]) == EVICTED


def measure(sequences: int, rounds: int) -> Clock:
    """In each round two prompts come in and are looked up, and as many pages are evicted: the size stays as it is."""
    crowd, clock = Crowd(sequences, rounds), Clock()
    gc.collect()
    gc.freeze()
    for _ in range(rounds):
        for prompt in (next(crowd.prompts), next(crowd.prompts)):
            crowd.insert(prompt, clock)
            crowd.look_up(prompt, clock)
        crowd.evict(clock)
        if crowd.cache.statistics().pages["full"] < crowd.pages - crowd.need:
            crowd.insert(next(crowd.prompts), None)
    clock.flush()
    gc.unfreeze()
    crowd.cache.check()
    return clock
