"""Host and device times of small pieces of work, in microseconds."""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

CALLS = 200
ROUNDS = 12  # of calls; the fastest counts, since virtual cores flip between two speeds for tens of milliseconds
LAUNCHES = 50  # in one graph
REPLAYS = 40


@dataclass(frozen=True)
class Work:
    """Something to time.

    call    once, timed
    ready   before each call, not timed
    launch  what runs on the device, for graphs; None: nothing, or nothing by itself
    """

    name: str
    call: Callable[[], object]
    ready: Callable[[], object] = lambda: None
    launch: Callable[[], None] | None = None
    host_goal: float | None = None
    device_goal: float | None = None


@dataclass(frozen=True)
class Figure:
    """One line of the table; None: not measured here, or no goal."""

    work: str
    host_us: float
    host_p99_us: float
    device_us: float | None
    host_goal_us: float | None
    device_goal_us: float | None


def figure(work: Work, device: torch.device) -> Figure:
    """Medians, after warm-up; of host times those of the fastest round."""
    on_device = device.type == "cuda"
    wait = torch.cuda.synchronize if on_device else lambda: None
    host = min((_host_times(work, wait) for _ in range(ROUNDS)), key=statistics.median)
    return Figure(
        work.name,
        round(statistics.median(host), 2),
        round(host[len(host) * 99 // 100], 2),
        round(_device_time(work.launch), 2) if on_device and work.launch else None,
        work.host_goal,
        work.device_goal,
    )


def _host_times(work: Work, wait: Callable[[], None]) -> list[float]:
    """Single calls, each after the device has nothing left to do, so that no full queue holds the host up."""
    times = []
    gc.disable()  # a collection would be timed as if it were ours
    try:
        for _ in range(CALLS // 10 + CALLS):
            work.ready()
            wait()
            begin = time.perf_counter_ns()
            work.call()
            times.append((time.perf_counter_ns() - begin) / 1e3)
    finally:
        gc.enable()
    return sorted(times[CALLS // 10 :])


def _device_time(launch: Callable[[], None]) -> float:
    """One launch among many in a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            launch()
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
