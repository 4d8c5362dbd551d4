"""What the row kernels cost: `python -m benchmarks.kernels --out kernels.json`.

On a CUDA device: host time, the median of single calls into an idle queue; and device time, the median over replays of
a CUDA graph of many launches, divided by their number.  Elsewhere: the time of whole calls on the CPU.
Planning and uploading what the kernels read is not in these figures (`benchmarks.host_overhead` has it).
"""

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from kvloom.allocator.kernels import Kernels, kernels_for, warm_up

PAGE_SIZE = 16
DECODE_ROWS = (1, 64, 256, 1024, 4096)
EXTEND_SHAPES = ((1, 8192), (16, 2048), (64, 512), (256, 128), (1, 131_072), (1, 1_000_000))
DEVICE_BUDGETS_US = {"decode_rows 1024": 3.0, "decode_rows 4096": 6.0, "extend_rows 1 x 1000000": 15.0}
HOST_BUDGETS_US = {"extend_rows 256 x 128": 40.0}  # with planning and upload
CALLS = 200
LAUNCHES = 50  # in one graph
REPLAYS = 40


@dataclass(frozen=True)
class Figure:
    """One line of the table, in microseconds; None: not measured here, or no budget."""

    work: str
    host_us: float
    host_p99_us: float
    device_us: float | None
    host_budget_us: float | None
    device_budget_us: float | None


def decode_call(kernels: Kernels, device: torch.device, rows_n: int) -> Callable[[], None]:
    """A decode step; one row in 16 enters a new page."""
    rng = random.Random(0)
    width = 64
    seq_lens = [rng.randint(1, width * PAGE_SIZE) for _ in range(rows_n)]
    new_pages = [rng.randint(1, 10**6) if (length - 1) % PAGE_SIZE == 0 else 0 for length in seq_lens]
    table = torch.randint(1, 10**6, (rows_n + 1, width), dtype=torch.int32, device=device)
    rows, lengths, pages = (
        torch.tensor(values, dtype=torch.int32, device=device)
        for values in (rng.sample(range(rows_n + 1), rows_n), seq_lens, new_pages)
    )
    out = torch.empty(rows_n, dtype=torch.int64, device=device)
    return lambda: kernels.decode_rows(table, rows, lengths, pages, out, PAGE_SIZE)


def extend_call(kernels: Kernels, device: torch.device, rows_n: int, tokens: int) -> Callable[[], None]:
    """New rows of `tokens` tokens each."""
    per_row = -(-tokens // PAGE_SIZE)
    table = torch.zeros(rows_n + 1, per_row, dtype=torch.int32, device=device)
    rows = torch.randperm(rows_n, device=device).to(torch.int32)
    prefix_lens = torch.zeros(rows_n, dtype=torch.int32, device=device)
    seq_lens = prefix_lens + tokens
    new_pages = torch.randperm(rows_n * per_row, device=device).to(torch.int32) + 1
    starts = torch.arange(rows_n + 1, dtype=torch.int32, device=device)
    page_start, token_start = starts * per_row, starts * tokens
    out = torch.empty(rows_n * tokens, dtype=torch.int64, device=device)
    return lambda: kernels.extend_rows(
        table, rows, prefix_lens, seq_lens, new_pages, page_start, token_start, out, PAGE_SIZE
    )


def host_times_us(call: Callable[[], None], wait: Callable[[], None]) -> list[float]:
    """Single calls, each after the device has nothing left to do, so that no full queue holds the host up."""
    times = []
    for _ in range(CALLS // 10 + CALLS):
        wait()
        begin = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - begin) / 1e3)
    return sorted(times[CALLS // 10 :])


def device_time_us(call: Callable[[], None]) -> float:
    """One launch among many in a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            call()
    graph.replay()
    times: list[float] = []
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    for _ in range(REPLAYS):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / LAUNCHES)
    return statistics.median(times)


def measure(device: torch.device) -> list[Figure]:
    """All shapes, warmed up."""
    on_device = device.type == "cuda"
    warm_up(device)
    kernels = kernels_for(device)
    wait = torch.cuda.synchronize if on_device else lambda: None
    calls = {f"decode_rows {rows_n}": decode_call(kernels, device, rows_n) for rows_n in DECODE_ROWS}
    calls |= {
        f"extend_rows {rows_n} x {tokens}": extend_call(kernels, device, rows_n, tokens)
        for rows_n, tokens in EXTEND_SHAPES
    }
    figures = []
    for work, call in calls.items():
        host = host_times_us(call, wait)
        figures.append(
            Figure(
                work,
                round(statistics.median(host), 2),
                round(host[len(host) * 99 // 100], 2),
                round(device_time_us(call), 2) if on_device else None,
                HOST_BUDGETS_US.get(work) if on_device else None,
                DEVICE_BUDGETS_US.get(work) if on_device else None,
            )
        )
    return figures


def table(figures: list[Figure]) -> str:
    """Plain text; a budget stands behind the figure that it is for."""

    def cell(value: float | None, budget: float | None = None) -> str:
        return ("-" if value is None else f"{value:.2f}") + ("" if budget is None else f" (<= {budget:g})")

    lines = [("us, medians", "host", "host p99", "device")]
    lines += [
        (
            figure.work,
            cell(figure.host_us, figure.host_budget_us),
            cell(figure.host_p99_us),
            cell(figure.device_us, figure.device_budget_us),
        )
        for figure in figures
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in lines
    )


def surroundings(device: torch.device) -> dict[str, str]:
    """What the figures depend on."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {"device": name, "torch": torch.__version__, "triton": triton, "page_size": str(PAGE_SIZE)}


def main() -> None:
    """Print the table; write the JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    where = surroundings(device)
    figures = measure(device)
    print(", ".join(f"{name} {value}" for name, value in where.items()))
    print(table(figures))
    if arguments.out is not None:
        arguments.out.write_text(
            json.dumps(where | {"figures": [asdict(figure) for figure in figures]}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
