"""The ASGI application: runs under any server, and can be mounted in another application."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from examples.openai_server.answer import Service
from examples.openai_server.errors import ApiError
from examples.openai_server.routes import Routes
from examples.openai_server.text import Tokenizer
from kvloom.metrics import KVLoomCollector
from kvloom.scheduler import Engine

BODY_BYTES_MAX = 4 * 2**20


def create_app(
    engine: Engine,
    tokenizer: Tokenizer,
    *,
    model_name: str,
    collector: KVLoomCollector | None = None,
    body_bytes_max: int = BODY_BYTES_MAX,
    deadline_seconds: float | None = None,
    drain_seconds: float = 10.0,
) -> Starlette:
    """Serves `engine`, which the application's lifespan enters and drains.

    deadline_seconds  no request takes longer, whatever its own `deadline` says
    drain_seconds     how long requests may go on once the server is told to stop

    When mounted, give `engine_lifespan(engine)` to the outer application: only that one's lifespan is run.
    """
    service = Service(engine, tokenizer, model_name, deadline_seconds)
    return Starlette(
        routes=Routes(service, collector, body_bytes_max).table(),
        lifespan=engine_lifespan(engine, drain_seconds),
        exception_handlers={ApiError: _api_error, HTTPException: _http_error, Exception: _defect},
    )


def engine_lifespan(
    engine: Engine, drain_seconds: float = 10.0
) -> Callable[[Starlette], AbstractAsyncContextManager[None]]:
    """Start the engine with the application; drain it when the application stops."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with engine:
            yield
            await engine.drain(drain_seconds)

    return lifespan


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return ApiError(error.status_code, error.detail).response(error.headers)


async def _defect(request: Request, error: Exception) -> Response:
    """Starlette raises it again afterwards, so that the server logs it."""
    return ApiError(500, "internal error", code="internal_error").response()
