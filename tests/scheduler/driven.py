"""A core over real memory, driven by hand: a clock that we turn, tokens that we say, books read after each call."""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence as SequenceOf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvloom.allocator import KVMemory, MemoryStatistics, NullPrefixCache, PoolSpec, PrefixCache
from kvloom.scheduler import (
    Committed,
    Finished,
    FinishReason,
    ModelLimits,
    Plan,
    Rejected,
    Request,
    SamplingParams,
    SchedulerConfig,
    SchedulerCore,
    SchedulerStatistics,
    StepResult,
)
from kvloom.scheduler.request import Sequence

Speak = Callable[[str, int], int]  # what a request says as its output number n, from 0
Given = tuple[list[int], list[int], str]  # rows, fences, reason


def always_seven(request_id: str, number: int) -> int:
    return 7


def require_nothing_held(memory: KVMemory) -> None:
    """Every row is free, every page too or the cache's and used by nobody, and the books say so."""
    memory.check()
    statistics = memory.statistics()
    for pool in statistics.pools.values():
        assert (pool.held, pool.quarantined, pool.evictable) == (0, 0, pool.cached), statistics
        assert pool.free + pool.cached == pool.capacity, statistics
    assert (statistics.rows_held, statistics.rows_quarantined) == (0, 0)


class WatchedMemory(KVMemory):
    """Notes what it is told to give back, and may be told to fail."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.given_back: list[Given] = []
        self.settled: list[int] = []

    def release(self, rows: SequenceOf[int], fences: SequenceOf[int], reason: str = "finish") -> None:
        super().release(rows, fences, reason)
        self.given_back.append((list(rows), list(fences), reason))

    def settle(self, step: int) -> None:
        super().settle(step)
        self.settled.append(step)


class Driven:
    """The core's verbs, with ids where the core wants requests; `said` and `ends` are what callers heard.

    No prefix cache unless one is given: prompts that are numbers all begin alike, and would get each other's pages.
    """

    def __init__(
        self,
        *,
        pages: int = 64,
        page_size: int = 4,
        rows: int = 64,
        max_seq: int = 10_000,
        eos_ids: tuple[int, ...] = (),
        speak: Speak = always_seven,
        pools: SequenceOf[PoolSpec] = (PoolSpec(),),
        prefix_cache: PrefixCache | None = None,
        **config: Any,
    ) -> None:
        """As many `pages` in each pool."""
        self.memory = WatchedMemory(
            pools=pools,
            capacity_tokens={pool.name: pages * page_size for pool in pools},
            page_size=page_size,
            max_rows=rows,
            prefix_cache=prefix_cache or NullPrefixCache(),
        )
        self.config = SchedulerConfig(**{"max_running": min(rows, 32), **config})
        self.core = SchedulerCore(self.memory, self.config, ModelLimits(100, max_seq, eos_ids))
        self.speak = speak
        self.now = 0.0
        self.out: deque[Plan] = deque()
        self.said: defaultdict[str, list[int]] = defaultdict(list)
        self.ends: dict[str, Finished] = {}

    def add(
        self, request_id: str, prompt: int | SequenceOf[int], *, deadline: float | None = None, **params: Any
    ) -> Sequence:
        """A request; a number for `prompt` means that many tokens, counted up from 10."""
        tokens = [10 + i % 80 for i in range(prompt)] if isinstance(prompt, int) else list(prompt)
        return self.ask(
            Request(
                id=request_id,
                prompt=np.array(tokens, np.int32),
                params=SamplingParams(**params),
                deadline=deadline,
                seed=params.get("seed") or 0,
            )
        )

    def ask(self, request: Request) -> Sequence:
        try:
            return self.core.add(request, self.now, sink=request.id)
        except Rejected as error:
            self.core.refuse(error)
            raise
        finally:
            self.check()

    def plan(self) -> Plan | None:
        """A further step; each takes a second."""
        self.now += 1.0
        plan = self.core.plan(self.now)
        if plan is not None:
            self.out.append(plan)
        self.check()
        return plan

    def must_plan(self) -> Plan:
        plan = self.plan()
        assert plan is not None
        return plan

    def commit(
        self, tokens: SequenceOf[int] | None = None, row_errors: Mapping[int, Exception] | None = None
    ) -> Committed:
        """The oldest step comes back, with `tokens` or with what its requests say."""
        plan = self.out.popleft()
        said = self.tokens_of(plan) if tokens is None else np.array(tokens)
        return self.hear(self.core.commit(plan.step, StepResult(said, row_errors or {}), self.now))

    def abandon(self, error: Exception) -> Committed:
        return self.hear(self.core.abandon(self.out.popleft().step, error, self.now))

    def abort(self, request_id: str) -> Committed:
        return self.hear(self.core.abort(request_id, self.now))

    def expire(self) -> Committed:
        return self.hear(self.core.expire(self.now))

    def step(self) -> Plan:
        """Plan as far ahead as is allowed, and commit the oldest plan out; returns that one."""
        while len(self.out) < self.config.steps_in_flight_max and self.plan() is not None:
            continue
        oldest = self.out[0]
        self.commit()
        return oldest

    def run(self, most: int = 1000) -> list[Plan]:
        """Step until nothing is left to do."""
        plans = []
        while self.core.has_work:
            plans.append(self.step())
            assert len(plans) < most, "no end in sight"
        return plans

    def tokens_of(self, plan: Plan) -> NDArray[np.int64]:
        """A function of the request and the number of the token, so that being preempted changes nothing."""
        sampled = [(plan.sequences[row], int(plan.seq_lens[row])) for row in plan.sample_rows]
        return np.array([self.speak(one.request.id, length - len(one.request.prompt)) for one, length in sampled])

    def hear(self, committed: Committed) -> Committed:
        for sequence, token in zip(committed.sequences, committed.tokens, strict=True):
            assert sequence.sink not in self.ends, f"{sequence.sink}: a token after the end"
            self.said[sequence.sink].append(token)
        for sequence, finished in committed.finished:
            assert sequence.sink not in self.ends, f"{sequence.sink}: a second end"
            assert (finished.request_id, finished.usage.output_tokens) == (
                sequence.sink,
                len(self.said.get(sequence.sink, ())),
            )
            self.ends[sequence.sink] = finished
        self.check()
        return committed

    def check(self) -> None:
        """Conservation of requests and of pages, after every call."""
        now = self.core.statistics()
        in_flight = now.waiting + now.preempted + now.prefilling + now.decoding
        assert now.received == sum(now.rejected.values()) + sum(now.finished.values()) + in_flight
        assert in_flight == len(self.core.live)
        self.memory.check()

    def picture(self) -> tuple[SchedulerStatistics, MemoryStatistics, list[int]]:
        """All that a call which changes nothing must leave as it is."""
        return self.core.statistics(), self.memory.statistics(), [plan.step for plan in self.out]

    def reasons(self) -> dict[str, FinishReason]:
        return {request_id: finished.reason for request_id, finished in self.ends.items()}

    def finish(self) -> None:
        """End what is still live; then everything is back."""
        self.hear(self.core.end_all(FinishReason.SHUTDOWN, self.now))
        while self.out:
            self.abandon(RuntimeError("the test is over"))
        assert not self.core.has_work
        require_nothing_held(self.memory)


def ids(plan: Plan | None) -> list[str]:
    """Who is in a plan, in its order."""
    return [] if plan is None else plan.request_ids


def sizes(plan: Plan | None) -> dict[str, int]:
    """How many tokens of whom."""
    return {} if plan is None else dict(zip(plan.request_ids, plan.q_lens.tolist(), strict=True))
