"""What can go wrong in the scheduler, one class per situation, each saying whose fault it is.

`status_hint` is the HTTP status a server would answer with; `reason` of a `Rejected` is the label value under which
`kvloom_requests_rejected_total` counts it.
"""


class SchedulerError(Exception):
    """Base of every error that kvloom.scheduler raises; never raised itself."""

    status_hint = 500


class InvalidConfig(SchedulerError, ValueError):
    """Settings that contradict each other, or a runner that cannot do what they ask."""


class Misuse(SchedulerError):
    """A call that an engine or stream in this state cannot answer; nothing was changed."""


class Rejected(SchedulerError):
    """A request refused at the door: nothing was queued, nobody else is affected."""

    status_hint = 400
    reason = "invalid"


class InvalidRequest(Rejected, ValueError):
    """A field with a value that makes no sense; `field` names it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class DuplicateRequest(Rejected):
    """The id belongs to a request that is still live; that one is untouched."""

    status_hint = 409


class TooLong(Rejected):
    """The prompt leaves no room for a token within the model's context."""

    reason = "too_long"


class NeverFits(Rejected):
    """The prompt needs more KV memory than the whole pool has."""

    reason = "never_fits"


class QueueFull(Rejected):
    """No place in the queue; `retry_after_seconds` is a guess from how fast the queue drains."""

    status_hint = 429
    reason = "queue_full"

    def __init__(self, message: str, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds

    @property
    def retry_after(self) -> float:
        """Seconds; the same as `retry_after_seconds`, under the name of the HTTP header."""
        return self.retry_after_seconds


class Draining(Rejected):
    """The engine takes no new request: it drains, has stopped, or was never started."""

    status_hint = 503
    reason = "draining"


class EngineFailed(SchedulerError):
    """The engine has stopped for good; the cause is chained (`__cause__`)."""

    status_hint = 503


class RunnerFailed(SchedulerError):
    """The runner raised, or answered with something that is no result, in a step of this request."""


class FatalRunnerError(SchedulerError):
    """Raise this from a runner when it cannot go on (a lost device): every stream ends and the engine has failed."""


class BadStepResult(SchedulerError):
    """A step's result does not fit its plan: wrong count, wrong type, or a token outside the vocabulary."""


class PlanMisuse(SchedulerError):
    """A step was committed or abandoned out of order or twice."""


class BrokenInvariant(SchedulerError):
    """The core's state contradicts itself.  This is a defect of kvloom; the engine stops rather than go on."""
