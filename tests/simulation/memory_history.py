"""One random history of KVMemory alone, without a scheduler to be careful for it: all verbs, in any legal order.

Rows come from matches, from forks and from the host; they grow by chunks of any length, several steps are out at once,
some of them fail; rows are published, trimmed, given back or offloaded whenever no step names them (and given back also
when one does).  The shadow-KV runner looks at each slot that a row reads.
"""

import random
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvloom.allocator import KVMemory, PoolSpec, Shortfall
from kvloom.allocator.memory_pool import least_window_pages
from kvloom.allocator.prefix import NullPrefixCache, RadixPrefixCache
from kvloom.scheduler.runners.shadow import ShadowRunner

MAX_SEQ = 64
POLICIES = ("lru", "lfu", "fifo", "priority")
IntArray = NDArray[np.int32]


def ints(values: list[int]) -> IntArray:
    return np.array(values, np.int32)


@dataclass(eq=False)
class Tale:
    """A request in a row: what it will have said by its end is made up before it begins."""

    id: str
    tokens: list[int]
    namespace: str
    row: int = -1
    scheduled: int = 0
    settled: int = 0
    last_step: int = -1
    kept: Any = None


@dataclass
class Step:
    """A plan, as far as memory reads it."""

    step: int
    rows: IntArray
    prefix_lens: IntArray
    q_lens: IntArray
    decode_rows: int
    token_ids: IntArray
    tales: list[Tale]
    sample_rows: IntArray = field(default_factory=lambda: ints([]))
    token_src: None = None
    sampling: None = None
    failed: bool = False

    @property
    def seq_lens(self) -> IntArray:
        return self.prefix_lens + self.q_lens

    @property
    def request_ids(self) -> list[str]:
        return [tale.id for tale in self.tales]


class MemoryHistory:
    """A seed is a history; `run` replays it and raises where a rule breaks."""

    def __init__(self, seed: int, pools: tuple[PoolSpec, ...]) -> None:
        self.random = draw = random.Random(seed)
        self.runner = ShadowRunner(max_seq=MAX_SEQ, pools=pools)
        page_size = draw.choice([1, 2, 4, 16])
        least = max(least_window_pages(spec.window, page_size) for spec in pools)
        cacheless, windowed = draw.random() < 0.15, any(spec.window is not None for spec in pools)
        self.memory = KVMemory.for_runner(
            self.runner,
            capacity_tokens={spec.name: page_size * max(least, draw.randint(4, 60)) for spec in pools},
            page_size=page_size,
            max_rows=draw.choice([3, 8]),
            prefix_cache=NullPrefixCache()
            if cacheless
            else RadixPrefixCache(draw.choice(POLICIES), ttl=draw.choice([None, 4.0])),
            host_bytes=draw.choice([0, 900, 100_000]),
            host_prefix_bytes=0 if cacheless or windowed else draw.choice([0, 900, 100_000]),
            watermarks=draw.choice([(0.0, 0.0), (0.2, 0.5)]),
        )
        self.runner.attach(self.memory.pools)
        self.fault_rate = draw.choice([0.0, 0.1])
        self.running: list[Tale] = []
        self.away: list[Tale] = []
        self.told: list[Tale] = []
        self.out: deque[Step] = deque()
        self.steps, self.now = count(), 0.0
        self.forks = self.restored = self.hits = self.loaded = 0

    def run(self, moves: int = 120) -> None:
        verbs = {
            self.arrive: 4, self.launch: 8, self.settle: 8, self.leave: 1, self.fork: 1, self.go_away: 1,
            self.come_back: 2, self.upkeep: 2,
        }  # fmt: skip
        for _ in range(moves):
            self.random.choices(list(verbs), list(verbs.values()))[0]()
            self.memory.check()
        while self.out:
            self.settle()
        for tale in [*self.running]:
            self.release(tale)
        for tale in self.away:
            self.memory.forget(tale.kept)
        self.memory.reset_prefix_cache()
        self.memory.check()
        statistics = self.memory.statistics()
        assert (statistics.rows_held, statistics.rows_quarantined) == (0, 0)
        assert (statistics.host.used, statistics.host.prefix_used) == (0, 0)
        for pool in statistics.pools.values():
            assert pool.free == pool.capacity

    def arrive(self) -> None:
        tokens = [self.random.randrange(97) for _ in range(self.random.randint(2, 40))]
        namespace = self.random.choice(["", "tenant"])
        if self.told and self.random.random() < 0.7:
            other = self.random.choice(self.told)
            tokens = other.tokens[: self.random.randint(1, len(other.tokens))] + tokens
            namespace = self.random.choice([namespace, other.namespace, other.namespace])
        tale = Tale(f"r{len(self.told)}", tokens[:MAX_SEQ], namespace)
        if len(tale.tokens) > self.memory.max_seq:
            return
        self.tell(tale)
        match = self.memory.match(ints(tale.tokens), tale.namespace)
        if self.enter(tale, self.memory.admit(match, len(tale.tokens)), match.tokens + match.host_tokens):
            self.hits += match.tokens
            self.loaded += match.host_tokens

    def tell(self, tale: Tale) -> None:
        self.told.append(tale)
        self.runner.tell(tale.id, tale.tokens, tale.namespace)

    def enter(self, tale: Tale, row: int | None, known: int) -> bool:
        if row is not None:
            tale.row, tale.scheduled, tale.settled, tale.last_step = row, known, known, -1
            self.running.append(tale)
        return row is not None

    def idle(self) -> list[Tale]:
        """Tales that no step out names."""
        named = {tale for step in self.out for tale in step.tales}
        return [tale for tale in self.running if tale not in named]

    def launch(self) -> None:
        """Some rows go on by a token or a chunk, as far as there are pages; the runner does its work at once."""
        ready = [tale for tale in self.idle() if tale.scheduled < len(tale.tokens)]
        chosen = self.random.sample(ready, min(len(ready), self.random.randint(1, 4)))
        ends = {tale: self.random.choice([1, 1, 3, 30]) + tale.scheduled for tale in chosen}
        ends = {tale: min(end, len(tale.tokens)) for tale, end in ends.items()}
        while chosen:
            rows = ints([tale.row for tale in chosen])
            short = self.memory.reserve(rows, ints([ends[tale] for tale in chosen]))
            if short is None:
                break
            assert short.fits < len(chosen)
            hungry = chosen[short.fits]
            chosen = chosen[: short.fits]
            if short.upto > hungry.scheduled:
                assert short.upto < ends[hungry]
                ends[hungry] = short.upto
                chosen.append(hungry)
        if chosen:
            self.forward(sorted(chosen, key=lambda tale: ends[tale] - tale.scheduled > 1), ends)

    def forward(self, chosen: list[Tale], ends: dict[Tale, int]) -> None:
        step = Step(
            step=next(self.steps),
            rows=ints([tale.row for tale in chosen]),
            prefix_lens=ints([tale.scheduled for tale in chosen]),
            q_lens=ints([ends[tale] - tale.scheduled for tale in chosen]),
            decode_rows=sum(ends[tale] - tale.scheduled == 1 for tale in chosen),
            token_ids=ints([token for tale in chosen for token in tale.tokens[tale.scheduled : ends[tale]]]),
            tales=chosen,
            failed=self.random.random() < self.fault_rate,
        )
        batch = self.memory.bind(step)
        if step.failed:
            self.runner.give_up(step.request_ids)
        else:
            self.runner.forward(batch)
        for tale in chosen:
            tale.scheduled, tale.last_step = ends[tale], step.step
        self.out.append(step)

    def settle(self) -> None:
        """The oldest step is over; who is still here may publish, and drops what its window has left behind."""
        if not self.out or (len(self.out) < 3 and self.random.random() < 0.3):
            return
        step = self.out.popleft()
        self.memory.settle(step.step)
        ends = zip(step.tales, step.seq_lens.tolist(), strict=True)
        alive = [(tale, end) for tale, end in ends if tale in self.running]
        for tale, end in alive:
            tale.settled = end
            if step.failed:
                self.release(tale)
        if step.failed or not alive:
            return
        rows, lengths = ints([tale.row for tale, _ in alive]), ints([end for _, end in alive])
        if self.random.random() < 0.5:
            self.memory.publish(rows, lengths, self.tokens_of)
        if self.random.random() < 0.8:
            self.memory.trim(rows, lengths, self.tokens_of)

    def tokens_of(self, row: int, start: int, stop: int) -> IntArray:
        (tale,) = [tale for tale in self.running if tale.row == row]
        return ints(tale.tokens[start:stop])

    def leave(self) -> None:
        """In the middle of a step, perhaps."""
        if self.running:
            self.release(self.random.choice(self.running))

    def release(self, tale: Tale) -> None:
        self.memory.release([tale.row], [tale.last_step], "finish")
        self.running.remove(tale)

    def fork(self) -> None:
        """Others go on from where one is, with other tokens."""
        idle = self.idle()
        if not idle:
            return
        tale = self.random.choice(idle)
        rows = self.memory.fork(tale.row, self.random.randint(1, 2), tale.settled)
        if isinstance(rows, Shortfall):
            return
        self.forks += 1
        for row in rows.tolist():
            rest = [self.random.randrange(97) for _ in tale.tokens[tale.settled :]]
            child = Tale(f"r{len(self.told)}", tale.tokens[: tale.settled] + rest, tale.namespace)
            self.tell(child)
            self.enter(child, row, tale.settled)

    def go_away(self) -> None:
        """To the host, or not when there is no room."""
        idle = [tale for tale in self.idle() if tale.settled]
        if not idle:
            return
        tale = self.random.choice(idle)
        tale.kept = self.memory.offload(tale.row, tale.settled)
        if tale.kept is not None:
            self.release(tale)
            self.away.append(tale)

    def come_back(self) -> None:
        if self.away:
            tale = self.away[0]
            if self.enter(tale, self.memory.restore(tale.kept, len(tale.tokens)), tale.settled):
                self.away.pop(0)
                self.restored += 1

    def upkeep(self) -> None:
        self.now += self.random.random() * 10
        self.memory.tick(self.now)
        if self.random.random() < 0.1:
            self.memory.reset_prefix_cache()
