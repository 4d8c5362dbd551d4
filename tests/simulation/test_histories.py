"""Random histories: a failing seed is in the test's name and replays."""

from collections import Counter
from dataclasses import replace

import pytest

from kvloom.allocator import PoolSpec
from kvloom.scheduler.runners.shadow import SHADOW_POOL
from tests.simulation.history import History
from tests.simulation.memory_history import MemoryHistory


def windowed(window: int) -> PoolSpec:
    return replace(SHADOW_POOL, name="swa", layers=(1,), window=window)


# A window of one token, smaller than a page, across pages, and larger than most prompts.
KINDS: dict[str, tuple[PoolSpec, ...]] = {"full": (SHADOW_POOL,)}
KINDS |= {f"full and a window of {window}": (SHADOW_POOL, windowed(window)) for window in (1, 3, 8, 40)}
KINDS |= {f"a window of {window} alone": (windowed(window),) for window in (1, 8, 17)}
KINDS["a window of 5 and full"] = (windowed(5), SHADOW_POOL)
KINDS["two windows and full"] = (windowed(3), replace(SHADOW_POOL, name="wide", layers=(2,), window=20), SHADOW_POOL)
HOST_BYTES = (0, 400, 2**20)  # computed again; room for a few; room for all


@pytest.mark.parametrize("block", range(4))
@pytest.mark.parametrize("kind", KINDS)
def test_random_histories_break_no_rule(kind: str, block: int) -> None:
    """25 seeds, depth 1 and 2 in turn: 1,000 histories in all."""
    for seed in range(block * 25, block * 25 + 25):
        depth, host_bytes = seed % 2 + 1, HOST_BYTES[seed % 3]
        try:
            History(seed, depth, KINDS[kind], host_bytes).run()
        except BaseException as error:
            error.add_note(f"replay with History({seed}, {depth}, KINDS[{kind!r}], {host_bytes}).run()")
            raise


@pytest.mark.parametrize("kind", KINDS)
def test_random_histories_of_memory_alone(kind: str) -> None:
    """60 seeds of each kind; with forks, which no request asks for yet."""
    for seed in range(60):
        try:
            MemoryHistory(seed, KINDS[kind]).run()
        except BaseException as error:
            error.add_note(f"replay with MemoryHistory({seed}, KINDS[{kind!r}]).run()")
            raise


def test_histories_reach_what_they_are_for() -> None:
    """The histories above are worth something only if they preempt, overshoot, fail, read, reuse and come back."""
    seen: Counter[str] = Counter()
    wasted: set[str] = set()
    finished: set[str] = set()
    for seed in range(30):
        history = History(seed, 2, KINDS["full and a window of 8"], HOST_BYTES[seed % 3])
        history.run()
        scheduler, memory = history.core.statistics(), history.memory.statistics()
        seen += Counter(
            preemptions=scheduler.preemptions,
            failed_steps=scheduler.failed_steps,
            read=history.runner.checked_slots,
            cached=scheduler.prompt_tokens_cached,
            duplicates=memory.prefix.duplicates,
            evicted=sum(memory.prefix.evicted.values()),
            trimmed=memory.pools["swa"].freed.get("window", 0),
            back=memory.host.bytes_in,
        )
        wasted |= {reason for reason, count in scheduler.wasted_tokens.items() if count}
        finished |= {str(reason) for reason in scheduler.finished}
    assert seen["read"] > 5_000
    least = {"preemptions": 20, "failed_steps": 20, "cached": 50, "duplicates": 50, "evicted": 200, "trimmed": 50}
    assert all(seen[name] > count for name, count in {**least, "back": 1000}.items()), seen
    assert wasted == {"preempted", "aborted", "overshoot"}
    assert finished >= {"stop", "length", "abort", "error", "deadline"}


def test_histories_load_what_was_evicted() -> None:
    loaded = alone = 0
    for seed in range(40):
        scheduled, history = History(seed, seed % 2 + 1, KINDS["full"]), MemoryHistory(seed, KINDS["full"])
        scheduled.run()
        history.run(400)
        loaded += scheduled.core.statistics().prompt_tokens_loaded
        alone += history.loaded
    assert loaded > 50
    assert alone > 5


def test_memory_histories_reach_what_they_are_for() -> None:
    seen: Counter[str] = Counter()
    for seed in range(60):
        history = MemoryHistory(seed, KINDS["full and a window of 8"])
        history.run()
        seen += Counter(forks=history.forks, restored=history.restored, hits=history.hits)
        seen += Counter({reason: count for (_, reason), count in history.memory.statistics().prefix.evicted.items()})
    assert min(seen[name] for name in ("forks", "restored", "hits", "capacity", "watermark", "ttl", "reset")) > 5, seen
