"""What the prefix cache costs: `python -m benchmarks.prefix [--out prefix.json] [--plot prefix_growth.svg]`.

1,000 cached sequences of 8,192 tokens that share their first 1,024, on pages of 16; then the same from 1,000 to
1,000,000 cached pages.  Microseconds scaled by a gauge run alongside (`benchmarks/clock.py`); the best medians of some
fresh processes.  The peers' figures were taken with the same clock, on another day.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.prefix.steps import LENGTH, PAGE_SIZE, measure

VERBS = {"look_up": "look up 8,192 cached tokens", "insert": "insert 8,192, 1,024 shared", "evict": "evict 1,000 pages"}
GOALS = {"look_up": 26, "insert": 35, "evict": 50}
PEERS = {  # scaled us; what several versions of a peer took, from the best to the worst
    "vLLM": {"look_up": "1,739-2,750", "insert": "1,068", "evict": "1,013"},
    "SGLang, native": {"look_up": "73", "insert": "276", "evict": "185"},
    "SGLang, Python": {"look_up": "96-120", "insert": "241-265", "evict": "255-440"},
    "mini-sglang": {"look_up": "82", "insert": "77", "evict": "331"},
    "transformers": {"look_up": "1,349", "insert": "2,144", "evict": "1,328"},
}
SEQUENCES = 1000
GROWTH = (2, 6, 20, 63, 195, 625, 1953)  # sequences of 512 pages

Figures = dict[str, dict[str, float]]


def one_process(sequences: int, rounds: int) -> Figures:
    """What one fresh process reports."""
    clock = measure(sequences, rounds)
    return {
        verb: {
            "median": round(statistics.median(clock.scaled[verb]) / 1e3, 1),
            "p99": round(float(np.percentile(clock.scaled[verb], 99)) / 1e3, 1),
            "raw_median": round(statistics.median(clock.parts[verb]) / 1e3, 1),
        }
        for verb in VERBS
    }


def best_of(processes: int, sequences: int, rounds: int) -> Figures:
    """For each verb the process with the smallest median."""
    command = [sys.executable, "-m", "benchmarks.prefix", "--child", str(sequences), "--rounds", str(rounds)]
    runs = [json.loads(subprocess.check_output(command)) for _ in range(processes)]
    return {verb: min((run[verb] for run in runs), key=lambda figures: figures["median"]) for verb in VERBS}


def plot(growth: dict[int, Figures], path: Path) -> None:
    """One line for each verb over the pages that are cached."""
    import matplotlib as mpl  # noqa: PLC0415 - only who plots needs it
    import matplotlib.pyplot as plt  # noqa: PLC0415

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "kvloom"  # the same figures give the same file
    _, axes = plt.subplots(figsize=(7, 4.5))
    for verb, name in VERBS.items():
        axes.plot(
            list(growth), [figures[verb]["median"] for figures in growth.values()], marker="o", markersize=3, label=name
        )
    axes.set(xscale="log", xlabel="cached pages", ylabel="host time of one call (scaled us, median)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    plt.tight_layout()
    plt.savefig(path, metadata={"Date": None})


def main() -> None:
    """Print two tables; write the JSON and the plot if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--plot", type=Path, help="SVG file to write (needs matplotlib)")
    options = parser.parse_args()
    if options.child:
        print(json.dumps(one_process(options.child, options.rounds)))
        return
    console = Console(width=130)
    found = best_of(options.processes, SEQUENCES, options.rounds)
    table = Table("scaled us", "kvloom", "p99", "raw", "goal", *PEERS)
    for verb, name in VERBS.items():
        us = found[verb]
        table.add_row(
            name, f"{us['median']:,.0f}", f"{us['p99']:,.0f}", f"{us['raw_median']:,.0f}", str(GOALS[verb]),
            *(peer[verb] for peer in PEERS.values()),
        )  # fmt: skip
    console.print(table)
    pages = LENGTH // PAGE_SIZE
    growth = {sequences * pages: best_of(1, sequences, options.rounds) for sequences in GROWTH}
    grown = Table("cached pages", *VERBS.values())
    for size, figures in growth.items():
        grown.add_row(f"{size:,}", *(f"{figures[verb]['median']:,.0f}" for verb in VERBS))
    console.print(grown)
    if options.plot:
        plot(growth, options.plot)
    if options.out:
        machine = {"python": platform.python_version(), "machine": platform.machine(), "numpy": np.__version__}
        result = {"machine": machine, "goals": GOALS, "peers": PEERS, "kvloom": found, "growth": growth}
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
