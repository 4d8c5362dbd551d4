"""What is logged, at which level, and what never is."""

from typing import Any

import pytest
from structlog.testing import capture_logs

from kvloom.metrics import StructlogObserver
from kvloom.scheduler.ports import Observer
from kvloom.scheduler.request import FinishReason, Usage
from tests.metrics.made import committed, ended, plan


class Lines:
    """A logger that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def debug(self, event: str, **values: object) -> None:
        self.lines.append({"level": "debug", "event": event, **values})

    def info(self, event: str, **values: object) -> None:
        self.lines.append({"level": "info", "event": event, **values})


@pytest.fixture
def lines() -> Lines:
    return Lines()


def failure(cause: Exception) -> Exception:
    error = RuntimeError("token 4711 of the prompt was strange")
    error.__cause__ = cause
    return error


def test_is_an_observer(lines: Lines) -> None:
    observer: Observer = StructlogObserver(lines)
    assert observer is not None


def test_a_step_is_one_line_at_debug(lines: Lines) -> None:
    StructlogObserver(lines, engine="0").on_step(plan(3, 2, step=7), committed(ended(), tokens=[1, 2]), 0.0123456789)
    assert lines.lines == [
        {
            "level": "debug", "event": "step_committed", "step": 7, "kind": "mixed", "rows": 3, "tokens": 3,
            "sampled_rows": 2, "finished_requests": 1, "seconds": 0.012346, "engine": "0",
        }
    ]  # fmt: skip


def test_a_failed_step_is_one_line_at_info(lines: Lines) -> None:
    failed = [ended(FinishReason.ERROR, error=failure(ValueError())) for _ in range(2)]
    StructlogObserver(lines).on_step(plan(), committed(*failed), 0.5)
    (line,) = lines.lines
    assert (line["level"], line["event"], line["failed_requests"]) == ("info", "step_failed", 2)
    assert (line["error"], line["cause"]) == ("RuntimeError", "ValueError")


def test_a_step_in_which_one_of_many_rows_failed_is_not_failed(lines: Lines) -> None:
    StructlogObserver(lines).on_step(plan(), committed(ended(error=failure(ValueError())), tokens=[1]), 0.5)
    assert [line["event"] for line in lines.lines] == ["step_committed"]


def test_every_end_is_one_line_at_info(lines: Lines) -> None:
    usage = Usage(prompt_tokens=10, output_tokens=5, cached_tokens=4, preemptions=1)
    finals = (
        ended(FinishReason.STOP, "a", usage, first_token_at=102.0),
        ended(FinishReason.ERROR, "b", error=failure(ValueError())),
    )
    StructlogObserver(lines, engine="1").on_finished(committed(*finals), 104.0)
    first, second = lines.lines
    assert first == {
        "level": "info", "event": "request_finished", "request_id": "a", "reason": "stop", "prompt_tokens": 10,
        "cached_tokens": 4, "output_tokens": 5, "preemptions": 1, "queue_seconds": 1.0, "first_token_seconds": 2.0,
        "total_seconds": 4.0, "engine": "1",
    }  # fmt: skip
    assert (second["reason"], second["error"], second["first_token_seconds"]) == ("error", "RuntimeError", None)


def test_neither_tokens_nor_the_words_of_an_error_are_logged(lines: Lines) -> None:
    observer = StructlogObserver(lines)
    failed = committed(ended(FinishReason.ERROR, error=failure(ValueError("prompt 4712"))), tokens=[4713])
    observer.on_step(plan(), failed, 0.5)
    observer.on_finished(failed, 104.0)
    assert not {"4711", "4712", "4713"} & set(str(lines.lines).replace("'", " ").split())
    assert "prompt was" not in str(lines.lines)


def test_the_programs_own_structlog_is_the_default() -> None:
    with capture_logs() as captured:
        StructlogObserver().on_finished(committed(ended()), 104.0)
    assert [(line["event"], line["log_level"]) for line in captured] == [("request_finished", "info")]
