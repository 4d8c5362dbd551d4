"""Failures that others have had, as far as they concern the engine: sizes, ids, aborts, lengths (cases.md, by id)."""

import asyncio
from collections.abc import Callable, Sequence

import anyio
import pytest
import torch

from kvloom.allocator import NullPrefixCache
from kvloom.scheduler import (
    DuplicateRequest,
    Engine,
    FinishReason,
    InvalidConfig,
    InvalidRequest,
    NeverFits,
    SamplingParams,
    TooLong,
)
from kvloom.scheduler.runners import StepOutput, ToyRunner
from tests.scheduler.driven import Driven, sizes
from tests.scheduler.engines import Act, Gate, ScriptedRunner, final_of, read, until

Drive = Callable[..., Driven]
EngineOf = Callable[..., Engine]
EOS = 5
both_depths = pytest.mark.parametrize("depth", [1, 2])


def params(count: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=count)


async def together(engine: Engine, wishes: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[FinishReason]:
    """Why each of them ended."""
    results = await asyncio.gather(*(engine.generate(prompt, params) for prompt, params in wishes))
    return [result.reason for result in results]


# ---- B19: a request larger than the pool blocks the queue for ever ----


@both_depths
async def test_b19_what_never_fits_fails_at_once_and_holds_up_nobody(engine_of: EngineOf, depth: int) -> None:
    async with engine_of(ToyRunner(max_seq=1000), pages=16, page_size=4, steps_in_flight_max=depth) as engine:
        with pytest.raises(NeverFits, match="100 tokens; the KV memory holds sequences of up to 64") as caught:
            await engine.generate([1] * 100, params(1))
        assert caught.value.status_hint == 400
        assert (await engine.generate([1] * 8, params(4))).usage.output_tokens == 4
    assert dict(engine.statistics().scheduler.rejected) == {"never_fits": 1}


@both_depths
async def test_b19_what_fills_the_pool_ends_by_length(engine_of: EngineOf, depth: int) -> None:
    async with engine_of(ToyRunner(max_seq=1000), pages=16, page_size=4, steps_in_flight_max=depth) as engine:
        with anyio.fail_after(10):
            big, small = await asyncio.gather(
                engine.generate([1] * 60, params(100)), engine.generate([1] * 8, params(4))
            )  # fmt: skip
    assert (big.reason, big.usage.output_tokens) == (FinishReason.LENGTH, 64 - 60 + 1)
    assert small.usage.output_tokens == 4


@both_depths
async def test_b19_fewer_pages_than_sequences(engine_of: EngineOf, depth: int) -> None:
    async with engine_of(pages=17, page_size=4, max_running=32, steps_in_flight_max=depth) as engine:
        with anyio.fail_after(20):
            reasons = await together(engine, [([1] * (1 + i % 10), params(1 + i % 7)) for i in range(40)])
    assert reasons == [FinishReason.LENGTH] * 40


# ---- B20: a KV-heavy request at the head holds up small ones behind it ----


@pytest.mark.parametrize("depth", [1, 2])
def test_b20_strictly_first_come_and_the_big_one_starts_when_there_is_room(drive: Drive, depth: int) -> None:
    """The documented order is strict: the small ones wait, and however many keep coming, none delays the big one."""
    driven = drive(pages=16, page_size=4, steps_in_flight_max=depth)
    driven.add("R1", 36, max_new_tokens=20)
    driven.step()
    driven.add("Big", 40, max_new_tokens=4)
    order, small = ["R1"], 0
    while "Big" not in driven.ends:
        driven.add(f"Small{small}", 4, max_new_tokens=2)
        small += 1
        order += [name for name in driven.step().request_ids if name not in order]
        assert small < 60
        if "R1" in driven.ends:
            assert "Big" in order or driven.ends["R1"].timings.finished_at >= driven.now - depth
    assert order[:2] == ["R1", "Big"]
    assert driven.ends["Big"].timings.admitted_at is not None
    assert driven.ends["Big"].timings.admitted_at - driven.ends["R1"].timings.finished_at <= depth
    driven.run()
    assert len(driven.ends) == small + 2


# ---- B26: two live requests with one id; n > 1 by halves ----


async def test_b26_the_second_of_one_id_is_refused_and_the_first_is_untouched(engine_of: EngineOf) -> None:
    async with engine_of() as engine:
        async with engine.open([1], params(30), request_id="x") as first:
            for wait in (True, False):
                with pytest.raises(DuplicateRequest) as caught:
                    await engine.generate([2], params(3), request_id="x", wait=wait)
                assert caught.value.status_hint == 409
            tokens = await read(first)
        assert tokens == (await engine.generate([1], params(30))).token_ids
        now = engine.statistics().scheduler
    assert (now.received, dict(now.rejected), dict(now.finished)) == (4, {"invalid": 2}, {"length": 2})
    assert all(count >= 0 for count in (now.waiting, now.preempted, now.prefilling, now.decoding))


async def test_b26_both_at_once(engine_of: EngineOf) -> None:
    async with engine_of() as engine:
        ends = await asyncio.gather(
            *(engine.generate([1], params(5), request_id="x") for _ in range(2)), return_exceptions=True
        )
    assert sorted(type(end).__name__ for end in ends) == ["DuplicateRequest", "Result"]


async def test_b26_two_that_wait_for_a_place_get_ids_of_their_own(engine_of: EngineOf) -> None:
    async with engine_of(max_running=1, max_waiting=1) as engine:
        assert await together(engine, [([1], params(3))] * 6) == [FinishReason.LENGTH] * 6
    assert not engine.statistics().scheduler.rejected


async def test_b26_several_answers_to_one_request_are_refused_as_a_whole() -> None:
    with pytest.raises(InvalidRequest, match="n: 3: only 1 completion") as caught:
        SamplingParams(n=3)
    assert caught.value.status_hint == 400


# ---- B27: an abort that arrives during the last step is lost ----


@pytest.mark.parametrize(
    ("prompt", "outputs", "last"),
    [(4, 1, 0), (40, 1, 2), (4, 3, 2)],
    ids=["the only step", "the last chunk", "the last decode step"],
)
@both_depths
async def test_b27_an_abort_in_the_last_step(
    engine_of: EngineOf, prompt: int, outputs: int, last: int, depth: int
) -> None:
    gate = Gate(first=last)
    settings = {"prefill_chunk": 16, "max_batch_tokens": 64, "steps_in_flight_max": depth}
    async with engine_of(ScriptedRunner(gate), prefix_cache=NullPrefixCache(), **settings) as engine:
        async with engine.open([1] * prompt, params(outputs)) as stream:
            await gate.entered()
            engine.abort(stream.request_id)
            final = final_of(stream)
            assert final.reason is FinishReason.ABORT, "acknowledged at once, not at the end of the step"
            assert len(await read(stream)) == final.usage.output_tokens < outputs
            gate.open()
            await until(lambda: not engine.statistics().scheduler.steps_in_flight)
            assert (await read(stream), final_of(stream)) == ([], final)
        now, pool = engine.statistics().scheduler, engine.statistics().memory.pools["full"]
        assert dict(now.finished) == {"abort": 1}
        assert now.wasted_tokens["aborted"] > 0
        assert (pool.free, sum(pool.freed.values())) == (pool.capacity, pool.allocated)


# ---- B29: edge lengths ----


def always(token: int) -> Act:
    def act(step: int, output: StepOutput) -> StepOutput:
        assert output.next_tokens is not None
        return StepOutput(next_tokens=torch.full_like(output.next_tokens, token))

    return act


@both_depths
async def test_b29_lengths(engine_of: EngineOf, depth: int) -> None:
    absent = SamplingParams()
    wanted: list[tuple[int, SamplingParams, int]] = [
        (1, absent, 31), (1, params(1), 1), (1, params(2), 2), (1, params(10), 10),
        (30, absent, 2), (30, params(1), 1), (30, params(2), 2), (30, params(10), 2),
        (31, absent, 1), (31, params(1), 1), (31, params(2), 1), (31, params(10), 1),
    ]  # fmt: skip
    async with engine_of(ToyRunner(max_seq=32), steps_in_flight_max=depth) as engine, second_client(engine):
        for prompt, wish, count in wanted:
            result = await engine.generate([1] * prompt, wish)
            assert (result.reason, len(result.token_ids)) == (FinishReason.LENGTH, count), (prompt, wish)
        for prompt, wish in ((p, w) for p in (32, 33) for w in (absent, params(1), params(10))):
            with pytest.raises(TooLong, match=f"{prompt} tokens; the model's context of 32") as too_long:
                await engine.generate([1] * prompt, wish)
            assert too_long.value.status_hint == 400
        with pytest.raises(InvalidRequest, match="prompt: is empty") as empty:
            await engine.generate([], absent)
        assert empty.value.status_hint == 400
        with pytest.raises(InvalidRequest, match="max_new_tokens"):
            params(0)


async def test_b29_one_token_needs_no_decode_step(engine_of: EngineOf) -> None:
    async with engine_of() as engine:
        await engine.generate([1] * 10, params(1))
        assert dict(engine.statistics().scheduler.steps) == {"prefill": 1}


@both_depths
async def test_b29_stops(engine_of: EngineOf, depth: int) -> None:
    runner = ScriptedRunner(always(EOS), eos_ids=(EOS,))
    async with engine_of(runner, steps_in_flight_max=depth) as engine, second_client(engine):
        for wish, count in (
            (SamplingParams(), 1),
            (SamplingParams(min_new_tokens=3), 3),
            (SamplingParams(min_new_tokens=3, max_new_tokens=3), 3),
            (SamplingParams(stop_token_ids=(EOS,), ignore_eos=True), 1),
        ):
            for prompt in ([7, 8], [EOS, 7, EOS]):  # in the prompt it has no effect
                result = await engine.generate(prompt, wish)
                assert (result.reason, result.token_ids) == (FinishReason.STOP, [EOS] * count)
        result = await engine.generate([7], SamplingParams(max_new_tokens=4, ignore_eos=True))
        assert (result.reason, result.token_ids) == (FinishReason.LENGTH, [EOS] * 4)


class second_client:  # noqa: N801 - reads as a block
    """Somebody who asks all the time, and must be served all the time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._served = 0

    async def _ask(self) -> None:
        while True:
            await self._engine.generate([3], params(1))
            self._served += 1

    async def __aenter__(self) -> None:
        self._task = asyncio.create_task(self._ask())

    async def __aexit__(self, *error: object) -> None:
        served = self._served
        assert served
        await until(lambda: self._served > served + 1)
        self._task.cancel()
        await asyncio.wait([self._task])
        assert self._task.cancelled()


# ---- B30: a chunk below the alignment ----


@both_depths
async def test_b30_a_chunk_smaller_than_a_page(engine_of: EngineOf, depth: int) -> None:
    async with engine_of(page_size=16, prefill_chunk=8, steps_in_flight_max=depth) as engine:
        with anyio.fail_after(10):
            assert (await engine.generate([1] * 40, params(3))).usage.output_tokens == 3
        assert engine.statistics().scheduler.steps["prefill"] == 5


def test_b30_a_chunk_that_no_step_could_hold(engine_of: EngineOf) -> None:
    with pytest.raises(InvalidConfig, match="prefill_chunk=4096 is above max_batch_tokens=2048"):
        engine_of(prefill_chunk=4096, max_batch_tokens=2048)


def test_b30_the_tail_of_one_and_the_head_of_the_next(drive: Drive) -> None:
    driven = drive(page_size=16, prefill_chunk=16, max_batch_tokens=16, max_running=2)
    driven.add("A", 19, max_new_tokens=2)
    driven.add("B", 20, max_new_tokens=2)
    assert [sizes(plan) for plan in driven.run()] == [
        {"A": 16}, {"A": 3, "B": 13}, {"A": 1, "B": 7}, {"B": 1},
    ]  # fmt: skip


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("chunk", [1, 2, 7, 16])
def test_b30_each_step_moves_something(drive: Drive, page_size: int, chunk: int) -> None:
    driven = drive(
        pages=-(-60 // page_size), page_size=page_size, prefill_chunk=chunk, max_batch_tokens=16, max_running=3
    )
    for i in range(8):
        driven.add(str(i), 1 + 5 * i, max_new_tokens=1 + i)
    while driven.core.has_work:
        assert driven.must_plan().tokens > 0
        driven.commit()
    assert set(driven.reasons().values()) == {FinishReason.LENGTH}
