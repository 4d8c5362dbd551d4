"""Random histories: a failing seed is in the test's name and replays."""

import pytest

from tests.simulation.history import History


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("block", range(10))
def test_random_histories_break_no_rule(block: int, depth: int) -> None:
    for seed in range(block * 10, block * 10 + 10):
        try:
            History(seed, depth).run()
        except BaseException as error:
            error.add_note(f"replay with History(seed={seed}, depth={depth}).run()")
            raise


def test_histories_reach_what_they_are_for() -> None:
    """The histories above are worth something only if they preempt, overshoot, fail and read."""
    preemptions = failed = read = 0
    wasted: set[str] = set()
    finished: set[str] = set()
    for seed in range(30):
        history = History(seed, 2)
        history.run()
        statistics = history.core.statistics()
        preemptions += statistics.preemptions
        failed += statistics.failed_steps
        read += history.runner.checked_slots
        wasted |= {reason for reason, count in statistics.wasted_tokens.items() if count}
        finished |= {str(reason) for reason in statistics.finished}
    assert preemptions > 30
    assert failed > 20
    assert read > 5_000
    assert wasted == {"preempted", "aborted", "overshoot"}
    assert finished >= {"stop", "length", "abort", "error", "deadline"}
