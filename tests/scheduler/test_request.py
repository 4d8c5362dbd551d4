"""A sequence's life is a table; what is not in it raises and changes nothing."""

import itertools

import numpy as np
import pytest

from kvloom.scheduler import BrokenInvariant, Request
from kvloom.scheduler.plan import SchedulerStatistics
from kvloom.scheduler.request import TRANSITIONS, Move, Phase, Sequence, Timings
from kvloom.scheduler.roster import Roster
from tests.scheduler.driven import WatchedMemory


def sequence(phase: Phase) -> Sequence:
    prompt = np.ones(3, np.int32)
    made = Sequence(Request(id="r", prompt=prompt), 0, 0.0, 1, None, tokens=prompt, queued_at=0.0)
    made.phase = phase
    return made


LEGAL = {
    Phase.WAITING: {Move.ADMIT: Phase.PREFILLING, Move.FINISH: Phase.FINISHED},
    Phase.PREEMPTED: {Move.ADMIT: Phase.PREFILLING, Move.FINISH: Phase.FINISHED},
    Phase.PREFILLING: {
        Move.PROMPT_DONE: Phase.DECODING, Move.PREEMPT: Phase.PREEMPTED, Move.FINISH: Phase.FINISHED,
    },
    Phase.DECODING: {Move.PREEMPT: Phase.PREEMPTED, Move.FINISH: Phase.FINISHED},
    Phase.FINISHED: {},
}  # fmt: skip


@pytest.mark.parametrize(("phase", "move"), list(itertools.product(Phase, Move)))
def test_every_move_from_every_phase(phase: Phase, move: Move) -> None:
    one = sequence(phase)
    before = repr(one)
    if (after := LEGAL[phase].get(move)) is not None:
        assert one.moved(move) is after
    else:
        with pytest.raises(BrokenInvariant, match=f"'r' cannot {move} while {phase}"):
            one.moved(move)
    assert repr(one) == before, "`moved` only says what would be"


@pytest.mark.parametrize(
    ("phase", "move"), [pair for pair in itertools.product(Phase, Move) if pair not in TRANSITIONS]
)
def test_an_illegal_move_leaves_the_counts_alone(phase: Phase, move: Move) -> None:
    roster = Roster(WatchedMemory(capacity_tokens=16, page_size=4), ())
    one = sequence(phase)
    roster.counts.phases[phase] += 1
    before = roster.counts.phases.copy()
    with pytest.raises(BrokenInvariant):
        roster.move(one, move)
    assert (one.phase, roster.counts.phases) == (phase, before)


def test_the_labels_that_metrics_show() -> None:
    assert [str(phase) for phase in Phase] == ["waiting", "prefilling", "decoding", "preempted", "finished"]
    assert all(phase in SchedulerStatistics._fields for phase in Phase)


def test_timings() -> None:
    timings = Timings(arrived_at=10.0, finished_at=15.0, admitted_at=11.0, first_token_at=12.5, queue_seconds=1.0)
    assert (timings.total_seconds, timings.first_token_seconds) == (5.0, 2.5)
    assert Timings(arrived_at=10.0, finished_at=15.0).first_token_seconds is None
