"""Penalties against a twin that keeps each row's tokens as a list."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from kvloom.scheduler.errors import BrokenInvariant
from kvloom.scheduler.penalties import PenaltyState
from kvloom.scheduler.plan import History, Penalties, Sampling
from kvloom.scheduler.sampler import Sampler
from tests.scheduler.runners.by_hand import decode_batch

VOCAB = 31
OFF = (1.0, 0.0, 0.0)
Penalty = tuple[float, float, float]  # repetition, presence, frequency


@dataclass
class Talk:
    """One request: what it knows, and how it is penalised."""

    slot: int
    penalty: Penalty
    prompt: list[int]
    outputs: list[int] = field(default_factory=list)
    fresh: bool = True  # its next sampled token is the first since it was (re)admitted

    @property
    def history(self) -> History:
        return History(self.slot, np.array(self.prompt, np.int32), np.array(self.outputs, np.int32))

    def penalised(self, logits: torch.Tensor) -> torch.Tensor:
        repetition, presence, frequency = self.penalty
        scores = logits.tolist()
        for token in range(VOCAB):
            if token in self.prompt or token in self.outputs:
                scores[token] = scores[token] / repetition if scores[token] > 0 else scores[token] * repetition
            times = self.outputs.count(token)
            scores[token] -= presence * (times > 0) + frequency * times
        return torch.tensor(scores)


def penalties_of(talks: list[Talk]) -> Penalties:
    repetition, presence, frequency = (
        np.array(column, np.float32) for column in zip(*(talk.penalty for talk in talks), strict=True)
    )
    fresh = [talk.history for talk in talks if talk.fresh and talk.penalty != OFF]
    return Penalties(repetition, presence, frequency, fresh)


def greedy(penalties: Penalties | None, rows: int) -> Sampling:
    zeros = np.zeros(rows, np.float32)
    return Sampling(zeros, np.zeros(rows, np.int32), zeros + 1, zeros, zeros, penalties)


def step(sampler: Sampler, talks: list[Talk], logits: torch.Tensor) -> None:
    """Sample all of `talks`, and check each against its twin."""
    batch = decode_batch([talk.slot for talk in talks], greedy(penalties_of(talks), len(talks)))
    tokens = sampler(logits, batch).tolist()
    assert tokens == [int(talk.penalised(row).argmax()) for talk, row in zip(talks, logits, strict=True)]
    for talk, token in zip(talks, tokens, strict=True):
        talk.outputs.append(token)
        talk.fresh = False


def some_penalty(rng: np.random.Generator) -> Penalty:
    choices: list[Penalty] = [OFF, (1.7, 0, 0), (0.6, 0, 0), (1, 0.8, 0), (1, 0, 0.4), (1, -0.5, -0.3), (1.2, 0.3, 0.2)]
    return choices[rng.integers(len(choices))]


@pytest.mark.parametrize("seed", range(5))
def test_a_crowd_that_comes_goes_and_is_preempted(seed: int) -> None:
    """Row slots change hands, rows stall, and whoever is readmitted elsewhere goes on from all it has said."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    sampler = Sampler()
    slots = list(range(8))
    talks: list[Talk] = []
    for _ in range(80):
        while slots and rng.random() < 0.4:
            prompt = rng.integers(0, VOCAB, rng.integers(1, 12)).tolist()
            talks.append(Talk(slots.pop(rng.integers(len(slots))), some_penalty(rng), prompt))
        if talks and rng.random() < 0.15:
            slots.append(talks.pop(rng.integers(len(talks))).slot)
        if talks and slots and rng.random() < 0.3:
            talk = talks[rng.integers(len(talks))]
            slots.append(talk.slot)
            talk.slot, talk.fresh = slots.pop(0), True
        running = [talk for talk in talks if rng.random() < 0.8]
        if running:
            # Close to each other, so that a penalty decides.
            step(sampler, running, torch.randn(len(running), VOCAB, generator=generator) * 0.5)


def test_repetition_counts_the_prompt_and_the_others_do_not() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, 4] = 1.0
    talks = [Talk(0, (4.0, 0, 0), [4]), Talk(1, (1, 2.0, 0), [4]), Talk(2, (1, 0, 2.0), [4])]
    logits[:, 9] = 0.5
    step(Sampler(), talks, logits)
    assert [talk.outputs for talk in talks] == [[9], [4], [4]]


def test_frequency_grows_and_presence_does_not() -> None:
    logits = torch.full((2, VOCAB), -9.0)
    logits[:, 4], logits[:, 9] = 1.0, 0.05
    talks = [Talk(0, (1, 0.6, 0), [0]), Talk(1, (1, 0, 0.6), [0])]
    sampler = Sampler()
    for _ in range(4):
        step(sampler, talks, logits)
    assert talks[0].outputs == [4] * 4
    assert talks[1].outputs == [4, 4, 9, 4]


def test_a_row_without_meaning_counts_nothing() -> None:
    """Its token is -1, which must not be counted as the last word of the vocabulary."""
    state = PenaltyState()
    talk = Talk(0, (1, 1.0, 0), [0])
    penalties = penalties_of([talk])
    slots = np.array([0], np.int32)
    state.apply(torch.zeros(1, VOCAB), slots, penalties)
    state.record(torch.tensor([-1]), slots, penalties)
    talk.fresh = False
    assert torch.equal(state.apply(torch.zeros(1, VOCAB), slots, penalties_of([talk])), torch.zeros(1, VOCAB))


def test_prompt_tokens_outside_the_vocabulary_are_ignored() -> None:
    talk = Talk(0, (2.0, 0, 0), [-1, VOCAB, 10**6, 5])
    step(Sampler(), [talk], torch.ones(1, VOCAB))
    assert talk.outputs == [0]


def test_a_row_that_never_brought_its_history() -> None:
    talk = Talk(3, (2.0, 0, 0), [1], fresh=False)
    with pytest.raises(BrokenInvariant, match="row slot 3"):
        PenaltyState().apply(torch.zeros(1, VOCAB), np.array([3], np.int32), penalties_of([talk]))


def test_lines_are_taken_back_from_rows_that_are_plain_by_now() -> None:
    """As many lines as penalised rows at a time, not as many as row slots."""
    state = PenaltyState()
    for slot in range(20):
        talks = [Talk(other, OFF, [1]) for other in range(20) if other != slot] + [Talk(slot, (2.0, 0, 0), [1])]
        slots = np.array([talk.slot for talk in talks], np.int32)
        state.apply(torch.zeros(20, VOCAB), slots, penalties_of(talks))
    assert state.lines == 1
