"""Cases of windows and of the prefix cache (kinds 2 and 4) through the whole loop: core, memory, shadow-KV runner.

The runner looks at every slot that a row reads, so that a wrong hit, or a page that went too early, raises there.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from kvloom.allocator import InvalidArgument, KeptPrefixCache, KVMemory, NullPrefixCache, RadixPrefixCache
from kvloom.scheduler import FinishReason, Request, SamplingParams, SchedulerConfig, SchedulerCore, StepResult
from kvloom.scheduler.config import ModelLimits
from kvloom.scheduler.errors import RunnerFailed
from kvloom.scheduler.plan import Committed, Plan
from kvloom.scheduler.request import Finished
from kvloom.scheduler.runners.shadow import SHADOW_POOL, ShadowRunner, continuation

PAGE = 4


class House:
    """A core that runs one step after the other; `ended` by request id."""

    def __init__(
        self,
        pages: dict[str, int],
        window: int = 0,
        page_size: int = PAGE,
        prefix_cache: KeptPrefixCache | None = None,
        **config: int,
    ) -> None:
        swa = replace(SHADOW_POOL, name="swa", layers=(1,), window=window or None)
        self.runner = ShadowRunner(pools=(SHADOW_POOL, swa) if window else (SHADOW_POOL,))
        tokens = {name: number * page_size for name, number in pages.items()}
        self.memory = KVMemory.for_runner(
            self.runner, capacity_tokens=tokens, page_size=page_size, max_rows=16, prefix_cache=prefix_cache
        )
        self.runner.attach(self.memory.pools)
        settings = SchedulerConfig(**{"max_running": 8, "max_batch_tokens": 64, "prefill_chunk": 64, **config})
        self.core = SchedulerCore(self.memory, settings, ModelLimits(97, 1000))
        self.ended: dict[str, Finished] = {}
        self.said: dict[str, list[int]] = {}
        self.names = (f"r{number}" for number in count())

    def add(self, prompt: Sequence[int], new_tokens: int) -> str:
        name = next(self.names)
        self.runner.tell(name, prompt)
        params = SamplingParams(max_new_tokens=new_tokens)
        self.core.add(Request(id=name, prompt=np.array(prompt, np.int32), params=params), 0.0)
        return name

    def step(self, fails: bool = False) -> Plan | None:
        plan = self.core.plan(0.0)
        if plan is None:
            return None
        batch = self.memory.bind(plan)
        if fails:
            self.hear(self.core.abandon(plan.step, RunnerFailed("injected"), 0.0))
        else:
            tokens = self.runner.forward(batch).next_tokens
            assert tokens is not None
            self.hear(self.core.commit(plan.step, StepResult(tokens.numpy()), 0.0))
        self.memory.check()
        return plan

    def hear(self, committed: Committed) -> None:
        for sequence, token in zip(committed.sequences, committed.tokens, strict=True):
            self.said.setdefault(sequence.request.id, []).append(token)
        self.ended |= {finished.request_id: finished for _, finished in committed.finished}

    def run(self, prompt: Sequence[int], new_tokens: int) -> Finished:
        """One request to its end, alone or beside others; it must say what it says alone."""
        name = self.add(prompt, new_tokens)
        self.run_until(name)
        assert self.said[name] == continuation(prompt, new_tokens)
        return self.ended[name]

    def run_until(self, *names: str) -> None:
        for _ in range(500):
            if all(name in self.ended for name in names):
                return
            self.step()
        raise AssertionError(f"no end of {names}: {self.memory}")

    def held_window(self, row: int) -> range:
        """Positions of a row that have window KV."""
        table = self.memory.tables["swa"]
        size = self.memory.page_size
        return range(int(table.first[row]) * size, min(int(table.page_counts[row]) * size, int(table.lengths[row])))

    def free(self, pool: str) -> int:
        return self.memory.statistics().pools[pool].free


def talk(start: int, length: int) -> list[int]:
    return [(start * 31 + 7 * i) % 97 for i in range(length)]


def test_b16_a_window_stays_through_chunks_and_is_only_reused_whole() -> None:
    house = House({"full": 40, "swa": 12}, window=6, page_size=2, max_batch_tokens=8, prefill_chunk=4)
    prompt = talk(1, 16)
    house.add(prompt, 4)
    held, second = range(0), ""  # before each chunk
    for chunk, needed in enumerate((range(0), range(4), range(3, 8), range(7, 12))):
        assert set(needed) <= set(held)
        plan = house.step()
        assert plan is not None
        assert (plan.prefix_lens[0], plan.q_lens[0]) == (4 * chunk, 4)
        held = house.held_window(int(plan.rows[0]))
        if chunk == 2:
            assert set(range(6)).isdisjoint(held), "what no later token reads is given back"
            second = house.add([*prompt[:8], *talk(2, 6)], 3)
    house.run_until("r0", second)
    # 8 only if positions 3 to 7 were really kept: the runner would have raised.
    assert house.ended[second].usage.cached_tokens in (0, 8)
    for name, start in (("r0", prompt), (second, [*prompt[:8], *talk(2, 6)])):
        assert house.said[name] == continuation(start, len(house.said[name]))


def test_b17_three_prompts_on_four_window_pages() -> None:
    house = House({"full": 16, "swa": 4}, window=8)
    names = [house.add(talk(i, 12), 4) for i in range(3)]
    house.run_until(*names)
    assert [house.ended[name].reason for name in names] == [FinishReason.LENGTH] * 3
    assert [house.said[name] for name in names] == [continuation(talk(i, 12), 4) for i in range(3)]


def test_b17_a_window_pool_full_of_cached_pages_gives_them_up() -> None:
    house = House({"full": 32, "swa": 6}, window=8)
    for i in range(4):
        house.run(talk(i, 12), 1)
    assert house.free("swa") < 2
    assert house.free("full") >= 16, "half empty"
    name = house.add(talk(9, 8), 2)
    plan = house.step()
    assert plan is not None
    assert plan.request_ids == [name], "it starts at once"
    house.run_until(name)
    evicted = house.memory.statistics().prefix.evicted
    assert evicted["swa", "capacity"] > 0
    assert ("full", "capacity") not in evicted, "asked for by name"


def test_b17_a_window_pool_below_a_window_and_a_page_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"pool 'swa': 3 pages of 4; a row needs 4"):
        House({"full": 16, "swa": 3}, window=8)


def test_b18_a_parked_conversation_survives_in_its_tail_window() -> None:
    house = House({"full": 100, "swa": 12}, window=8, prefill_chunk=16)
    parked = talk(1, 40)
    house.run(parked, 1)
    for i in range(2, 5):  # each leaves pages outside of its tail window
        house.run(talk(i, 24), 1)
    assert house.memory.statistics().prefix.evicted["swa", "capacity"] > 0
    assert house.run([*parked, *talk(50, 10)], 3).usage.cached_tokens == 40


def test_b18_a_tail_that_went_strands_nothing() -> None:
    house = House({"full": 40, "swa": 6}, window=8)
    parked = talk(1, 40)
    house.run(parked, 1)
    for i in range(2, 8):
        house.run(talk(i, 12), 1)
    assert house.run([*parked, *talk(50, 10)], 3).usage.cached_tokens == 0
    house.run(talk(9, 150), 2)  # takes all full pages but two: the parked ones must have gone
    assert house.memory.statistics().prefix.evicted["full", "capacity"] > 0


@pytest.mark.parametrize(("page_size", "cached"), [(4, 4), (1, 7)])
def test_b34_the_same_prompt_twice_leaves_something_to_compute(page_size: int, cached: int) -> None:
    house = House({"full": 64}, page_size=page_size)
    prompt = talk(1, 8)
    reader = house.add([*prompt, 5, 6], 30)  # reads the same pages all the while
    house.step()
    assert house.run(prompt, 6).usage.cached_tokens == cached
    assert house.run(prompt, 6).usage.cached_tokens == cached
    house.run_until(reader)
    assert house.said[reader] == continuation([*prompt, 5, 6], 30)


def test_b39_who_waits_does_not_evict_its_own_match() -> None:
    house = House({"full": 6}, max_running=4)
    cached = talk(1, 12)
    house.run(cached, 1)
    running = house.add(talk(2, 8), 5)  # 3 pages at its end, and one to spare while it runs
    house.step()
    waiting = house.add([*cached, 1, 2, 3, 4], 2)
    for _ in range(3):
        house.step()
        assert house.memory.statistics().pools["full"].evictable == 3, "12 tokens again after each failed attempt"
        assert waiting not in house.said
    house.run_until(running, waiting)
    assert house.ended[waiting].usage.cached_tokens == 12
    assert house.said[waiting] == continuation([*cached, 1, 2, 3, 4], 2)


def test_b39_a_failed_prefill_leaves_no_lock_behind() -> None:
    house = House({"full": 6})
    cached = talk(1, 12)
    house.run(cached, 1)
    name = house.add([*cached, 1, 2, 3, 4], 2)
    house.step(fails=True)
    assert house.ended[name].reason is FinishReason.ERROR
    pool = house.memory.statistics().pools["full"]
    assert (pool.free + pool.evictable) * PAGE == 24
    assert house.run([*cached, 1, 2, 3, 4], 2).usage.cached_tokens == 12


def test_what_a_failed_request_has_published_goes() -> None:
    """Its KV may be wrong from some chunk on; what it had found is others', and stays."""
    house = House({"full": 32, "swa": 16}, window=8, prefill_chunk=8)
    known = talk(1, 12)
    house.run(known, 1)
    failing = [*known, *talk(3, 20)]
    name = house.add(failing, 4)
    house.step()
    house.step()  # in a memory with windows, a chunk is published as soon as it is settled
    house.step(fails=True)
    assert house.ended[name].reason is FinishReason.ERROR
    assert house.run(failing, 4).usage.cached_tokens == 12


def test_pins_cannot_take_what_a_row_needs_of_a_window_pool() -> None:
    cache = RadixPrefixCache(pin_budget_pages=10)
    with pytest.raises(InvalidArgument, match="a row needs"):
        House({"full": 100, "swa": 13}, window=8, prefix_cache=cache)
    cache = RadixPrefixCache(pin_budget_pages=10)
    house = House({"full": 100, "swa": 14}, window=8, prefix_cache=cache)
    pinned = 0
    for i in range(8):
        prompt = talk(i, 9)
        house.run(prompt, 1)
        pinned += cache.pin(house.memory.match(prompt), 1e6)
    assert 0 < pinned < 8


@pytest.mark.parametrize("prefix_cache", [NullPrefixCache, RadixPrefixCache])
def test_b22_in_a_window_pool_nobody_is_thrown_out_for_ever(prefix_cache: Callable[[], KeptPrefixCache]) -> None:
    """Two steps in flight: the pages of a step are taken before those of the one before have come back."""
    window = replace(SHADOW_POOL, name="swa", window=1)
    memory = KVMemory((window,), capacity_tokens=6, page_size=1, max_rows=8, max_seq=400, prefix_cache=prefix_cache())
    settings = SchedulerConfig(max_running=4, max_batch_tokens=64, prefill_chunk=64, steps_in_flight_max=2)
    core = SchedulerCore(memory, settings, ModelLimits(97, 400))
    for i in range(3):
        prompt = np.array(talk(i, 8), np.int32)
        core.add(Request(id=str(i), prompt=prompt, params=SamplingParams(max_new_tokens=60)), 0.0)
    out: deque[Plan] = deque()
    finished: list[tuple[object, Finished]] = []
    for _ in range(2_000):
        if (plan := core.plan(0.0)) is not None:
            memory.bind(plan)
            out.append(plan)
        if out and (plan is None or len(out) == 2):
            done = out.popleft()
            tokens = np.full(len(done.sample_rows), 5)
            finished += core.commit(done.step, StepResult(tokens), 0.0).finished
        if not core.has_work:
            break
    assert len(finished) == 3
    assert max(one.usage.preemptions for _, one in finished) <= 3


def test_tokens_by_source_add_up_when_prompts_are_preempted_half_way() -> None:
    house = House({"full": 33}, max_batch_tokens=4, prefill_chunk=2, max_running=4)
    names = [house.add(talk(1, 64), 2), house.add(talk(1, 64), 2), house.add([*talk(1, 32), *talk(2, 20)], 20)]
    house.run_until(*names)
    now = house.core.statistics()
    assert now.prompt_tokens_computed + now.prompt_tokens_cached == 64 + 64 + 52


def test_b34_a_row_never_writes_into_pages_that_it_only_reuses() -> None:
    house = House({"full": 64})
    house.run(talk(1, 12), 1)
    house.add([*talk(1, 12), 3, 4], 2)
    plan = house.core.plan(0.0)
    assert plan is not None
    with pytest.raises(InvalidArgument, match="only reuse"):
        house.memory.bind(plan._replace(prefix_lens=plan.prefix_lens - 4, q_lens=plan.q_lens + 4))
