"""What happens, as structured log lines: one event name per transition, at debug unless it is worth a look.

Never a prompt or a token.  Of an error its type: the text is in the caller's stream, and that of a failed step in the
engine's own log (logger "kvloom.engine").
"""

from typing import TYPE_CHECKING, Protocol

import structlog

if TYPE_CHECKING:
    from kvloom.scheduler.plan import Committed, Plan
    from kvloom.scheduler.request import Finished


class Logger(Protocol):
    """What is used of a structlog logger."""

    def debug(self, event: str, **values: object) -> object:
        """Everyday life."""

    def info(self, event: str, **values: object) -> object:
        """Worth a look."""


class StructlogObserver:
    """Logs to `logger`, by default to the program's own structlog configuration under the name "kvloom".

    step_committed    debug  a step brought its tokens
    step_failed       info   a step brought nothing but failed requests
    request_finished  info   a request ended, for whatever reason

    `values` come with every line: say which engine it is when there are several.
    """

    def __init__(self, logger: Logger | None = None, **values: object) -> None:
        self._logger = logger or structlog.get_logger("kvloom")
        self._values = values

    def on_step(self, plan: "Plan", committed: "Committed", seconds: float) -> None:
        """One line per step, at debug unless it failed."""
        shape = {
            "step": plan.step,
            "kind": plan.kind,
            "rows": len(plan.rows),
            "tokens": plan.tokens,
            "seconds": round(seconds, 6),
            **self._values,
        }
        errors = [final.error for _, final in committed.finished if final.error is not None]
        if errors and len(errors) == len(committed.finished) and not len(committed.tokens):
            self._logger.info("step_failed", failed_requests=len(errors), **_culprit(errors[0]), **shape)
        else:
            sampled, finished = len(committed.tokens), len(committed.finished)
            self._logger.debug("step_committed", sampled_rows=sampled, finished_requests=finished, **shape)

    def on_finished(self, committed: "Committed", now: float) -> None:
        """One line per request that ended."""
        for _, final in committed.finished:
            self._logger.info("request_finished", **_summary(final), **self._values)


def _summary(final: "Finished") -> dict[str, object]:
    usage, timings = final.usage, final.timings
    first = timings.first_token_seconds
    return {
        "request_id": final.request_id,
        "reason": str(final.reason),
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "output_tokens": usage.output_tokens,
        "preemptions": usage.preemptions,
        "queue_seconds": round(timings.queue_seconds, 6),
        "first_token_seconds": None if first is None else round(first, 6),
        "total_seconds": round(timings.total_seconds, 6),
        **({} if final.error is None else _culprit(final.error)),
    }


def _culprit(error: Exception) -> dict[str, object]:
    cause = error.__cause__
    return {"error": type(error).__name__, "cause": None if cause is None else type(cause).__name__}
