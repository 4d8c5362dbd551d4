"""Makers of cores and engines; after each test all that they made must have given every page and row back."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvloom.allocator import KVMemory
from kvloom.scheduler import Engine
from kvloom.scheduler.runners import ToyRunner
from tests.scheduler.driven import Driven, require_nothing_held
from tests.scheduler.engines import engine_over


@pytest.fixture
def drive() -> Iterator[Callable[..., Driven]]:
    """Makes a `Driven` core."""
    made: list[Driven] = []

    def make(**settings: Any) -> Driven:
        made.append(Driven(**settings))
        return made[-1]

    yield make
    for driven in made:
        driven.finish()


@pytest.fixture
def engine_of() -> Iterator[Callable[..., Engine]]:
    """Makes an engine over a runner, the toy unless told."""
    made: list[tuple[Engine, KVMemory]] = []

    def make(runner: ToyRunner | None = None, **settings: Any) -> Engine:
        made.append(engine_over(runner or ToyRunner(), **settings))
        return made[-1][0]

    yield make
    for engine, memory in made:
        assert engine.statistics().scheduler.steps_in_flight == 0
        require_nothing_held(memory)
