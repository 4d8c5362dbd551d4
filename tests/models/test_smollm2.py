"""A real model: SmolLM2 answers eight chats at once with the tokens that it generates for each alone."""

import anyio
import pytest
import torch

from examples.demo import QUESTIONS
from examples.smollm2 import ModelUnavailable, ensure_model, load
from kvloom.allocator import KVMemory
from kvloom.scheduler import Engine, SamplingParams, SchedulerConfig
from kvloom.scheduler.runners import TransformersRunner

NEW_TOKENS = 24


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_eight_chats_at_once_equal_generate() -> None:
    try:
        folder = await anyio.to_thread.run_sync(ensure_model)
    except ModelUnavailable as error:
        pytest.skip(str(error))
    model, tokenizer = load(folder)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    texts = [str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)) for chat in chats]
    prompts: list[list[int]] = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
        expected.append(out[0, len(prompt) :].tolist())

    said: list[list[int]] = [[] for _ in prompts]

    async def ask(i: int) -> None:
        said[i] = (await engine.generate(prompts[i], SamplingParams(max_new_tokens=NEW_TOKENS))).token_ids

    runner = TransformersRunner(model)
    memory = KVMemory.for_runner(
        runner, capacity_tokens=768, page_size=16
    )  # two letters of 284 tokens do not fit at once
    config = SchedulerConfig(max_running=8, max_batch_tokens=128, prefill_chunk=48, steps_in_flight_max=2)
    async with Engine(runner, memory, config) as engine, anyio.create_task_group() as tasks:
        for i in range(len(prompts)):
            tasks.start_soon(ask, i)
    assert said == expected
    memory.check()
    pool = memory.statistics().pools["full"]
    assert (pool.held, pool.quarantined, pool.free + pool.evictable) == (0, 0, pool.capacity)
