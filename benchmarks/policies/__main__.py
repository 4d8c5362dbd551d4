"""What each eviction policy hits: `python -m benchmarks.policies [--out policies.json] [--plot policies.svg]`.

A synthetic trace of chats and batch jobs of many tenants goes through the prefix cache with each policy and several
capacities, next to the optimum, which knows the future.  Counts only: the same for the same seed, wherever it runs.
"""

import argparse
import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import lru_cache
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.policies.chats import Crowd, Request, Shape
from benchmarks.policies.optimum import Future
from benchmarks.policies.replay import Outcome, Setting, replay
from benchmarks.policies.report import hits, important, plot, regrets, settings, totals, values


@lru_cache(maxsize=1)
def made(shape: Shape) -> tuple[list[Request], Future]:
    """The trace and its future, once in each process."""
    trace = Crowd(shape).requests()
    return trace, Future(trace, shape.page_size)


def run(shape: Shape, setting: Setting) -> Outcome:
    """One replay."""
    return replay(setting, *made(shape))


def run_all(shape: Shape, wanted: Sequence[Setting], processes: int, console: Console) -> dict[Setting, Outcome]:
    """All replays, in the order asked for, with a bar while they run."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    found: dict[Setting, Outcome] = {}
    with ProcessPoolExecutor(processes) as pool, Progress(*columns, console=console) as progress:
        bar = progress.add_task("replays", total=len(wanted))
        futures = {pool.submit(run, shape, setting): setting for setting in wanted}
        try:
            for future in as_completed(futures):
                setting = futures[future]
                found[setting] = future.result()
                progress.update(bar, advance=1, description=f"{setting.policy}, {setting.capacity:,} pages")
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return {setting: found[setting] for setting in wanted}


def main() -> None:
    """Print three tables; write the JSON and the plot if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=Shape.seed)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--plot", type=Path, help="SVG file to write (needs matplotlib)")
    options = parser.parse_args()
    console = Console(width=150)
    shape = Shape(seed=options.seed)
    trace, future = made(shape)
    sums = totals(trace, future)
    console.print(", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in sums.items()), highlight=False)
    found = run_all(shape, settings(future), options.processes, console)
    for table in (hits, important, regrets):
        console.print(table(found, future))
    if options.plot:
        plot(found, future, options.plot)
    if options.out:
        options.out.write_text(json.dumps(values(shape, sums, found), indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
