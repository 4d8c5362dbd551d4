"""KV memory of a hybrid model: window layers in a pool of their own, against one pool for all layers.

A tiny model in the manner of Gemma 3 (five of six layers look back on 512 tokens) at contexts of 8,192. With one pool
a request takes its tokens in each layer, by arithmetic; with two its bytes are measured in the real engine on the
real model while it generates behind its prompt: pages in use, by pool, times their bytes. How many requests fit into
the same bytes is counted in the real engine too, over a runner that computes nothing but has the same pools.

    python -m benchmarks.window_memory [--out benchmarks/results/window_memory.json]
"""

import argparse
import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from kvloom.allocator import KVMemory, NullPrefixCache, PoolSpec
from kvloom.scheduler import Engine, SamplingParams, SchedulerConfig
from kvloom.scheduler.runners import ModelRunner, ToyRunner, TransformersRunner

CONTEXT = 8192  # tokens of a request at its end
NEW = 64  # of them generated
WINDOW = 512
PAGE_SIZE = 16
BUDGET = 2**27  # bytes of KV in which requests are counted


def hybrid() -> Gemma3ForCausalLM:
    """Six layers, the last of them looks back on everything."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=6, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, query_pre_attn_scalar=32, max_position_embeddings=CONTEXT,
        sliding_window=WINDOW, layer_types=["sliding_attention"] * 5 + ["full_attention"], eos_token_id=None,
    )  # fmt: skip
    return Gemma3ForCausalLM(config)


class Poolful(ToyRunner):
    """A toy that has the pools of a model, and leaves them empty."""

    def __init__(self, pools: tuple[PoolSpec, ...]) -> None:
        super().__init__(max_seq=CONTEXT)
        self._spec = replace(self._spec, pools=pools)


async def bytes_of_request(runner: ModelRunner, page_bytes: Mapping[str, int]) -> int:
    """Most bytes in use while one request generates."""
    memory = KVMemory.for_runner(
        runner, capacity_tokens={spec.name: CONTEXT for spec in runner.spec.pools}, page_size=PAGE_SIZE
    )
    prompt = np.random.default_rng(0).integers(0, 256, CONTEXT - NEW).tolist()

    def used() -> int:
        pools = memory.statistics().pools
        return sum(pool.active * page_bytes[name] for name, pool in pools.items())

    generating = []
    params = SamplingParams(max_new_tokens=NEW)
    async with (
        Engine(runner, memory, SchedulerConfig(max_running=1)) as engine,
        engine.open(prompt, params) as stream,
    ):
        async for _ in stream:
            generating.append(used())
    return max(generating)


async def requests_at_once(pools: tuple[PoolSpec, ...]) -> int:
    """How many requests of this context run at the same time in `BUDGET` bytes."""
    runner = Poolful(pools)
    memory = KVMemory.for_runner(
        runner, memory_bytes=BUDGET, page_size=PAGE_SIZE, lengths=[CONTEXT], prefix_cache=NullPrefixCache()
    )
    most = 0
    config = SchedulerConfig(max_running=256, max_batch_tokens=CONTEXT, prefill_chunk=512)
    async with Engine(runner, memory, config) as engine:

        async def ask(number: int) -> None:
            nonlocal most
            prompt = np.full(CONTEXT - NEW, number % 256)
            async with engine.open(prompt.tolist(), SamplingParams(max_new_tokens=NEW)) as stream:
                async for _ in stream:
                    most = max(most, engine.statistics().scheduler.decoding)

        await asyncio.gather(*(ask(number) for number in range(120)))
    return most


async def measure() -> dict[str, dict[str, float]]:
    """The table, by kind of memory."""
    runner = TransformersRunner(hybrid())
    pools = runner.spec.pools
    page_bytes = {spec.name: spec.bytes_per_token * PAGE_SIZE for spec in pools}
    one = pools[0].bytes_per_token  # of the one layer that sees everything
    generating = await bytes_of_request(runner, page_bytes)
    together = (replace(pools[0], layers=tuple(range(6))),)
    ideal = CONTEXT * one + 5 * WINDOW * one
    full = CONTEXT * 6 * one
    return {
        "one pool for all layers": {"bytes": full, "ideal": full, "requests": await requests_at_once(together)},
        "a pool for the window layers": {
            "bytes": generating, "ideal": ideal, "requests": await requests_at_once(pools),
        },
    }  # fmt: skip


def main() -> None:
    """Measure, show, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found = asyncio.run(measure())
    table = Table("memory", "KiB per request of 8,192", "ideal", "over it", f"requests in {BUDGET // 2**20} MiB")
    for kind, row in found.items():
        over = row["bytes"] / row["ideal"] - 1
        table.add_row(
            kind, f"{row['bytes'] / 1024:,.0f}", f"{row['ideal'] / 1024:,.0f}", f"{over:.1%}", f"{row['requests']:.0f}"
        )
    Console(width=110).print(table)
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
