"""One random history through the core, the real memory and the shadow-KV runner, on a virtual clock.

Arrivals, aborts at any point of a step, runner faults, tiny pools, one or two steps in flight.  After every single move
the books must balance (rules R1 to R6): no page in two states, no step in flight that names a free page, one final
event per request, tokens exactly as in a run alone.
"""

import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch

from kvloom.allocator import KVMemory, NullPrefixCache, PoolSpec
from kvloom.allocator.memory_pool import least_window_pages
from kvloom.allocator.pages import CACHED, QUARANTINED
from kvloom.scheduler import Finished, FinishReason, Request, SamplingParams, SchedulerConfig, SchedulerCore, StepResult
from kvloom.scheduler.config import ModelLimits
from kvloom.scheduler.errors import Rejected, RunnerFailed
from kvloom.scheduler.plan import Committed, Plan
from kvloom.scheduler.runners.shadow import SHADOW_POOL, ShadowRunner, continuation

EOS = 5
MAX_SEQ = 64


@dataclass
class Heard:
    """What one request's caller got."""

    prompt: list[int]
    namespace: str
    tokens: list[int] = field(default_factory=list)
    finals: list[Finished] = field(default_factory=list)


class History:
    """A seed is a history; `run` replays it and raises AssertionError where a rule breaks."""

    def __init__(
        self, seed: int, depth: int, pools: tuple[PoolSpec, ...] = (SHADOW_POOL,), host_bytes: int = 0
    ) -> None:
        self.random = random.Random(seed)
        draw = self.random
        page_size = draw.choice([1, 2, 4, 16])
        least = max(least_window_pages(spec.window, page_size) for spec in pools)
        capacity = max(page_size * least, draw.choice([16, 32, 48, 64, 400]))
        budget = draw.choice([8, 16, 64])
        self.pools = pools
        self.runner = ShadowRunner(max_seq=MAX_SEQ, eos_ids=(EOS,), pools=pools)
        cacheless = draw.random() < 0.2
        windowed = any(spec.window is not None for spec in pools)
        host_prefix_bytes = 0 if cacheless or windowed else draw.choice([0, 400, 2**20])
        self.memory = KVMemory.for_runner(
            self.runner,
            capacity_tokens=capacity,
            page_size=page_size,
            max_rows=draw.choice([8, 12]),
            host_bytes=host_bytes,
            host_prefix_bytes=host_prefix_bytes,
            prefix_cache=NullPrefixCache() if cacheless else None,
        )
        self.runner.attach(self.memory.pools)
        config = SchedulerConfig(
            max_running=draw.randint(1, 8),
            max_batch_tokens=budget,
            prefill_chunk=draw.randint(1, budget),
            max_waiting=draw.choice([2, 50]),
            steps_in_flight_max=depth,
        )
        self.core = SchedulerCore(self.memory, config, ModelLimits(97, MAX_SEQ, (EOS,)))
        self.newest = np.zeros(self.memory.max_rows + 1, np.int32)
        self.out: deque[tuple[Plan, StepResult | Exception]] = deque()
        self.heard: dict[str, Heard] = {}
        self.now = 0.0
        self.fault_rate = draw.choice([0.0, 0.0, 0.05, 0.3])
        self.row_fault_rate = draw.choice([0.0, 0.0, 0.1])

    def run(self, moves: int = 150) -> None:
        """Random moves, then to the end; at the end all pages and rows are back."""
        for _ in range(moves):
            self.now += self.random.random()
            move = self.random.choices([self.arrive, self.abort, self.launch, self.settle], [3, 1, 6, 6])[0]
            move()
            self.check()
        for _ in range(20_000):
            if not self.core.has_work:
                break
            self.now += 0.1
            self.launch()
            self.check()
            self.settle()
            self.check()
        assert not self.core.has_work, "requests left without progress"
        statistics = self.memory.statistics()
        assert (statistics.rows_held, statistics.rows_quarantined) == (0, 0)
        for pool in statistics.pools.values():
            assert (pool.held, pool.quarantined, pool.evictable) == (0, 0, pool.cached)
        assert all(len(heard.finals) == 1 for heard in self.heard.values())

    def arrive(self) -> None:
        """A request with random wishes; some are refused at the door."""
        prompt = [self.random.randrange(97) for _ in range(self.random.randint(1, self.random.choice([6, 12, 40])))]
        if self.heard and self.random.random() < 0.6:  # goes on from what another has asked, or heard
            other = self.random.choice(list(self.heard.values()))
            said = other.prompt + other.tokens
            prompt = (said[: self.random.randint(1, len(said))] + prompt)[: MAX_SEQ - 1]
        request_id = f"r{len(self.heard)}"
        params = SamplingParams(
            max_new_tokens=self.random.choice([1, 3, 20, 40, None]), min_new_tokens=self.random.choice([0, 0, 1])
        )
        deadline = self.now + self.random.random() * 60 if self.random.random() < 0.1 else None
        namespace = self.random.choice(["", "", "tenant"])
        request = Request(
            id=request_id, prompt=np.array(prompt, np.int32), params=params, deadline=deadline,
            cache_namespace=namespace,
        )  # fmt: skip
        heard = Heard(prompt, namespace)
        try:
            self.core.add(request, self.now, heard)
        except Rejected as error:
            self.core.refuse(error)
            return
        self.heard[request_id] = heard
        self.runner.tell(request_id, prompt, namespace)

    def abort(self) -> None:
        """Somebody leaves, perhaps in the middle of a step; or nobody of that name is here."""
        if self.heard:
            self.hear(self.core.abort(self.random.choice(list(self.heard)), self.now))
        self.hear(self.core.expire(self.now))

    def launch(self) -> None:
        """Plan, bind, and let the runner do its work at once; its result is settled later."""
        plan = self.core.plan(self.now)
        if plan is None:
            return
        batch = self.memory.bind(plan)
        if plan.token_src is not None:
            flying = plan.token_src >= 0
            ids = plan.token_ids.copy()
            ids[flying] = self.newest[plan.token_src[flying]]
            batch.replace_token_ids(torch.from_numpy(ids))
        if self.random.random() < self.fault_rate:
            # A step that failed has written nothing: what it was to write must not be read by anybody.
            self.runner.give_up(plan.request_ids)
            self.out.append((plan, RunnerFailed("injected")))
            return
        tokens = self.runner.forward(batch).next_tokens
        assert tokens is not None
        self.newest[plan.rows[plan.sample_rows]] = tokens.numpy()
        errors = {
            i: RunnerFailed("injected row")
            for i in range(len(plan.sample_rows))
            if self.random.random() < self.row_fault_rate
        }
        self.out.append((plan, StepResult(tokens.numpy(), errors)))

    def settle(self) -> None:
        """The oldest step's result arrives."""
        if not self.out:
            return
        plan, outcome = self.out.popleft()
        if isinstance(outcome, Exception):
            self.hear(self.core.abandon(plan.step, outcome, self.now))
        else:
            self.hear(self.core.commit(plan.step, outcome, self.now))

    def hear(self, committed: Committed) -> None:
        """Tokens and final events reach their requests: none after the end, none that a run alone would not say."""
        for sequence, token in zip(committed.sequences, committed.tokens, strict=True):
            assert not sequence.sink.finals, f"{sequence.request.id}: a token after the end"
            sequence.sink.tokens.append(token)
        for sequence, finished in committed.finished:
            heard = sequence.sink
            heard.finals.append(finished)
            expected = continuation(heard.prompt, len(heard.tokens), identity=heard.namespace)
            assert heard.tokens == expected, finished
            assert finished.usage.output_tokens == len(heard.tokens)
            if finished.reason is FinishReason.STOP:
                assert heard.tokens[-1] == EOS

    def check(self) -> None:
        """Conservation of pages and requests, and R6: what a step in flight names is held or quarantined."""
        self.memory.check()
        for name, table in self.memory.tables.items():
            ledger = self.memory.allocators[name].ledger
            window = next(spec.window for spec in self.pools if spec.name == name)
            for plan, _ in self.out:
                for row, prefix in zip(plan.rows.tolist(), plan.prefix_lens.tolist(), strict=True):
                    first = 0 if window is None else max(prefix + 1 - window, 0) // self.memory.page_size
                    pages = table.pages[row, first : table.page_counts[row]]
                    holders = ledger.holders_of(pages)
                    assert np.all((holders == row) | (holders == QUARANTINED) | (holders == CACHED)), (plan.step, row)
        now = self.core.statistics()
        live = now.waiting + now.preempted + now.prefilling + now.decoding
        assert now.received == sum(now.rejected.values()) + sum(now.finished.values()) + live
        assert live == len(self.core.live)
