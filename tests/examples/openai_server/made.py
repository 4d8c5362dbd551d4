"""A server on a real socket, runners that say what a test wants, and clients that misbehave."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import torch
import uvicorn
from openai import AsyncOpenAI

from examples.openai_server.app import create_app
from examples.openai_server.serving import DrainingServer
from examples.openai_server.text import ByteTokenizer, Tokenizer
from kvloom.allocator import Batch, KVMemory
from kvloom.metrics import instrument
from kvloom.scheduler import Engine, SchedulerConfig
from kvloom.scheduler.runners import ModelRunner, StepOutput, ToyRunner

MODEL = "toy"
END = 256  # the end token of the runners here
NO_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=4)


class ScriptedRunner(ToyRunner):
    """Says `scripts[request id]`, byte by byte, then END; any other request gets what the toy says.

    failing        request id -> how many tokens it says before its row fails
    step_seconds   may be changed while it runs
    """

    def __init__(
        self,
        scripts: Mapping[str, Sequence[int]] | None = None,
        failing: Mapping[str, int] | None = None,
        *,
        step_seconds: float = 0.0,
        max_seq: int = 4096,
    ) -> None:
        super().__init__(vocab_size=257, eos_ids=(END,), max_seq=max_seq)
        self.step_seconds = step_seconds
        self.steps: list[list[str]] = []  # the requests of each step
        self._scripts = dict(scripts or {})
        self._failing = dict(failing or {})
        self._said: dict[str, int] = {}

    def forward(self, batch: Batch) -> StepOutput:
        self.steps.append(list(batch.request_ids))
        time.sleep(self.step_seconds)
        output = super().forward(batch)
        assert output.next_tokens is not None
        tokens, errors = output.next_tokens.tolist(), {}
        for place, row in enumerate(batch.host.sample_rows.tolist()):
            name = batch.request_ids[row]
            said = self._said[name] = self._said.get(name, -1) + 1
            if name in self._scripts:
                tokens[place] = [*self._scripts[name], END][said]
            if self._failing.get(name, -1) == said:
                errors[place] = RuntimeError("a secret of the operator")
        return StepOutput(next_tokens=torch.tensor(tokens, dtype=torch.int32), row_errors=errors)


@dataclass(slots=True)
class Served:
    """A running server, and clients of it."""

    engine: Engine
    server: DrainingServer
    url: str
    http: httpx.AsyncClient
    clients: list[AsyncOpenAI] = field(default_factory=list)

    @property
    def openai(self) -> AsyncOpenAI:
        """The official client; made for those tests that want it, since that takes longer than most of them."""
        if not self.clients:
            self.clients.append(AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=20))
        return self.clients[0]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def held_pages(self) -> int:
        memory: Any = self.engine.statistics().memory
        return int(memory.pools["full"].held)

    @property
    def live(self) -> int:
        now = self.engine.statistics().scheduler
        return now.waiting + now.preempted + now.prefilling + now.decoding

    async def post(self, path: str = "/v1/completions", request_id: str | None = None, **body: Any) -> httpx.Response:
        headers = {"X-Request-Id": request_id} if request_id else {}
        return await self.http.post(path, json={"model": MODEL, "prompt": "hi", **body}, headers=headers)

    async def idle(self, seconds: float = 1.0) -> None:
        """Nothing is live and no page is held, soon."""
        await eventually(lambda: self.live == 0 and self.held_pages == 0, seconds)


@asynccontextmanager
async def served(
    runner: ModelRunner | None = None,
    tokenizer: Tokenizer | None = None,
    *,
    capacity_tokens: int = 8192,
    drain_seconds: float = 5.0,
    config: SchedulerConfig | None = None,
    wrap: Callable[[Any], Any] = lambda app: app,
    **options: Any,
) -> AsyncIterator[Served]:
    """`wrap` may put middleware around the application; `options` are those of `create_app`."""
    runner = runner or ScriptedRunner()
    memory = KVMemory.for_runner(runner, capacity_tokens=capacity_tokens, page_size=4, max_rows=256)
    engine: Engine = Engine(runner, memory, config or SchedulerConfig(max_running=32))
    collector = instrument(engine, model=MODEL)
    app = create_app(
        engine,
        tokenizer or ByteTokenizer(),
        model_name=MODEL,
        collector=collector,
        drain_seconds=drain_seconds,
        **options,
    )
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    config_ = uvicorn.Config(wrap(app), host="127.0.0.1", port=0, log_level="warning", timeout_graceful_shutdown=10)
    server = DrainingServer(config_, engine, drain_seconds, ready.set_result)
    # Not `serve`, which would take over the signals of the test's process.
    task = asyncio.create_task(server._serve())
    try:
        url = await asyncio.wait_for(ready, 10)
        # `verify`: there is no TLS here, and to read the certificates takes long.
        async with httpx.AsyncClient(base_url=url, timeout=20, verify=False, limits=NO_LIMITS) as http:
            it = Served(engine, server, url, http)
            yield it
            for client in it.clients:
                await client.close()
    finally:
        server.should_exit = True
        await asyncio.wait_for(task, 20)
    memory.check()


async def eventually(condition: Callable[[], bool], seconds: float = 1.0) -> None:
    """Wait until it holds; a failure says how long was waited."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        await asyncio.sleep(0.002)


def request_bytes(path: str, body: object, headers: Mapping[str, str] | None = None) -> bytes:
    """A request as it goes over the wire."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(data)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join([*lines, "", ""]).encode() + data


def events(body: str) -> list[dict[str, Any]]:
    """The JSON of a whole stream, whose framing is checked; the end mark is left out."""
    assert body.endswith("\n\n")
    blocks = body[:-2].split("\n\n")
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks), blocks
    if blocks[-1] == "data: [DONE]":
        blocks.pop()
    return [json.loads(block.removeprefix("data: ")) for block in blocks]
