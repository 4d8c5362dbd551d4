"""What allocation costs: `python -m benchmarks.kernels [--out kernels.json]`.

Host: the median of 200 single calls into an idle queue, in the fastest of twelve rounds.  Device (CUDA only): the
median over replays of a CUDA graph of many launches, divided by their number.
"""

import argparse
import json
import platform
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.kernels.launches import launches
from benchmarks.kernels.steps import decode_steps, extend_steps, retirements
from benchmarks.kernels.timing import Figure, Work, figure
from kvloom.allocator.kernels import kernels_for, warm_up

PAGE_SIZE = 16


def works(device: torch.device) -> Iterator[Work]:
    """Everything in the table, made when its turn comes: some of it is large."""
    yield from launches(kernels_for(device), device, PAGE_SIZE)
    yield from decode_steps(device, PAGE_SIZE)
    yield from extend_steps(device, PAGE_SIZE)
    yield from retirements(device)


def surroundings(device: torch.device) -> dict[str, str]:
    """What the figures depend on."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {"device": name, "torch": torch.__version__, "triton": triton, "page_size": str(PAGE_SIZE)}


def cell(value: float | None, goal: float | None = None) -> str:
    """A figure, with its goal behind it."""
    return ("-" if value is None else f"{value:,.1f}") + ("" if goal is None else f" (goal {goal:g})")


def main() -> None:
    """Print the table; write the JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    device = torch.device(options.device)
    warm_up(device)
    console = Console(width=110)
    table = Table("us, medians", "host", "host p99", "device", title=", ".join(surroundings(device).values()))
    figures: list[Figure] = []
    for work in works(device):
        console.print(f"[dim]{work.name}[/dim]", highlight=False)
        found = figure(work, device)
        figures.append(found)
        table.add_row(
            found.work,
            cell(found.host_us, found.host_goal_us),
            cell(found.host_p99_us),
            cell(found.device_us, found.device_goal_us),
        )
    console.print(table)
    if options.out is not None:
        figures_json = [asdict(found) for found in figures]
        options.out.write_text(json.dumps(surroundings(device) | {"figures": figures_json}, indent=1) + "\n")


if __name__ == "__main__":
    main()
