"""What a client is told when something goes wrong, in the form OpenAI's clients know."""

import math
from collections.abc import Mapping

from starlette.responses import JSONResponse

from kvloom.scheduler import (
    Draining,
    DuplicateRequest,
    EngineFailed,
    InvalidRequest,
    NeverFits,
    QueueFull,
    Rejected,
    TooLong,
)

# Where the engine's name for a field is not the API's.
FIELDS: Mapping[str, str] = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}

CODES: Mapping[type[Exception], str] = {
    TooLong: "context_length_exceeded",  # the code by which clients know that they must shorten the prompt
    NeverFits: "never_fits",
    DuplicateRequest: "duplicate_request",
    Draining: "draining",
}


class ApiError(Exception):
    """An answer that is an error; `param` names the field that is to blame, if one is."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_seconds = retry_after_seconds

    def body(self) -> dict[str, object]:
        """As OpenAI has it."""
        if self.status >= 500:
            kind = "server_error"
        else:
            kind = "rate_limit_error" if self.status == 429 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self, headers: Mapping[str, str] | None = None) -> JSONResponse:
        """For as long as no byte of another answer has been sent."""
        headers = dict(headers or {})
        if self.retry_after_seconds is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_seconds)))  # the header knows whole seconds
        return JSONResponse(self.body(), self.status, headers)


def from_engine(error: Exception, prompt_field: str) -> ApiError:
    """What to tell the client whose request ended with `error`; `prompt_field` is where its prompt came from.

    What a runner said when it failed is for the log of the operator, not for clients: it may hold anything.
    """
    match error:
        case InvalidRequest():
            blamed = prompt_field if error.field == "prompt" else FIELDS.get(error.field, error.field)
            message = str(error).removeprefix(f"{error.field}: ")
            for name, known_as in FIELDS.items():
                message = message.replace(name, known_as)
            return ApiError(400, f"{blamed}: {message}", param=blamed, code="invalid_value")
        case QueueFull():
            return ApiError(429, str(error), code="queue_full", retry_after_seconds=error.retry_after_seconds)
        case Rejected():
            param = prompt_field if isinstance(error, TooLong | NeverFits) else None
            retry = 1.0 if error.status_hint == 503 else None  # this process goes away; the next one may be there soon
            message = f"{param}: {error}" if param else str(error)
            return ApiError(
                error.status_hint, message, param=param, code=CODES.get(type(error)), retry_after_seconds=retry
            )
        case EngineFailed():
            return ApiError(503, "the engine has failed", code="engine_failed")
        case _:
            return ApiError(500, "the model failed in a step of this request", code="runner_failed")
