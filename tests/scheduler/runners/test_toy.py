"""The toy speaks its text, depends on what it is handed, and leaves eos alone unless told."""

import time

import numpy as np
import pytest
import torch

from kvloom.scheduler.errors import InvalidConfig
from kvloom.scheduler.runners import ToyRunner
from kvloom.scheduler.runners.toy import TEXT
from tests.scheduler.runners.by_hand import Pages, Row, decode_batch


def talk(runner: ToyRunner, prompt: list[int], tokens: int) -> list[int]:
    pages, row, out = Pages(1000, page_size=1), Row(0), list(prompt)
    for _ in range(tokens):
        batch = pages.batch([(row, out[row.length :])], 0, [0])
        next_tokens = runner.forward(batch).next_tokens
        assert next_tokens is not None
        out += next_tokens.tolist()
    return out[len(prompt) :]


def test_a_digit_and_then_the_text() -> None:
    said = bytes(talk(ToyRunner(), list(b"tell me: "), 300))
    assert chr(said[0]).isdigit()
    assert said[1:] in TEXT * 3


def test_it_depends_on_the_last_token_and_its_position_alone() -> None:
    runner = ToyRunner()
    assert talk(runner, [200, 7], 5) == talk(runner, [201, 7], 5)
    assert len({talk(runner, [last], 1)[0] for last in range(128, 160)}) > 3
    assert len({talk(runner, [0] * length, 1)[0] for length in range(1, 20)}) > 3


def test_a_token_that_went_astray_shows() -> None:
    """The right token leads on in the text; any other leads to a digit, which the text does not hold."""
    runner, position = ToyRunner(), 5
    pages, right, wrong = Pages(20, page_size=1), Row(0, length=position), Row(1, length=position)
    batch = pages.batch([(right, [TEXT[position]]), (wrong, [TEXT[position + 1]])], 2, [0, 1])
    tokens = runner.forward(batch).next_tokens
    assert tokens is not None
    assert tokens[0] == TEXT[position + 1]
    assert chr(tokens[1]).isdigit()
    assert not any(chr(byte).isdigit() for byte in TEXT)


def test_tokens_in_flight_are_read_from_where_the_engine_put_them() -> None:
    batch = decode_batch([0])
    batch.has_token_src = True
    batch.replace_token_ids(torch.tensor([TEXT[0]], dtype=torch.int32))
    tokens = ToyRunner().forward(batch).next_tokens
    assert tokens is not None
    assert tokens.tolist() == [TEXT[1]]
    assert tokens.dtype == torch.int32


@pytest.mark.parametrize(("vocab_size", "eos_ids"), [(256, (0,)), (256, (ord("e"), 10)), (50, (7, 49)), (2, (1,))])
def test_eos_comes_at_the_end_of_the_text_and_only_there(vocab_size: int, eos_ids: tuple[int, ...]) -> None:
    runner = ToyRunner(vocab_size=vocab_size, eos_ids=eos_ids)
    said = talk(runner, [0], 2 * len(TEXT))
    ends = np.flatnonzero(np.isin(said, eos_ids)) + 1  # position in the sequence
    assert ends.tolist() == [len(TEXT) - 1, 2 * len(TEXT) - 1]
    assert said[ends[0] - 1] == eos_ids[0]
    assert max(said) < vocab_size


def test_only_sampled_rows_answer() -> None:
    pages, rows = Pages(50, page_size=4), [Row(0), Row(1), Row(2)]
    batch = pages.batch([(rows[0], [65]), (rows[1], [66, 67, 68]), (rows[2], [69, 70])], 1, [0, 2])
    tokens = ToyRunner().forward(batch).next_tokens
    assert tokens is not None
    assert tokens.tolist() == [talk(ToyRunner(), prompt, 1)[0] for prompt in ([65], [69, 70])]


def test_a_slow_model() -> None:
    runner = ToyRunner(step_seconds=0.02)
    begun = time.perf_counter()
    runner.forward(decode_batch([0]))
    assert time.perf_counter() - begun >= 0.02


def test_spec_and_the_verbs_that_do_nothing() -> None:
    runner = ToyRunner(vocab_size=300, max_seq=99, eos_ids=[5])
    runner.attach({})
    runner.warmup(4, 16)
    runner.close()
    assert (runner.spec.vocab_size, runner.spec.max_seq, runner.spec.eos_ids) == (300, 99, (5,))
    assert runner.spec.pools[0].bytes_per_token == 0


@pytest.mark.parametrize(
    "wrong",
    [{"eos_ids": (256,)}, {"eos_ids": (-1,)}, {"vocab_size": 1, "eos_ids": (0,)}, {"max_seq": 0}, {"step_seconds": -1}],
)
def test_settings_that_make_no_sense(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidConfig):
        ToyRunner(**wrong)  # type: ignore[arg-type]
