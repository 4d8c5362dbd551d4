"""B29, B26 and B49: what is refused, by name, while others are served."""

import asyncio
import json
from typing import Any

import pytest

from tests.examples.openai_server.made import MODEL, ScriptedRunner, Served, eventually, served

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
USER: dict[str, Any] = {"role": "user", "content": "hello"}


def completion(**fields: object) -> bytes:
    return json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 1, **fields}).encode()


def chat(**fields: object) -> bytes:
    return json.dumps({"model": MODEL, "messages": [USER], "max_tokens": 1, **fields}).encode()


def plain(text: str) -> bytes:
    return f'{{"model": "{MODEL}", {text}}}'.encode()


# What is wrong, where it is sent, the body, the status, and the field that must be named.
BAD: list[tuple[str, str, bytes, int, str | None]] = [
    ("no JSON", COMPLETION, b"{not json", 400, None),
    ("empty", COMPLETION, b"", 400, None),
    ("no object", CHAT, b"[1, 2]", 400, None),
    ("invalid UTF-8", CHAT, b'{"model": "\xff"}', 400, None),
    ("UTF-16", COMPLETION, completion().decode().encode("utf-16"), 400, None),
    ("deep nesting", COMPLETION, b"[" * 100_000, 400, None),
    ("deep nesting in a field", COMPLETION, plain('"x": ' + "[" * 50_000 + "]" * 50_000), 400, None),
    ("huge number", COMPLETION, plain('"prompt": "a", "seed": ' + "9" * 5000), 400, None),
    ("20 MB", COMPLETION, b'{"prompt": "' + b"a" * 20_000_000 + b'"}', 413, None),
    ("field given twice", COMPLETION, plain('"prompt": "a", "prompt": "b"'), 400, "prompt"),
    ("half a surrogate pair as a name twice", COMPLETION, b'{"\\ud800": 1, "\\ud800": 2}', 400, "\\ud800"),
    ("unknown model", COMPLETION, completion(model="gpt-9"), 404, "model"),
    ("no model", COMPLETION, b'{"prompt": "a"}', 400, "model"),
    ("null model", CHAT, chat(model=None), 400, "model"),
    ("no prompt", COMPLETION, plain('"max_tokens": 1'), 400, "prompt"),
    ("null prompt", COMPLETION, completion(prompt=None), 400, "prompt"),
    ("empty prompt", COMPLETION, completion(prompt=""), 400, "prompt"),
    ("empty list", COMPLETION, completion(prompt=[]), 400, "prompt"),
    ("several prompts", COMPLETION, completion(prompt=["a", "b"]), 400, "prompt"),
    ("several lists", COMPLETION, completion(prompt=[[1], [2]]), 400, "prompt"),
    ("half a surrogate pair", COMPLETION, completion(prompt="\ud800"), 400, "prompt"),
    ("half a pair in chat", CHAT, chat(messages=[{"role": "user", "content": "\udc00"}]), 400, "messages.0.content"),
    ("negative id", COMPLETION, completion(prompt=[1, -1]), 400, "prompt"),
    ("id beyond the vocabulary", COMPLETION, completion(prompt=[257]), 400, "prompt"),
    ("id beyond int32", COMPLETION, completion(prompt=[2**31]), 400, "prompt"),
    ("id beyond int64", COMPLETION, completion(prompt=[1, 2**70]), 400, "prompt"),
    ("bool as id", COMPLETION, completion(prompt=[True]), 400, "prompt"),
    ("fraction as id", COMPLETION, completion(prompt=[1.0]), 400, "prompt"),
    ("prompt of the context's length", COMPLETION, completion(prompt=[1] * 64), 400, "prompt"),
    ("null messages", CHAT, chat(messages=None), 400, "messages"),
    ("no messages", CHAT, chat(messages=[]), 400, "messages"),
    ("text as messages", CHAT, chat(messages="hello"), 400, "messages"),
    ("unknown role", CHAT, chat(messages=[{"role": "wizard", "content": "x"}]), 400, "messages.0.role"),
    ("null content", CHAT, chat(messages=[USER, {"role": "user", "content": None}]), 400, "messages.1.content"),
    (
        "image", CHAT, chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]), 400,
        "messages.0.content",
    ),
    ("long conversation", CHAT, chat(messages=[USER] * 20), 400, "messages"),
    ("n 0", COMPLETION, completion(n=0), 400, "n"),
    ("n million", CHAT, chat(n=10**6), 400, "n"),
    ("n true", CHAT, chat(n=True), 400, "n"),
    ("max_tokens 0", COMPLETION, completion(max_tokens=0), 400, "max_tokens"),
    ("max_tokens -1", COMPLETION, completion(max_tokens=-1), 400, "max_tokens"),
    ("max_tokens 10^12", COMPLETION, completion(max_tokens=10**12), 400, "max_tokens"),
    ("max_tokens text", COMPLETION, completion(max_tokens="5"), 400, "max_tokens"),
    ("max_tokens fraction", COMPLETION, completion(max_tokens=1.5), 400, "max_tokens"),
    ("max_completion_tokens 0", CHAT, chat(max_completion_tokens=0), 400, "max_tokens"),
    ("min above max", COMPLETION, completion(min_tokens=5), 400, "min_tokens"),
    ("temperature NaN", COMPLETION, plain('"prompt": "a", "temperature": NaN'), 400, "temperature"),
    ("temperature Infinity", COMPLETION, plain('"prompt": "a", "temperature": 1e999'), 400, "temperature"),
    ("temperature 1e308", COMPLETION, completion(temperature=1e308), 400, "temperature"),
    ("temperature bool", COMPLETION, completion(temperature=True), 400, "temperature"),
    ("top_p 0", COMPLETION, completion(top_p=0), 400, "top_p"),
    ("top_k -2", COMPLETION, completion(top_k=-2), 400, "top_k"),
    ("seed beyond int64", COMPLETION, completion(seed=2**64), 400, "seed"),
    ("logit_bias", COMPLETION, completion(logit_bias={"5": 100}), 400, "logit_bias"),
    ("logit_bias out of range", CHAT, chat(logit_bias={"99999": 1}), 400, "logit_bias"),
    ("logprobs", CHAT, chat(logprobs=True), 400, "logprobs"),
    ("logprobs 0", COMPLETION, completion(logprobs=0), 400, "logprobs"),
    ("tools", CHAT, chat(tools=[{"type": "function"}]), 400, "tools"),
    ("echo", COMPLETION, completion(echo=True), 400, "echo"),
    ("best_of", COMPLETION, completion(best_of=2), 400, "best_of"),
    ("suffix", COMPLETION, completion(suffix="x"), 400, "suffix"),
    ("JSON mode", CHAT, chat(response_format={"type": "json_object"}), 400, "response_format"),
    ("stop id beyond the vocabulary", COMPLETION, completion(stop_token_ids=[257]), 400, "stop_token_ids"),
    ("negative stop id", COMPLETION, completion(stop_token_ids=[-1]), 400, "stop_token_ids"),
    ("100,000 stop ids", COMPLETION, completion(stop_token_ids=list(range(257)) * 400), 400, "stop_token_ids"),
    ("bool as stop id", COMPLETION, completion(stop_token_ids=[True]), 400, "stop_token_ids.0"),
    ("10,000 stop strings", COMPLETION, completion(stop=["x"] * 10_000), 400, "stop"),
    ("empty stop string", COMPLETION, completion(stop=""), 400, "stop.0"),
    ("number as stop string", COMPLETION, completion(stop=[1]), 400, "stop.0"),
    ("stream text", CHAT, chat(stream="yes"), 400, "stream"),
    ("deadline 0", CHAT, chat(deadline=0), 400, "deadline"),
]  # fmt: skip


async def test_b49_bad_bodies_are_refused_by_name_while_200_good_ones_are_served() -> None:
    async with served(ScriptedRunner(max_seq=64, step_seconds=0.001)) as it:
        alone = (await it.post(max_tokens=8)).json()["choices"][0]["text"]
        gate = asyncio.Semaphore(8)

        async def good() -> str:
            async with gate:
                return str((await it.post(max_tokens=8)).json()["choices"][0]["text"])

        others = [asyncio.create_task(good()) for _ in range(200)]
        wrong = []
        for what, path, body, status, param in BAD:
            raw = await it.http.post(path, content=body)
            error = raw.json()["error"]
            if (raw.status_code, error["param"]) != (status, param) or (param or "") not in error["message"]:
                wrong.append((what, raw.status_code, error))
            if (await it.http.get("/health")).status_code != 200:
                wrong.append((what, 0, "health"))
        assert not wrong
        assert await asyncio.gather(*others) == [alone] * 200
        now = it.engine.statistics().scheduler
        assert sum(now.finished.values()) == 201
        assert now.finished["length"] == 201
        await it.idle()


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1, "logprobs": None, "logit_bias": {}, "tools": [], "best_of": 1, "echo": False, "suffix": None},
        {"user": "me", "metadata": {"a": [1]}, "unheard_of": {"x": None}, "store": True, "logprobs": False},
        {"response_format": {"type": "text"}, "tool_choice": "auto", "stop": None, "stream": None, "seed": None},
    ],
)
async def test_harmless_fields_are_ignored(fields: dict[str, object]) -> None:
    async with served() as it:
        for path, body in ((COMPLETION, completion(**fields)), (CHAT, chat(**fields))):
            assert (await it.http.post(path, content=body)).status_code == 200


async def test_content_in_parts_and_the_developer_role() -> None:
    async with served() as it:
        parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
        asked = ([{"role": "developer", "content": parts}], [{"role": "system", "content": "hello"}])
        counts = [
            (await it.http.post(CHAT, content=chat(messages=messages))).json()["usage"]["prompt_tokens"]
            for messages in asked
        ]
        assert counts[0] == counts[1] == len("system: hello\nassistant: ")


async def test_paths_and_methods_that_are_not_there() -> None:
    async with served() as it:
        for method, path, status in (
            ("GET", "/v1/nothing", 404),
            ("GET", COMPLETION, 405),
            ("POST", "/v1/models", 405),
        ):
            raw = await it.http.request(method, path)
            assert raw.status_code == status
            assert raw.json()["error"]["type"] == "invalid_request_error"


async def test_b29_edge_lengths_in_a_context_of_32() -> None:
    """Prompt and max_tokens -> tokens said and reason, or the status of the refusal; a second client is served."""
    cases: list[tuple[int, int | None, tuple[int, str] | int]] = [
        (0, 1, 400), (1, 1, (1, "length")), (1, 0, 400), (1, None, (31, "length")), (30, 2, (2, "length")),
        (30, 1, (1, "length")), (30, 10, (2, "length")), (30, None, (2, "length")), (31, 1, (1, "length")),
        (31, 10, (1, "length")), (31, None, (1, "length")), (32, 1, 400), (33, None, 400),
    ]  # fmt: skip
    async with served(ScriptedRunner(max_seq=32)) as it:

        async def outcome(length: int, most: int | None) -> tuple[int, str] | int:
            raw = await it.post(prompt=[7] * length, max_tokens=most, ignore_eos=True)
            if raw.status_code != 200:
                return raw.status_code
            answer = raw.json()
            return answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]

        second = asyncio.create_task(_keep_asking(it, 20))
        assert [await outcome(length, most) for length, most, _ in cases] == [wanted for _, _, wanted in cases]
        assert await second == [200] * 20
        await it.idle()


async def _keep_asking(it: Served, times: int) -> list[int]:
    return [(await it.post(max_tokens=3)).status_code for _ in range(times)]


async def test_b29_end_at_the_first_token_and_min_tokens() -> None:
    scripts = {"first": b"", "min": [256, 256, 256, 256], "prompt": b"abc"}
    async with served(ScriptedRunner(scripts)) as it:
        first = (await it.post(request_id="first")).json()
        assert (first["choices"][0]["text"], first["choices"][0]["finish_reason"]) == ("", "stop")
        assert first["usage"]["completion_tokens"] == 1
        third = (await it.post(request_id="min", min_tokens=3)).json()
        assert (third["usage"]["completion_tokens"], third["choices"][0]["finish_reason"]) == (3, "stop")
        # A stop id in the prompt has no effect.
        asked = (await it.post(request_id="prompt", prompt="xyz", stop_token_ids=[ord("y")])).json()
        assert asked["choices"][0]["text"] == "abc"


async def test_b26_second_request_with_a_live_id_is_refused() -> None:
    async with served(ScriptedRunner(step_seconds=0.005)) as it:
        first = asyncio.create_task(it.post(request_id="x", max_tokens=40))
        await eventually(lambda: it.live == 1)
        second = await it.post(request_id="x", max_tokens=40)
        assert second.status_code == 409
        assert second.json()["error"]["code"] == "duplicate_request"
        answer = await first
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 40
        # Free again.
        assert (await it.post(request_id="x", max_tokens=1)).status_code == 200
        assert (await it.post(request_id="x y/../z", max_tokens=1)).headers["x-request-id"] != "x y/../z"
        now = it.engine.statistics().scheduler
        assert now.received == sum(now.finished.values()) + sum(now.rejected.values()) == 4
        await it.idle()
