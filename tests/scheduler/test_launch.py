"""Off the loop and back: the launch thread, and what it makes of a runner's answers."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from kvloom.allocator import Batch
from kvloom.scheduler import BadStepResult, FatalRunnerError, RunnerFailed, StepResult
from kvloom.scheduler.launch import Launcher, Outcome
from kvloom.scheduler.runners import RunnerSpec, StepOutput
from tests.scheduler.driven import Driven
from tests.scheduler.engines import until

Drive = Callable[..., Driven]


def fixed(*tokens: float) -> StepOutput:
    return StepOutput(next_tokens=torch.tensor(tokens))


def batches_of(driven: Driven, steps: int) -> list[Batch]:
    """What the core plans, bound; requests a and b, one token each in every step."""
    batches = []
    for _ in range(steps):
        batches.append(driven.memory.bind(driven.must_plan()))
        if len(driven.out) == driven.config.steps_in_flight_max:
            driven.commit()
    return batches


@pytest.fixture
def pair(drive: Drive) -> Driven:
    """Two requests, one step at a time."""
    return two(drive, depth=1)


def two(drive: Drive, depth: int) -> Driven:
    driven = drive(steps_in_flight_max=depth)
    for request_id in "ab":
        driven.add(request_id, 2)
    return driven


class Runner:
    """As much of a runner as launching needs."""

    spec = RunnerSpec(vocab_size=100, max_seq=64)

    def __init__(self, forward: Callable[[Batch], Any], close: Callable[[], None] = lambda: None) -> None:
        self.forward = forward
        self.close = close


async def run(
    forward: Callable[[Batch], Any], batches: Sequence[Batch], *, overlap: bool = False
) -> list[tuple[int, Outcome]]:
    """The outcomes, in the order in which they were reported."""
    outcomes: list[tuple[int, Outcome]] = []
    home = threading.get_ident()

    def report(step: int, outcome: Outcome) -> None:
        assert threading.get_ident() == home, "reports come on the event loop"
        outcomes.append((step, outcome))

    launcher = Launcher(Runner(forward), report, lambda: None, max_rows=64, overlap=overlap)
    for batch in batches:
        launcher.submit(batch)
    try:
        await until(lambda: len(outcomes) == len(batches))
    finally:
        launcher.close()
    return outcomes


async def one(forward: Callable[[Batch], Any], driven: Driven) -> Outcome:
    ((_, outcome),) = await run(forward, batches_of(driven, 1))
    return outcome


async def test_steps_run_in_order_in_one_thread_that_is_not_the_loops(pair: Driven) -> None:
    seen: list[tuple[int, str, bool]] = []

    def forward(batch: Batch) -> StepOutput:
        seen.append((batch.step, threading.current_thread().name, threading.current_thread().daemon))
        return fixed(batch.step, 2)

    outcomes = await run(forward, batches_of(pair, 4))
    assert seen == [(step, "kvloom-launch", True) for step in range(4)]
    assert [step for step, _ in outcomes] == [0, 1, 2, 3]
    assert [outcome.tokens.tolist() for _, outcome in outcomes if isinstance(outcome, StepResult)] == [
        [step, 2] for step in range(4)
    ]


async def test_an_async_forward_is_awaited_on_the_loop(pair: Driven) -> None:
    home, order = threading.get_ident(), list[str]()

    async def forward(batch: Batch) -> StepOutput:
        assert threading.get_ident() == home
        order.append(f"{batch.step} begins")
        await asyncio.sleep(0.01)
        order.append(f"{batch.step} ends")
        return fixed(1, 2)

    outcomes = await run(forward, batches_of(pair, 2))
    assert order == ["0 begins", "0 ends", "1 begins", "1 ends"]
    assert all(isinstance(outcome, StepResult) for _, outcome in outcomes)


@pytest.mark.parametrize("error", [ValueError("boom"), asyncio.CancelledError("boom"), StopIteration("boom")])
async def test_an_async_forward_that_fails(pair: Driven, error: BaseException) -> None:
    async def forward(batch: Batch) -> StepOutput:
        raise error

    assert isinstance(await one(forward, pair), RunnerFailed)


async def test_failures_are_reported_in_their_place(pair: Driven) -> None:
    def forward(batch: Batch) -> StepOutput:
        if batch.step == 1:
            raise ValueError("not today")
        return fixed(1, 2)

    outcomes = await run(forward, batches_of(pair, 3))
    assert [(step, type(outcome)) for step, outcome in outcomes] == [
        (0, StepResult), (1, RunnerFailed), (2, StepResult),
    ]  # fmt: skip
    failure = outcomes[1][1]
    assert isinstance(failure, RunnerFailed)
    assert str(failure) == "ValueError: not today"
    assert isinstance(failure.__cause__, ValueError)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
async def test_nothing_that_a_runner_raises_ends_the_thread(pair: Driven, error: BaseException) -> None:
    def forward(batch: Batch) -> StepOutput:
        if batch.step == 0:
            raise error
        return fixed(1, 2)

    (_, first), (_, second) = await run(forward, batches_of(pair, 2))
    assert isinstance(first, RunnerFailed)
    assert first.__cause__ is error
    assert isinstance(second, StepResult)


@pytest.mark.parametrize("error", [FatalRunnerError("lost"), BadStepResult("strange")])
async def test_what_a_runner_says_in_our_words_is_passed_on(pair: Driven, error: Exception) -> None:
    def forward(batch: Batch) -> StepOutput:
        raise error

    assert await one(forward, pair) is error


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (None, BadStepResult),
        (torch.tensor([1, 2]), BadStepResult),
        (StepOutput(), BadStepResult),
        (StepOutput(next_tokens=[1, 2]), BadStepResult),  # type: ignore[arg-type]
        (StepOutput(logits=torch.zeros(3, 100)), BadStepResult),
        (StepOutput(logits=torch.zeros(100)), BadStepResult),
        (StepOutput(logits=torch.zeros(2, 99)), BadStepResult),
        (StepOutput(logits=torch.zeros(2, 100, dtype=torch.bool)), BadStepResult),
        (StepOutput(next_tokens=torch.zeros(2, dtype=torch.bfloat16)), RunnerFailed),
        (StepOutput(next_tokens=torch.zeros(2, requires_grad=True)), RunnerFailed),
    ],
)
@pytest.mark.parametrize("depth", [1, 2])
async def test_answers_that_are_none(drive: Drive, answer: Any, error: type[Exception], depth: int) -> None:
    batch = batches_of(two(drive, depth), 1)
    ((_, outcome),) = await run(lambda batch: answer, batch, overlap=depth > 1)
    assert isinstance(outcome, error)


async def test_errors_of_rows_are_passed_on(pair: Driven) -> None:
    boom = ValueError("boom")
    outcome = await one(lambda batch: StepOutput(next_tokens=torch.tensor([1, 2]), row_errors={1: boom}), pair)
    assert isinstance(outcome, StepResult)
    assert outcome.row_errors == {1: boom}


async def test_logits_are_sampled(pair: Driven) -> None:
    logits = torch.zeros(2, 100)
    logits[0, 17] = logits[1, 4] = 1
    outcome = await one(lambda batch: StepOutput(logits=logits), pair)
    assert isinstance(outcome, StepResult)
    assert outcome.tokens.tolist() == [17, 4]


async def test_a_runner_may_answer_with_the_same_buffer_each_time(pair: Driven) -> None:
    buffer = torch.zeros(2, dtype=torch.int64)

    def forward(batch: Batch) -> StepOutput:
        buffer.fill_(batch.step)
        return StepOutput(next_tokens=buffer)

    outcomes = await run(forward, batches_of(pair, 3))
    assert [outcome.tokens[0] for _, outcome in outcomes if isinstance(outcome, StepResult)] == [0, 1, 2]


async def test_tokens_in_flight_are_filled_in_by_row(drive: Drive) -> None:
    """The core never sees these tokens here: they go from one step to the next."""
    driven = two(drive, depth=2)
    batches = batches_of(driven, 2)
    driven.add("c", [30, 31])
    batches += batches_of(driven, 1)
    fed: list[list[int]] = []

    def forward(batch: Batch) -> StepOutput:
        fed.append(batch.token_ids.tolist())
        by_id = {"a": 40, "b": 50, "c": 60}
        return fixed(*(by_id[name] + batch.step for name in batch.request_ids))

    await run(forward, batches, overlap=True)
    assert [batch.has_token_src for batch in batches] == [False, True, True]
    assert fed == [[10, 11, 10, 11], [40, 50], [41, 51, 30, 31]]


async def test_known_tokens_are_left_as_they_are(drive: Drive) -> None:
    driven = two(drive, depth=1)
    driven.speak = lambda request_id, number: 77
    batches = batches_of(driven, 2)
    fed: list[list[int]] = []

    def forward(batch: Batch) -> StepOutput:
        fed.append(batch.token_ids.tolist())
        return fixed(1, 2)

    await run(forward, batches, overlap=True)
    assert fed[1] == [77, 77]


@pytest.mark.parametrize("strange", [-1, -(2**40), 100, 2**40, float("nan"), float("inf")])
async def test_a_token_that_is_none_is_not_fed_to_the_next_step(drive: Drive, strange: float) -> None:
    """An index outside the embedding would fail that step too, and on a device end everything."""
    fed: list[list[int]] = []

    def forward(batch: Batch) -> StepOutput:
        fed.append(batch.token_ids.tolist())
        return fixed(strange, 50)

    (_, outcome), _ = await run(forward, batches_of(two(drive, depth=2), 2), overlap=True)
    assert isinstance(outcome, StepResult)
    assert repr(outcome.tokens[0].item()) == repr(strange), "the core must see it"
    assert 0 <= fed[1][0] < 100
    assert fed[1][1] == 50


async def test_a_failed_step_leaves_the_next_one_something_to_compute(drive: Drive) -> None:
    fed: list[list[int]] = []

    def forward(batch: Batch) -> StepOutput:
        fed.append(batch.token_ids.tolist())
        if batch.step == 0:
            raise ValueError("boom")
        return fixed(1, 2)

    outcomes = await run(forward, batches_of(two(drive, depth=2), 2), overlap=True)
    assert isinstance(outcomes[1][1], StepResult)
    assert all(0 <= token < 100 for token in fed[1])


def launch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("kvloom-")]


async def test_closed_means_that_the_thread_ends(pair: Driven) -> None:
    await one(lambda batch: fixed(1, 2), pair)
    await until(lambda: not launch_threads())


def test_a_loop_that_is_gone_is_told_nothing(pair: Driven) -> None:
    """Nobody is left to tell: no error in the thread, and the thread ends."""
    (batch,) = batches_of(pair, 1)
    entered, leave = threading.Event(), threading.Event()
    order: list[str] = []

    def forward(batch: Batch) -> StepOutput:
        entered.set()
        assert leave.wait(10)
        order.append("forward")
        return fixed(1, 2)

    runner = Runner(forward, lambda: order.append("close"))

    async def submit() -> None:
        launcher = Launcher(runner, lambda step, outcome: None, lambda: None, max_rows=64, overlap=False)
        launcher.submit(batch)
        assert entered.wait(10)
        launcher.close()

    asyncio.run(submit())
    (thread,) = launch_threads()
    leave.set()
    thread.join(10)
    assert not thread.is_alive()
    assert order == ["forward", "close"], "a runner is not closed under a step"


async def test_a_runner_that_cannot_be_closed(pair: Driven) -> None:
    def close() -> None:
        raise ZeroDivisionError

    launcher = Launcher(
        Runner(lambda batch: fixed(1, 2), close), lambda step, outcome: None, lambda: None, max_rows=64, overlap=False
    )
    launcher.close()
    launcher.join(10)
    assert isinstance(launcher.close_error, ZeroDivisionError)
