"""Host time per decode step: commit, plan, bind, deliver, at 1 to 1,024 running sequences.

The real loop (`StepLoop`), core, memory and streams, with `ToyRunner` called in between and not counted.  Every
sequence has about 512 tokens on pages of 16, so that one in 16 enters a new page each step, and a reader that waits:
waking it counts, what the reader then does not.  Figures are microseconds scaled by a gauge run alongside
(`clock.py`), so that machines whose speed flips can be compared; the smallest median of some fresh processes is shown,
with the medians of its parts (what is left is delivering and the loop itself).

    python -m benchmarks.host_overhead [--processes 3] [--out benchmarks/results/host_overhead.json]
"""

import argparse
import asyncio
import json
import platform
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.clock import Clock, now
from kvloom.allocator import Batch, KVMemory
from kvloom.scheduler import Request, SamplingParams, SchedulerConfig, SchedulerCore, StepResult, TokenStream
from kvloom.scheduler.board import Board
from kvloom.scheduler.config import ModelLimits
from kvloom.scheduler.runners import ToyRunner
from kvloom.scheduler.step_loop import StepLoop

PROMPT = 480
STEPS = 300
PARTS = ("plan", "bind", "commit")
TARGETS = {1: 40, 16: 70, 64: 120, 256: 350, 1024: 1250}  # scaled us


async def read(stream: TokenStream) -> None:
    """A reader that does nothing with its tokens."""
    async for _ in stream:
        pass


class Stopwatch:
    """Time spent in some calls of the step under way, ns by name."""

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()

    def watch(self, owner: object, name: str) -> None:
        """Put a timer around `owner.name`; costs a step about a quarter of a microsecond."""
        call = getattr(owner, name)

        def timed(*arguments: object) -> object:
            start = now()
            try:
                return call(*arguments)
            finally:
                self.spent[name] += now() - start

        setattr(owner, name, timed)


async def measure(running: int) -> Clock:
    """Times of each decode step and of its parts."""
    runner = ToyRunner(vocab_size=256, max_seq=4096)
    memory = KVMemory.for_runner(runner, capacity_tokens=(running + 1) * 1024, page_size=16, max_rows=running + 8)
    spec = runner.spec
    config = SchedulerConfig(max_running=running, max_batch_tokens=max(8192, running), prefill_chunk=PROMPT)
    core = SchedulerCore(memory, config, ModelLimits(spec.vocab_size, spec.max_seq, spec.eos_ids))

    board = Board(lambda: (core.statistics(), memory.statistics()), time.monotonic)  # as the engine does after a turn
    loop = StepLoop(core, memory, config, time.monotonic, after_turn=board.refresh_if_due)
    batches: list[Batch] = []
    loop.launch_with(batches.append, close=batches.clear)
    rng = np.random.default_rng(0)
    readers = []
    for i in range(running):  # lengths spread over one page, so that page crossings are spread too
        stream = TokenStream(f"r{i}")
        prompt = rng.integers(0, 256, PROMPT - i % 16, dtype=np.int32)
        loop.add(Request(id=stream.request_id, prompt=prompt, params=SamplingParams()), 0.0, stream)
        readers.append(asyncio.create_task(read(stream)))
    clock, stopwatch = Clock(), Stopwatch()
    stopwatch.watch(core, "plan")
    stopwatch.watch(core, "commit")
    stopwatch.watch(memory, "bind")
    for step in range(STEPS + 60):
        await asyncio.sleep(0)  # the readers' turn
        stopwatch.spent.clear()
        start = now()
        loop.turn()
        spent = now() - start
        parts = {part: stopwatch.spent[part] for part in PARTS}
        batch = batches.pop()
        output = runner.forward(batch)
        assert output.next_tokens is not None
        loop.report(step, StepResult(output.next_tokens.numpy()))
        if step >= 60 and batch.kind == "decode":
            clock.add(total=spent, **parts)
    clock.flush()
    for reader in readers:
        reader.cancel()
    return clock


def one_process(running: int) -> dict[str, float]:
    """What one fresh process reports, in microseconds."""
    clock = asyncio.run(measure(running))
    total = clock.scaled["total"]
    return {
        "steps": len(total),
        "median": round(statistics.median(total) / 1e3, 2),
        "p99": round(float(np.percentile(total, 99)) / 1e3, 2),
        "raw_median": round(statistics.median(clock.parts["total"]) / 1e3, 2),
        **{part: round(statistics.median(clock.scaled[part]) / 1e3, 2) for part in PARTS},
    }


def main() -> None:
    """Print one table and write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="*", default=list(TARGETS))
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(one_process(options.child)))
        return
    table = Table("running", "scaled us per step", "p99", "us per row", *PARTS, "must reach", "raw us")
    results = {}
    for running in options.running:
        print(f"{running} running ...", file=sys.stderr)
        command = [sys.executable, "-m", "benchmarks.host_overhead", "--child", str(running)]
        runs = [json.loads(subprocess.check_output(command)) for _ in range(options.processes)]
        best = min(runs, key=lambda run: run["median"])
        results[running] = {"best": best, "runs": runs}
        table.add_row(
            f"{running:,}", f"{best['median']:,.0f}", f"{best['p99']:,.0f}", f"{best['median'] / running:.2f}",
            *(f"{best[part]:,.0f}" for part in PARTS), f"{TARGETS.get(running, 0):,}", f"{best['raw_median']:,.0f}",
        )  # fmt: skip
    Console().print(table)
    if options.out:
        machine = {"python": platform.python_version(), "machine": platform.machine(), "numpy": np.__version__}
        options.out.write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
