"""Settings that contradict each other are refused by name."""

from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from kvloom.scheduler import InvalidConfig, SchedulerConfig

COUNTS = ["max_running", "max_batch_tokens", "prefill_chunk", "max_waiting", "runner_failures_max"]


def test_defaults_fit_together() -> None:
    config = SchedulerConfig()
    assert config.max_running <= config.max_batch_tokens >= config.prefill_chunk
    with pytest.raises(FrozenInstanceError):
        config.max_running = 3  # type: ignore[misc]


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "5", None])
def test_counts_are_whole_numbers_from_one_up(name: str, value: object) -> None:
    with pytest.raises(InvalidConfig, match=f"{name}={value!r}"):
        SchedulerConfig(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"steps_in_flight_max": 0}, "steps_in_flight_max=0 must be 1 or 2"),
        ({"steps_in_flight_max": 3}, "steps_in_flight_max=3"),
        ({"step_timeout": 0.0}, "step_timeout=0.0 must be above 0"),
        ({"step_timeout": -1.0}, "step_timeout=-1.0"),
        ({"step_timeout": float("nan")}, "step_timeout=nan"),
        ({"max_running": 9, "max_batch_tokens": 8, "prefill_chunk": 4}, "max_batch_tokens=8 is below max_running=9"),
        ({"prefill_chunk": 4096}, "prefill_chunk=4096 is above max_batch_tokens=2048"),
        ({"seed": 2**63}, "seed"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"seed": 1.5}, "seed"),
    ],
)
def test_contradictions(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        SchedulerConfig(**wrong)


@pytest.mark.parametrize(
    "right",
    [
        {"max_running": 8, "max_batch_tokens": 8, "prefill_chunk": 8},
        {"prefill_chunk": 1},
        {"max_running": 1, "max_batch_tokens": 1, "prefill_chunk": 1},
        {"steps_in_flight_max": 2, "step_timeout": float("inf")},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
    ],
)
def test_limits_that_just_fit(right: dict[str, Any]) -> None:
    config = SchedulerConfig(**right)
    assert {name: getattr(config, name) for name in right} == right
