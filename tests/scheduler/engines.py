"""Engines over a toy that follows a script: faults, answers that are none, steps that hang."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import anyio

from kvloom.allocator import Batch, KeptPrefixCache, KVMemory
from kvloom.scheduler import Engine, Finished, SamplingParams, SchedulerConfig, TokenStream
from kvloom.scheduler.ports import Clock
from kvloom.scheduler.runners import StepOutput, ToyRunner

Act = Callable[[int, StepOutput], Any]  # what step number n (from 0) answers, given what the toy would


def as_it_is(step: int, output: StepOutput) -> StepOutput:
    return output


class ScriptedRunner(ToyRunner):
    """Speaks as the toy does unless `act` says otherwise, and remembers who was in each step."""

    def __init__(self, act: Act = as_it_is, **toy: Any) -> None:
        super().__init__(**toy)
        self.act = act
        self.steps: list[list[str]] = []
        self.tokens: list[list[int]] = []  # what the model was fed, step by step
        self.closed = 0

    def forward(self, batch: Batch) -> Any:
        self.steps.append(list(batch.request_ids))
        self.tokens.append(batch.token_ids.tolist())
        return self.act(len(self.steps) - 1, super().forward(batch))

    def close(self) -> None:
        self.closed += 1


class Gate:
    """Holds the runner inside a step, from the `first` step on, until it is opened; shut again by `shut`."""

    def __init__(self, first: int = 0) -> None:
        self._first = first
        self._entered = threading.Event()
        self._open = threading.Event()

    def __call__(self, step: int, output: StepOutput) -> StepOutput:
        if step >= self._first:
            self._entered.set()
            assert self._open.wait(20), "nobody opened the gate"
        return output

    async def entered(self) -> None:
        """Returns once the runner stands at the gate."""
        assert await anyio.to_thread.run_sync(self._entered.wait, 20)

    def open(self) -> None:
        self._open.set()


def engine_over(
    runner: ToyRunner,
    *,
    pages: int = 256,
    page_size: int = 16,
    clock: Clock = time.monotonic,
    prefix_cache: KeptPrefixCache | None = None,
    **config: Any,
) -> tuple[Engine, KVMemory]:
    memory = KVMemory.for_runner(
        runner, capacity_tokens=pages * page_size, page_size=page_size, max_rows=64, prefix_cache=prefix_cache
    )
    return Engine(runner, memory, SchedulerConfig(**{"max_running": 16, **config}), clock=clock), memory


async def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Wait until it holds; fails rather than wait for ever."""
    give_up_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up_at, "it never came true"
        await anyio.sleep(0.001)


async def read(stream: TokenStream) -> list[int]:
    """All that is still to come."""
    return [token async for delta in stream for token in delta.token_ids]


async def alone(prompt: Sequence[int], count: int) -> list[int]:
    """What the toy says when nobody else is there."""
    engine, _ = engine_over(ToyRunner())
    async with engine:
        return (await engine.generate(prompt, SamplingParams(max_new_tokens=count))).token_ids


def final_of(stream: TokenStream) -> Finished:
    assert stream.final is not None, "it has not ended"
    return stream.final
