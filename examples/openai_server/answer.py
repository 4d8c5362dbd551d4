"""One request, from its body to the last byte of the answer.

Whatever ends the answer early (the client hangs up, the server is cancelled) leaves the `async with` around the
engine's stream, and that aborts the request: no tokens are computed for a client that is gone.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Protocol

import anyio
import structlog
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from examples.openai_server.errors import ApiError, from_engine
from examples.openai_server.schema import GenerationRequest, parse
from examples.openai_server.shapes import Shape, Totals
from examples.openai_server.sse import DONE, EventStream, event
from examples.openai_server.text import Tokenizer
from examples.openai_server.transcript import Transcript
from kvloom.scheduler import Engine, Finished, FinishReason, SamplingParams, SchedulerError


@dataclass(frozen=True, slots=True)
class Service:
    """What all requests share; `deadline_seconds` is the longest that one may take, None for no limit."""

    engine: Engine
    tokenizer: Tokenizer
    model_name: str
    deadline_seconds: float | None = None


class MakeShape(Protocol):
    """How a route makes its shape."""

    def __call__(self, request_id: str, model: str) -> Shape: ...


@dataclass(frozen=True, slots=True)
class Kind:
    """A route: what its bodies and its answers look like."""

    request: type[GenerationRequest]
    shape: MakeShape


@dataclass(frozen=True, slots=True)
class Job:
    """A request that makes sense, in the engine's terms."""

    asked: GenerationRequest
    prompt: list[int]
    params: SamplingParams
    deadline: float | None


@dataclass(frozen=True, slots=True)
class Ending:
    """How an answer ended, if it did so well."""

    reason: str
    totals: Totals


class Answer:
    """The response to one body, as an ASGI application."""

    def __init__(self, service: Service, kind: Kind, raw: bytes, request_id: str) -> None:
        self._service = service
        self._kind = kind
        self._raw = raw
        self._id = request_id
        self._headers = {"X-Request-Id": request_id}
        self._ending: Ending | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, unless the client hangs up first; its body must have been read."""
        async with anyio.create_task_group() as group:
            group.start_soon(_hung_up, receive, group.cancel_scope.cancel)
            with suppress(ClientDisconnect):
                await self._answer_or_error(scope, receive, _raising_disconnect(send))
            group.cancel_scope.cancel()

    async def _answer_or_error(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = EventStream(send, self._headers)
        try:
            await self._answer(scope, receive, send, stream)
        except ApiError as error:
            if stream.started:
                await stream.write(event(error.body()))
                await stream.close()
            else:
                await error.response(self._headers)(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, stream: EventStream) -> None:
        job = await anyio.to_thread.run_sync(self._prepare, abandon_on_cancel=True)
        shape = self._kind.shape(self._id, self._service.model_name)
        try:
            if job.asked.stream:
                await self._stream(job, shape, stream)
                return
            async with aclosing(self._pieces(job)) as pieces:
                text = "".join([piece async for piece in pieces])
        except SchedulerError as error:
            raise from_engine(error, job.asked.prompt_field) from error
        except (ApiError, ClientDisconnect):
            raise
        except Exception as error:
            # A defect of ours.  Once the answer has begun nobody else could tell the client that it is cut short.
            structlog.get_logger("kvloom.server").exception("answer_failed", request_id=self._id)
            raise ApiError(500, "internal error", code="internal_error") from error
        assert self._ending is not None
        whole = shape.whole(text, self._ending.reason, self._ending.totals)
        await JSONResponse(whole, headers=self._headers)(scope, receive, send)

    async def _stream(self, job: Job, shape: Shape, stream: EventStream) -> None:
        """The first token, or the end without one, comes before the status line, so that errors are real ones."""
        async with aclosing(self._pieces(job)) as pieces:
            async for text in pieces:
                if not stream.started and (opening := shape.opening()) is not None:
                    await stream.write(event(opening))
                await stream.start()
                if text:
                    await stream.write(event(shape.piece(text)))
        assert self._ending is not None
        await stream.write(event(shape.closing(self._ending.reason)))
        if job.asked.include_usage:
            await stream.write(event(shape.usage(self._ending.totals)))
        await stream.write(DONE)
        await stream.close()

    async def _pieces(self, job: Job) -> AsyncGenerator[str]:
        """The text, a piece (perhaps empty) for each delta; then `_ending` is set, or ApiError raised."""
        asked, params = job.asked, job.params
        transcript = Transcript(
            self._service.tokenizer.detokenizer(), asked.stop or (), params.stop_token_ids, params.min_new_tokens
        )
        # Not `wait=True`: a queue in front of the queue would have no end.
        async with self._service.engine.open(
            job.prompt, params, request_id=self._id, deadline=job.deadline, wait=False
        ) as tokens:
            async for delta in tokens:
                yield transcript.feed(delta.token_ids)
                if transcript.stopped:
                    break
        final = tokens.final
        assert final is not None
        rest = ""
        if not transcript.stopped:
            rest = transcript.finish(stopped=final.reason is FinishReason.STOP)
        reason = "stop" if transcript.stopped else self._reason(final, job, transcript.tokens)
        yield rest
        self._ending = Ending(reason, Totals(len(job.prompt), transcript.tokens, final.usage.cached_tokens))

    def _reason(self, final: Finished, job: Job, tokens: int) -> str:
        """The `finish_reason`.  Raises ApiError for an end that must not look like an answer."""
        match final.reason:
            case FinishReason.STOP | FinishReason.LENGTH:
                return final.reason.value
            case FinishReason.DEADLINE if tokens:
                return "deadline"  # not one of OpenAI's, but "length" would say that the model had more to say
            case FinishReason.DEADLINE:
                raise ApiError(504, "no token within the deadline", code="deadline")
            case FinishReason.ERROR:
                raise from_engine(final.error or SchedulerError(), job.asked.prompt_field)
            case FinishReason.SHUTDOWN:
                raise ApiError(503, "the server is shutting down", code="shutdown", retry_after_seconds=1)
            case _:
                raise ApiError(503, "the request was aborted by the server", code="aborted")

    def _prepare(self) -> Job:
        """Everything that takes longer the longer the prompt is; runs in a thread.  Raises ApiError."""
        asked = parse(self._raw, self._kind.request)
        service = self._service
        if asked.model != service.model_name:
            message = f"the model {asked.model!r} does not exist; this server has {service.model_name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        try:
            params = asked.sampling()
        except SchedulerError as error:
            raise from_engine(error, asked.prompt_field) from error
        limits = [limit for limit in (asked.deadline, service.deadline_seconds) if limit is not None]
        return Job(asked, asked.prompt_ids(service.tokenizer), params, min(limits, default=None))


async def _hung_up(receive: Receive, then: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    then()


def _raising_disconnect(send: Send) -> Send:
    """Some servers ignore what is sent to a client that is gone, others raise OSError (ASGI allows both)."""

    async def checked(message: Message) -> None:
        try:
            await send(message)
        except OSError as error:
            raise ClientDisconnect from error

    return checked
