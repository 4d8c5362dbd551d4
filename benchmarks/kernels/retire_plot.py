"""Retiring must cost what it retires, whatever the size of the pool: measures it and draws the plot.

python -m benchmarks.kernels.retire_plot benchmarks/results/retire.svg     (needs matplotlib)
"""

import sys
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.kernels.steps import RETIRED, retire
from benchmarks.kernels.timing import figure

POOLS = (10_000, 40_000, 100_000, 400_000, 1_000_000, 4_000_000)  # pages
PAGE_SIZES = (1, 16, 64)


def main() -> None:
    """One line for each page size and crowd; where a pool is too small for the crowd, nothing."""
    device = torch.device("cpu")
    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "kvloom"  # the same figures give the same file
    _, axes = plt.subplots(figsize=(7, 4.5))
    table = Table("retired (us, median)", *(f"{pages:,} pages" for pages in POOLS))
    for page_size in PAGE_SIZES:
        for rows_n, tokens in RETIRED:
            need = rows_n * -(-tokens // page_size)
            sizes = [pages for pages in POOLS if pages >= need]
            lengths = np.full(rows_n, tokens, np.int32)
            times = [figure(retire(device, page_size, lengths, "", pages), device).host_us for pages in sizes]
            name = f"{rows_n} x {tokens:,}, page {page_size} ({need:,} pages)"
            axes.plot(sizes, times, marker="o", markersize=3, label=name)
            cells = dict(zip(sizes, times, strict=True))
            table.add_row(name, *(f"{cells[pages]:,.0f}" if pages in cells else "-" for pages in POOLS))
    axes.set(xscale="log", yscale="log", xlabel="pages in the pool", ylabel="host time of one free group (us)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    plt.tight_layout()
    plt.savefig(Path(sys.argv[1]), metadata={"Date": None})
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
