"""Good requests, through the official client."""

import asyncio
import time
from typing import Any

import pytest
from openai import NotFoundError
from starlette.applications import Starlette
from starlette.routing import Mount

from kvloom.allocator import Batch
from kvloom.scheduler import SamplingParams, SchedulerConfig
from kvloom.scheduler.runners import StepOutput
from kvloom.scheduler.runners.shadow import ShadowRunner, continuation
from tests.examples.openai_server.made import MODEL, ScriptedRunner, Served, events, eventually, served

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


class SlowShadow(ShadowRunner):
    """Text in ASCII; its next token is a function of all that came before, and it checks whose KV it reads."""

    def __init__(self, step_seconds: float = 0.004) -> None:
        super().__init__(vocab_size=128)
        self.step_seconds = step_seconds

    def forward(self, batch: Batch) -> StepOutput:
        time.sleep(self.step_seconds)
        return super().forward(batch)


async def test_chat() -> None:
    async with served(ScriptedRunner({"x": b"well met"})) as it:
        answer = await it.openai.chat.completions.create(
            model=MODEL, messages=HELLO, extra_headers={"X-Request-Id": "x"}
        )
        assert answer.object == "chat.completion"
        assert answer.id == "chatcmpl-x"
        assert answer._request_id == "x"
        assert answer.choices[0].message.role == "assistant"
        assert answer.choices[0].message.content == "well met"
        assert answer.choices[0].finish_reason == "stop"
        usage = answer.usage
        assert usage is not None
        prompt = len("user: hello\nassistant: ")
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (prompt, 9, prompt + 9)
        await it.idle()


async def test_chat_streamed() -> None:
    async with served(ScriptedRunner({"x": b"well met"})) as it:
        stream = await it.openai.chat.completions.create(
            model=MODEL, messages=HELLO, stream=True, extra_headers={"X-Request-Id": "x"}
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "well met"
        assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]


async def test_completion_of_text_and_of_token_ids() -> None:
    async with served() as it:
        text = await it.openai.completions.create(model=MODEL, prompt="hi", max_tokens=20)
        ids = await it.openai.completions.create(model=MODEL, prompt=list(b"hi"), max_tokens=20)
        assert len(text.choices[0].text) == 20
        assert text.choices[0].text == ids.choices[0].text
        assert text.choices[0].finish_reason == "length"
        stream = await it.openai.completions.create(model=MODEL, prompt="hi", max_tokens=20, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == text.choices[0].text


async def test_models() -> None:
    async with served() as it:
        assert [model.id async for model in it.openai.models.list()] == [MODEL]
        assert (await it.openai.models.retrieve(MODEL)).id == MODEL
        with pytest.raises(NotFoundError):
            await it.openai.models.retrieve("another/one")


async def test_mounted_in_another_application() -> None:
    """Whose lifespan is the one that counts."""

    def mounted(app: Starlette) -> Starlette:
        return Starlette(routes=[Mount("/llm", app)], lifespan=app.router.lifespan_context)

    async with served(wrap=mounted) as it:
        assert (await it.post("/llm/v1/completions", max_tokens=2)).status_code == 200
        assert (await it.post()).status_code == 404


async def test_sampling_fields_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served() as it:
        seen: list[SamplingParams] = []
        opened = it.engine.open

        def spy(prompt: Any, params: SamplingParams, **rest: Any) -> Any:
            seen.append(params)
            return opened(prompt, params, **rest)

        monkeypatch.setattr(it.engine, "open", spy)
        await it.openai.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            max_completion_tokens=7,
            max_tokens=9,
            temperature=0.5,
            top_p=0.25,
            seed=11,
            presence_penalty=0.125,
            frequency_penalty=-1,
            extra_body={
                "top_k": 5, "min_p": 0.01, "repetition_penalty": 1.5,
                "min_tokens": 2, "ignore_eos": True, "stop_token_ids": [3, 4],
            },
        )  # fmt: skip
        await it.openai.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=3, extra_body={"top_k": -1})
        first, second = seen
        assert (first.max_new_tokens, first.temperature, first.top_p, first.seed) == (7, 0.5, 0.25, 11)
        assert (first.presence_penalty, first.frequency_penalty) == (0.125, -1.0)
        assert (first.top_k, first.min_p, first.repetition_penalty) == (5, 0.01, 1.5)
        assert (first.min_new_tokens, first.ignore_eos, first.stop_token_ids) == (2, True, (3, 4))
        # OpenAI's defaults, where kvloom's own is greedy.
        assert (second.max_new_tokens, second.temperature, second.top_p, second.top_k) == (3, 1.0, 1.0, 0)


@pytest.mark.parametrize("stream", [True, False])
async def test_stop_string_over_tokens_ends_the_request(stream: bool) -> None:
    """The engine's request is aborted, which the client is not told: for it, this is a stop."""
    runner = ScriptedRunner({"x": b"one two STOP three" + b"." * 900}, step_seconds=0.002)
    async with served(runner) as it:
        options = {"include_usage": True}
        raw = await it.post(request_id="x", stop=["nowhere", "STOP"], stream=stream, stream_options=options)
        answers = events(raw.text) if stream else [raw.json()]
        assert "".join(choice["text"] for answer in answers for choice in answer["choices"]) == "one two "
        assert [choice["finish_reason"] for answer in answers for choice in answer["choices"]][-1] == "stop"
        assert answers[-1]["usage"]["completion_tokens"] == len("one two STOP")
        await it.idle()
        assert it.engine.statistics().scheduler.finished["abort"] == 1
        assert len(runner.steps) < 40


async def test_text_of_a_stop_token_is_left_out() -> None:
    async with served(ScriptedRunner({"x": b"one. two", "y": b"one. two"})) as it:
        stopped = await it.post(request_id="x", stop_token_ids=[ord(".")])
        assert stopped.json()["choices"][0] == {
            "index": 0, "text": "one", "logprobs": None, "finish_reason": "stop",
        }  # fmt: skip
        later = await it.post(request_id="y", stop_token_ids=[ord(".")], min_tokens=5)
        assert later.json()["choices"][0]["text"] == "one. two"


async def _streamed(it: Served, place: int, leave_after: int | None) -> str:
    """The text of one streaming request; with `leave_after` it hangs up after that many chunks."""
    prompt = list(range(1, 6 + place))
    stream = await it.openai.completions.create(model=MODEL, prompt=prompt, max_tokens=60, stream=True)
    text = ""
    async with stream:
        count = 0
        async for chunk in stream:
            text += chunk.choices[0].text
            count += 1
            if count == leave_after:
                break
    return text


@pytest.mark.parametrize("steps_in_flight", [1, 2])
async def test_b51_sixteen_streams_of_which_two_are_cancelled(steps_in_flight: int) -> None:
    """The others say what they would say alone, and the pages of the two come back at once."""
    limits = SchedulerConfig(max_running=16, steps_in_flight_max=steps_in_flight, prefill_chunk=8)
    async with served(SlowShadow(), config=limits) as it:
        tasks = [asyncio.create_task(_streamed(it, place, 10 if place in (3, 11) else None)) for place in range(16)]
        await eventually(lambda: it.live == 16, 5)
        # The two say a few tokens less before they leave than all others: only then are there 14, with 2 ended early.
        await eventually(lambda: it.engine.statistics().scheduler.finished.get("abort", 0) == 2, 5)
        steps = sum(it.engine.statistics().scheduler.steps.values())
        assert it.live == 14
        assert it.held_pages <= 14 * -(-(21 + 60) // 4)
        assert steps < 16 + 40  # both were still far from their end
        texts = await asyncio.gather(*tasks)
        for place, text in enumerate(texts):
            alone = bytes(continuation(list(range(1, 6 + place)), 60, 128)).decode()
            if place in (3, 11):
                assert alone.startswith(text)
                assert len(text) < 60
            else:
                assert text == alone
        await it.idle()


async def test_b46_split_characters_in_interleaved_streams() -> None:
    """Over HTTP, one token per chunk: streamed and whole answers say the same, and each event is valid JSON."""
    scripts = {
        "emoji": "a\U0001f600b\U0001f469\u200d\U0001f467".encode(),
        "accent": "e\u0301\u65e5\u672c".encode(),
        "stray": b"ok \xff fine \xf0\x9f!",
        "cut": b"cut \xe6\x97",
    }
    scripts |= {f"{name}-{again}": said for name, said in scripts.items() for again in ("whole", "again")}
    async with served(ScriptedRunner(scripts, step_seconds=0.001)) as it:

        async def streamed(name: str) -> list[str]:
            stream = await it.openai.completions.create(
                model=MODEL, prompt="hi", stream=True, extra_headers={"X-Request-Id": name}
            )
            return [chunk.choices[0].text async for chunk in stream]

        names = [name for name in scripts if "-" not in name]
        for name, said in zip(names, await asyncio.gather(*map(streamed, names)), strict=True):
            whole = (await it.post(request_id=f"{name}-whole")).json()["choices"][0]["text"]
            assert "".join(said) == whole == scripts[name].decode(errors="replace")
            assert len(said) > 2
        cut = (await it.post(request_id="cut-again", max_tokens=5)).json()
        assert cut["choices"][0] == {"index": 0, "text": "cut \ufffd", "logprobs": None, "finish_reason": "length"}
