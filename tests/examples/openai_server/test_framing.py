"""B48: what goes over the wire, byte for byte."""

import asyncio
import time
from typing import Any

import pytest
from openai import APIError

from kvloom.scheduler import SchedulerConfig
from tests.examples.openai_server.made import MODEL, ScriptedRunner, events, eventually, served

CHAT = "/v1/chat/completions"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
NASTY = 'line\n\ndata: [DONE]\n\ndata: x\r\n\u2028 \u0085 \u65e5 \U0001f600 "\\'


@pytest.mark.parametrize(
    ("options", "wanted"),
    [({"include_usage": True}, True), ({"include_usage": False}, False), ({}, False), (None, False)],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_b48_usage_is_one_chunk_for_those_who_asked(
    path: str, options: dict[str, bool] | None, wanted: bool
) -> None:
    async with served(ScriptedRunner({"s": b"abc", "w": b"abc"})) as it:
        body = {"messages": HELLO, "stream_options": options}
        streamed = await it.post(path, request_id="s", stream=True, **body)
        assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert streamed.headers["x-request-id"] == "s"
        assert streamed.text.endswith("data: [DONE]\n\n")
        chunks = events(streamed.text)
        usages = [chunk["usage"] for chunk in chunks if "usage" in chunk]
        if wanted:
            assert chunks[-1]["choices"] == []
            streamed_usage, whole = chunks.pop()["usage"], (await it.post(path, request_id="w", **body)).json()["usage"]
            # The same prompt again: whole pages of 4 of it are cached by now, and its last token is computed.
            cached = (whole["prompt_tokens"] - 1) // 4 * 4
            assert streamed_usage.pop("prompt_tokens_details") == {"cached_tokens": 0}
            assert whole.pop("prompt_tokens_details") == {"cached_tokens": cached}
            assert streamed_usage == whole
        assert len(usages) == wanted
        assert all(len(chunk["choices"]) == 1 for chunk in chunks)
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
        assert reasons == [None] * (len(chunks) - 1) + ["stop"]
        assert len({chunk["id"] for chunk in chunks}) == 1
        if path == CHAT:
            deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
            assert deltas[0] == {"role": "assistant", "content": ""}
            assert ["role" in delta for delta in deltas[1:]] == [False] * (len(deltas) - 1)
            assert deltas[-1] == {}


async def test_b48_text_that_looks_like_framing() -> None:
    """Also for clients that split where Unicode has line ends: nothing but ASCII is sent."""
    async with served(ScriptedRunner({"x": NASTY.encode()})) as it:
        raw = await it.post(request_id="x", stream=True)
        assert raw.content.isascii()
        assert "".join(chunk["choices"][0]["text"] for chunk in events(raw.text)) == NASTY


@pytest.mark.parametrize("stream", [True, False])
async def test_b48_error_before_the_first_token_is_a_real_one(stream: bool) -> None:
    async with served(ScriptedRunner(failing={"x": 0})) as it:
        raw = await it.post(CHAT, request_id="x", messages=HELLO, stream=stream)
        assert raw.status_code == 500
        error = raw.json()["error"]
        assert (error["type"], error["code"]) == ("server_error", "runner_failed")
        assert "secret" not in raw.text
        await it.idle()


async def test_b48_error_after_the_third_token_is_one_event_and_the_end() -> None:
    async with served(ScriptedRunner(failing={"x": 3, "y": 3, "z": 3}, step_seconds=0.005)) as it:
        raw = await it.post(CHAT, request_id="x", messages=HELLO, stream=True)
        assert raw.status_code == 200
        chunks = events(raw.text)
        assert ["error" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert chunks[-1]["error"]["code"] == "runner_failed"
        assert "[DONE]" not in raw.text
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1])
        assert "secret" not in raw.text
        assert (await it.post(request_id="y")).status_code == 500
        stream = await it.openai.chat.completions.create(
            model=MODEL, messages=HELLO, stream=True, extra_headers={"X-Request-Id": "z"}
        )
        with pytest.raises(APIError, match="the model failed"):
            _ = [chunk async for chunk in stream]


async def test_b48_abort_by_the_server_is_one_event_and_the_end() -> None:
    async with served(ScriptedRunner(step_seconds=0.005)) as it:
        task = asyncio.create_task(it.post(request_id="x", stream=True, ignore_eos=True))
        whole = asyncio.create_task(it.post(request_id="y", ignore_eos=True))
        await eventually(lambda: it.engine.statistics().scheduler.output_tokens > 6)
        it.engine.abort("x")
        it.engine.abort("y")
        raw = await task
        assert raw.status_code == 200
        chunks = events(raw.text)
        assert chunks[-1]["error"]["code"] == "aborted"
        assert len(chunks) > 2
        assert "[DONE]" not in raw.text
        assert (await whole).status_code == 503


async def test_b48_b52_refusal_of_a_stream_is_a_real_one_and_quick() -> None:
    """One runs, two wait, the fourth is refused: 429 with Retry-After in under 50 ms, and never computed."""
    runner = ScriptedRunner(step_seconds=0.01)
    async with served(runner, config=SchedulerConfig(max_running=1, max_waiting=2)) as it:
        tasks = []
        for place, name in enumerate("abc"):
            tasks.append(asyncio.create_task(it.post(request_id=name, max_tokens=40)))
            await eventually(lambda count=place + 1: it.live == count)  # type: ignore[misc]
            await eventually(lambda: it.engine.statistics().scheduler.decoding == 1)
        answers, seconds = [], []
        for _ in range(3):
            before = time.perf_counter()
            answers.append(await it.post(request_id="d", stream=True))
            seconds.append(time.perf_counter() - before)
        refused = answers[-1]
        assert min(seconds) < 0.05  # of three: the machine may be busy with something else
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "queue_full"
        assert [answer.status_code for answer in await asyncio.gather(*tasks)] == [200] * 3
        assert not any("d" in step for step in runner.steps)
        assert it.engine.statistics().scheduler.rejected["queue_full"] == 3


async def test_b52_deadline_in_the_queue_is_an_error_and_in_decode_an_end_of_its_own() -> None:
    runner = ScriptedRunner(step_seconds=0.01)
    async with served(runner, config=SchedulerConfig(max_running=1), deadline_seconds=0.6) as it:
        front = asyncio.create_task(it.post(request_id="front", ignore_eos=True))
        await eventually(lambda: it.live == 1)
        for stream in (True, False):
            late = await it.post(request_id="late", stream=stream, deadline=0.1)
            assert late.status_code == 504
            assert late.json()["error"]["code"] == "deadline"
        assert not any("late" in step for step in runner.steps)
        # The server's own limit: the one in front asked for none.
        assert (await front).json()["choices"][0]["finish_reason"] == "deadline"
        raw = await it.post(request_id="x", stream=True, ignore_eos=True, deadline=0.1)
        chunks = events(raw.text)
        assert chunks[-1]["choices"][0]["finish_reason"] == "deadline"
        assert raw.text.endswith("data: [DONE]\n\n")
