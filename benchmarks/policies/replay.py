"""A trace, one request after the other, through the prefix cache itself."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from benchmarks.policies.chats import Request
from benchmarks.policies.optimum import Clairvoyant, Future, optimum
from kvloom.allocator import Match, RadixPrefixCache
from kvloom.allocator.prefix.base import PageArray

POOL = "full"
OPTIMUM = "optimum"
CLAIRVOYANT = "clairvoyant"


class Setting(NamedTuple):
    """`policy`: a name of the cache's, or OPTIMUM, or CLAIRVOYANT.  `capacity` and `ghosts` in pages."""

    policy: str
    capacity: int
    ghosts: int = 0


@dataclass(frozen=True)
class Outcome:
    """Tokens; `important` are those of requests with priority."""

    prompt: int
    hit: int
    important_prompt: int
    important_hit: int
    regret: int = 0

    @property
    def ratio(self) -> float:
        """Hit tokens for each token of a prompt."""
        return self.hit / self.prompt

    @property
    def important_ratio(self) -> float:
        """The same of requests with priority; 0 where there is none."""
        return self.important_hit / max(1, self.important_prompt)


class Server:
    """A cache and a pool of `capacity` pages around it."""

    def __init__(self, setting: Setting, future: Future) -> None:
        self._clairvoyant = Clairvoyant(setting.capacity) if setting.policy == CLAIRVOYANT else None
        self.cache = RadixPrefixCache(self._clairvoyant or setting.policy, ghost_pages=setting.ghosts)
        self.cache.attach(future.page_size, {POOL: None})
        self._future = future
        self._free: PageArray = np.arange(setting.capacity, 0, -1, dtype=np.int32)  # a stack; the end is the top

    def serve(self, t: int, request: Request) -> int:
        """Request number `t` comes, is computed, and leaves its whole pages; the tokens that it found."""
        prompt, namespace = request.tokens[: request.prompt], str(request.tenant)
        match = self.cache.match(prompt, namespace)
        self.cache.regret(prompt, namespace, match.tokens)
        self.cache.lock(match)
        self._compute(t, request, match)
        self.cache.unlock(POOL, match.pages[POOL])
        return match.tokens

    def _compute(self, t: int, request: Request, match: Match) -> None:
        found, size = match.pages[POOL], self._future.page_size
        whole = len(request.tokens) // size
        if whole == len(found):
            return
        pages = self._take(whole - len(found))
        tokens = request.tokens[match.tokens : whole * size]
        after = int(found[-1]) if len(found) else 0
        inserted = self.cache.insert(str(request.tenant), after, tokens, {POOL: pages}, request.priority)
        if not inserted.adopted[POOL].all():
            raise ValueError(f"request {t} could not find pages that were there")
        if self._clairvoyant is not None:
            self._clairvoyant.learn(np.concatenate((found, pages)), self._future.next_use[t])
        self.cache.unlock(POOL, pages)

    def _take(self, count: int) -> PageArray:
        short = count - len(self._free)
        if short > 0:
            self._free = np.concatenate((self._free, self.cache.evict(POOL, short)[POOL]))
        if len(self._free) < count:
            raise ValueError(f"{count} pages are needed, {len(self._free)} are all there are")
        left = len(self._free) - count
        pages, self._free = self._free[left:], self._free[:left]
        return pages


def outcome(trace: Sequence[Request], hits: Iterable[int], regret: int = 0) -> Outcome:
    """Sums over a trace; `hits` in tokens, by request."""
    prompts = np.array([request.prompt for request in trace])
    found = np.array(list(hits))
    important = np.array([request.priority > 0 for request in trace])
    return Outcome(
        int(prompts.sum()), int(found.sum()), int(prompts[important].sum()), int(found[important].sum()), regret
    )


def replay(setting: Setting, trace: Sequence[Request], future: Future) -> Outcome:
    """The whole trace from an empty cache."""
    if setting.policy == OPTIMUM:
        return outcome(trace, (pages * future.page_size for pages in optimum(future, setting.capacity)))
    server = Server(setting, future)
    hits = [server.serve(t, request) for t, request in enumerate(trace)]
    server.cache.check()
    return outcome(trace, hits, server.cache.statistics().regret_tokens)
