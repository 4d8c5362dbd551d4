"""B51: a client that hangs up frees what it had, at once, whatever was going on."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from examples.openai_server.answer import Answer, Service
from examples.openai_server.routes import COMPLETION
from examples.openai_server.text import ByteTokenizer
from kvloom.scheduler import SchedulerConfig
from tests.examples.openai_server.made import MODEL, ScriptedRunner, Served, events, eventually, request_bytes, served

PATH = "/v1/completions"


@asynccontextmanager
async def calling(it: Served, **fields: object) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A client on a bare socket, which has sent its request; it hangs up in the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
    try:
        body = {"model": MODEL, "prompt": "hi", "ignore_eos": True, **fields}
        writer.write(request_bytes(PATH, body))
        await writer.drain()
        yield reader, writer
    finally:
        writer.transport.abort()


def aborted(it: Served) -> int:
    return it.engine.statistics().scheduler.finished.get("abort", 0)


async def as_if_fresh(it: Served, runner: ScriptedRunner) -> None:
    """All is free, and the next request gets its answer in as few steps as on a new server."""
    await it.idle()
    steps = len(runner.steps)
    answer = await it.post(max_tokens=2)
    assert answer.status_code == 200
    assert len(runner.steps) - steps == 2


@pytest.mark.parametrize("stream", [True, False])
async def test_b51_while_waiting(stream: bool) -> None:
    runner = ScriptedRunner(step_seconds=0.005)
    async with served(runner, config=SchedulerConfig(max_running=1)) as it, calling(it) as _:
        await eventually(lambda: it.engine.statistics().scheduler.decoding == 1)
        async with calling(it, stream=stream):
            await eventually(lambda: it.engine.statistics().scheduler.waiting == 1)
        await eventually(lambda: it.engine.statistics().scheduler.waiting == 0)
        assert aborted(it) == 1
        assert {len(step) for step in runner.steps} == {1}
        assert len({name for step in runner.steps for name in step}) == 1  # never computed


@pytest.mark.parametrize("stream", [True, False])
async def test_b51_in_prefill_before_any_byte(stream: bool) -> None:
    runner = ScriptedRunner(step_seconds=0.02)
    limits = SchedulerConfig(max_running=4, max_batch_tokens=8, prefill_chunk=8)
    async with served(runner, config=limits) as it:
        async with calling(it, prompt=[7] * 1000, stream=stream):
            await eventually(lambda: len(runner.steps) >= 3)
        steps = len(runner.steps)
        await it.idle()
        assert len(runner.steps) <= steps + 2
        await as_if_fresh(it, runner)


@pytest.mark.parametrize("stream", [True, False])
async def test_b51_in_decode(stream: bool) -> None:
    """Streaming after the first chunk; otherwise after as many tokens, of which the client has seen none."""
    runner = ScriptedRunner(step_seconds=0.02)
    async with served(runner) as it:
        async with calling(it, stream=stream) as (reader, _):
            if stream:
                await reader.readuntil(b"data: ")
            await eventually(lambda: it.engine.statistics().scheduler.output_tokens >= 3)
        steps = len(runner.steps)
        await it.idle()
        assert len(runner.steps) <= steps + 2
        assert aborted(it) == 1
        await as_if_fresh(it, runner)


@pytest.mark.parametrize("stream", [True, False])
async def test_b51_at_the_last_token(stream: bool) -> None:
    """Which comes first, the end or the hang-up, does not matter: it ends once."""
    runner = ScriptedRunner(step_seconds=0.01)
    async with served(runner) as it:
        for _ in range(5):
            steps = len(runner.steps)
            async with calling(it, stream=stream, max_tokens=3):
                await eventually(lambda: len(runner.steps) == steps + 3)  # noqa: B023 - called at once
        await it.idle()
        assert sum(it.engine.statistics().scheduler.finished.values()) == 5
        await as_if_fresh(it, runner)


async def test_b51_half_close_is_a_hang_up() -> None:
    """A client that closes its sending side: asyncio's servers then close the other one."""
    runner = ScriptedRunner(step_seconds=0.01)
    async with served(runner) as it, calling(it, stream=True) as (reader, writer):
        await reader.readuntil(b"data: ")
        writer.write_eof()
        await it.idle()
        assert aborted(it) == 1


async def test_b51_in_the_middle_of_the_body() -> None:
    runner = ScriptedRunner()
    async with served(runner) as it:
        _, writer = await asyncio.open_connection("127.0.0.1", it.port)
        writer.write(request_bytes(PATH, {"model": MODEL, "prompt": "hi"})[:-4])
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.transport.abort()
        await as_if_fresh(it, runner)
        assert it.engine.statistics().scheduler.received == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_b51_fifty_at_once(stream: bool) -> None:
    """Some run, some wait; then one normal request."""
    runner = ScriptedRunner(step_seconds=0.01)
    async with served(runner, config=SchedulerConfig(max_running=16)) as it:
        clients = [calling(it, stream=stream) for _ in range(50)]
        await asyncio.gather(*(client.__aenter__() for client in clients))
        await eventually(lambda: it.live == 50, 5)
        await eventually(lambda: it.engine.statistics().scheduler.decoding == 16)
        await asyncio.gather(*(client.__aexit__(None, None, None) for client in clients))
        await it.idle()
        assert aborted(it) == 50
        await as_if_fresh(it, runner)


class _Passing(BaseHTTPMiddleware):
    """Starlette's own base for middleware, which puts its own `receive` in between."""

    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        return await call_next(request)


@pytest.mark.parametrize("stream", [True, False])
async def test_b51_behind_middleware(stream: bool) -> None:
    runner = ScriptedRunner(step_seconds=0.01)
    async with served(runner, wrap=_Passing) as it:
        async with calling(it, stream=stream):
            await eventually(lambda: it.engine.statistics().scheduler.output_tokens >= 3)
        await it.idle()
        assert aborted(it) == 1
        await as_if_fresh(it, runner)


async def test_slow_client_costs_nobody_else_and_gets_larger_pieces() -> None:
    """What it has not fetched is in the engine's stream; the request itself runs to its end meanwhile."""
    async with served() as it:
        fetches, sent = asyncio.Event(), list[Message]()

        async def receive() -> Message:
            await asyncio.Event().wait()  # never hangs up
            raise AssertionError

        async def send(message: Message) -> None:
            sent.append(message)
            await fetches.wait()

        body = json.dumps({"model": MODEL, "prompt": "hi", "ignore_eos": True, "max_tokens": 200, "stream": True})
        answer = Answer(Service(it.engine, ByteTokenizer(), MODEL), COMPLETION, body.encode(), "x")
        task = asyncio.create_task(answer({"type": "http"}, receive, send))
        await eventually(lambda: it.engine.statistics().scheduler.finished == {"length": 1})
        assert (it.held_pages, len(sent)) == (0, 1)
        fetches.set()
        await task
        chunks = events(b"".join(message.get("body", b"") for message in sent).decode())
        assert len("".join(chunk["choices"][0]["text"] for chunk in chunks)) == 200
        assert len(chunks) < 6
