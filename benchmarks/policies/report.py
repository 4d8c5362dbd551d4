"""What came out, as tables, a plot and values for JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.policies.chats import Request, Shape
from benchmarks.policies.optimum import Future, enough
from benchmarks.policies.replay import CLAIRVOYANT, OPTIMUM, Outcome, Setting

DIVISORS = (128, 64, 32, 16, 8, 4, 2, 1)  # capacities as parts of all distinct pages, each twice the one before
POLICIES = ("lru", "lfu", "fifo", "priority")
ROWS = (*POLICIES, CLAIRVOYANT, OPTIMUM)
DEFAULT_GHOSTS = 65_536  # pages
Found = Mapping[Setting, Outcome]


def totals(trace: Sequence[Request], future: Future) -> dict[str, float]:
    """What a trace amounts to; pages are distinct ones, ratios those of an unlimited cache."""
    prompt = sum(request.prompt for request in trace)
    important = [request for request in trace if request.priority]
    again = sum(map(len, future.next_use)) - future.distinct  # pages that were there before
    return {
        "requests": len(trace),
        "prompt_tokens": prompt,
        "answer_tokens": sum(len(request.tokens) - request.prompt for request in trace),
        "important_requests": len(important),
        "important_prompt_tokens": sum(request.prompt for request in important),
        "pages": future.distinct,
        "important_pages": Future(important, future.page_size).distinct,
        "enough_pages": enough(future),
        "longest_request_pages": max(map(len, future.next_use)),
        "unlimited_hit_ratio": round(again * future.page_size / prompt, 4),
    }


def capacities(future: Future) -> list[int]:
    """Pages."""
    return [-(-future.distinct // divisor) for divisor in DIVISORS]


def settings(future: Future) -> list[Setting]:
    """All that is run.  The ghosts of a cache are as many as its pages: what twice the capacity would have."""
    sizes = capacities(future)
    found = [Setting(policy, size, size) for size in sizes for policy in ROWS]
    found += [Setting("lru", size, DEFAULT_GHOSTS) for size in sizes[:-1]]
    return found + [Setting("lru", size + DEFAULT_GHOSTS, size) for size in sizes[:-1]]


def _head(future: Future) -> list[str]:
    return [f"{size:,}\n{1 / divisor:.1%}" for size, divisor in zip(capacities(future), DIVISORS, strict=True)]


def hits(found: Found, future: Future) -> Table:
    """Hit tokens for each prompt token, and their share of the optimum's."""
    table = Table("hit ratio (share of\nthe optimum) with pages", *_head(future))
    for policy in ROWS:
        cells = []
        for size in capacities(future):
            ratio, best = (found[Setting(name, size, size)].ratio for name in (policy, OPTIMUM))
            cells.append(f"{ratio:.1%}" if policy == OPTIMUM else f"{ratio:.1%} ({ratio / best:.0%})")
        table.add_row(policy, *cells)
    return table


def important(found: Found, future: Future) -> Table:
    """The hit ratio of requests with priority, and of all others."""
    table = Table("hit ratio of requests with\npriority / without, with pages", *_head(future))
    for policy in ROWS:
        outcomes = [found[Setting(policy, size, size)] for size in capacities(future)]
        others = [(one.hit - one.important_hit) / (one.prompt - one.important_prompt) for one in outcomes]
        table.add_row(
            policy, *(f"{one.important_ratio:.1%} / {other:.1%}" for one, other in zip(outcomes, others, strict=True))
        )
    return table


def regrets(found: Found, future: Future) -> Table:
    """Tokens regretted, and those that as many more pages as there are ghosts would have hit; of all prompt tokens."""
    table = Table("regret / more hits in a cache\nlarger by its ghosts", *_head(future)[:-1])
    sizes = capacities(future)[:-1]
    for policy in POLICIES:
        cells = []
        for size, twice in zip(sizes, capacities(future)[1:], strict=True):
            small, large = found[Setting(policy, size, size)], found[Setting(policy, twice, twice)]
            cells.append(f"{small.regret / small.prompt:.1%} / {large.ratio - small.ratio:.1%}")
        table.add_row(policy, *cells)
    cells = []
    for size in sizes:
        small, large = found[Setting("lru", size, DEFAULT_GHOSTS)], found[Setting("lru", size + DEFAULT_GHOSTS, size)]
        cells.append(f"{small.regret / small.prompt:.1%} / {large.ratio - small.ratio:.1%}")
    table.add_row(f"lru, {DEFAULT_GHOSTS:,} ghosts", *cells)
    return table


def values(shape: Shape, sums: dict[str, float], found: Found) -> dict[str, Any]:
    """Everything, for JSON.  `capacity` and `ghosts` in pages; all others of an outcome in tokens."""
    outcomes = [setting._asdict() | asdict(one) | {"ratio": round(one.ratio, 4)} for setting, one in found.items()]
    return {"numpy": np.__version__, "shape": asdict(shape), "totals": sums, "outcomes": outcomes}


def plot(found: Found, future: Future, path: Path) -> None:
    """Hit ratio over capacity, one line for each policy."""
    import matplotlib as mpl  # noqa: PLC0415 - only who plots needs it
    import matplotlib.pyplot as plt  # noqa: PLC0415

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "kvloom"  # the same figures give the same file
    _, axes = plt.subplots(figsize=(7, 4.5))
    sizes = capacities(future)
    for policy in ROWS:
        ratios = [found[Setting(policy, size, size)].ratio for size in sizes]
        style = "--" if policy in (OPTIMUM, CLAIRVOYANT) else "-"
        axes.plot(sizes, ratios, style, marker="o", markersize=3, label=policy)
    axes.axvline(enough(future), color="grey", linewidth=0.8, linestyle=":", label="enough for the optimum")
    axes.set(xscale="log", xlabel="pages in the pool", ylabel="hit tokens for each prompt token")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    plt.tight_layout()
    plt.savefig(path, metadata={"Date": None})
