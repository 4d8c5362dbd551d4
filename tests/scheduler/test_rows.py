"""What is known of running sequences, beside plain lists."""

import random

import numpy as np
import pytest
from numpy.typing import NDArray

from kvloom.scheduler import Request, SamplingParams
from kvloom.scheduler.request import Sequence
from kvloom.scheduler.rows import Rows

EOS = 5


def sequence(arrival: int, prompt: int = 4, said: int = 0, max_new: int = 10, **params: object) -> Sequence:
    tokens = np.arange(100, 100 + prompt, dtype=np.int32)
    request = Request(id=str(arrival), prompt=tokens, params=SamplingParams(**params), seed=arrival)  # type: ignore[arg-type]
    outputs = np.arange(said, dtype=np.int32)
    return Sequence(request, arrival, 0.0, max_new, None, tokens=np.concatenate((tokens, outputs)), queued_at=0.0)


def array(*rows: int) -> NDArray[np.int32]:
    return np.array(rows, np.int32)


def say(rows: Rows, row: int, token: int) -> None:
    """A step that computes all there is of the row and samples a token, planned and committed."""
    length = max(int(rows.target[row]), int(rows.settled[row]) + 1)
    rows.prefilling -= int(rows.scheduled[row] < rows.target[row])
    rows.scheduled[row] = rows.settled[row] = length
    rows.append(array(row), array(token), array(length))


def test_order_is_age_whatever_the_row() -> None:
    rows = Rows(8, ())
    for row, arrival in {6: 0, 2: 3, 4: 1}.items():
        rows.enter(row, sequence(arrival), 0)
    assert rows.order.tolist() == [6, 4, 2]
    assert [one.arrival for one in rows.members(rows.order)] == [0, 1, 3]
    rows.leave(4)
    assert rows.order.tolist() == [6, 2]
    rows.enter(0, sequence(2), 0)
    assert rows.order.tolist() == [6, 0, 2]
    assert rows.order is rows.order
    assert rows.departures == 1


def test_outputs_beside_lists() -> None:
    """Random comings, sayings and goings; who comes may have said something before."""
    draw, rows, twin = random.Random(7), Rows(6, ()), dict[int, list[int]]()
    said = returned = 0
    for arrival in range(3000):
        row = draw.randrange(6)
        if row not in twin:
            before = draw.choice([0, 0, 0, 3, 40, 63, 64, 200])
            rows.enter(row, sequence(arrival, draw.randint(1, 9), before, 10**6), 0)
            twin[row] = list(range(before))
        elif draw.random() < (0.02 if row else 0.001):
            assert rows.leave(row).tolist() == twin.pop(row)
            returned += 1
        else:
            say(rows, row, arrival)
            twin[row].append(arrival)
            assert rows.last_token[row] == arrival
            said += 1
    assert {row: rows.leave(row).tolist() for row in twin} == twin
    assert (said > 1000, returned > 20) == (True, True)


def test_what_one_says_before_its_prompt_is_done() -> None:
    rows = Rows(2, ())
    rows.enter(0, sequence(0), 0)
    rows.enter(1, sequence(1, said=3), 0)
    rows.scheduled[:] = rows.settled[:] = 2
    assert rows.leave(0).tolist() == []
    assert rows.leave(1).tolist() == [0, 1, 2]


def test_who_can_take_a_token_and_whose_prompt_is_under_way() -> None:
    rows = Rows(8, ())
    for row in range(5):
        rows.enter(row, sequence(row, max_new=2), 0)
    assert rows.decodable().tolist() == []
    assert rows.prompts_under_way().tolist() == [0, 1, 2, 3, 4]
    for row in range(3):
        say(rows, row, 1)
    assert rows.prompts_under_way().tolist() == [3, 4]
    assert rows.decodable().tolist() == [0, 1, 2]
    rows.scheduled[1] = rows.end[1]  # its last token is on the way
    rows.last_step[1] = 0
    assert rows.decodable().tolist() == [0, 2]
    rows.doom(2)
    rows.doom(4)
    assert rows.decodable().tolist() == [0]
    assert rows.prompts_under_way().tolist() == [3]
    assert rows.dooms == 2
    rows.leave(2)
    rows.leave(4)
    rows.enter(2, sequence(9), 0)
    assert (rows.dooms, rows.prompts_under_way().tolist()) == (0, [3, 2])


def test_a_cached_prefix_counts_as_computed() -> None:
    rows = Rows(2, ())
    rows.enter(0, sequence(0, prompt=8), 4)
    assert (rows.scheduled[0], rows.settled[0], rows.prompts_under_way().tolist()) == (4, 4, [0])


@pytest.mark.parametrize(("last", "settled", "out"), [(3, 3, False), (3, 2, True), (-1, -1, False)])
def test_in_flight(last: int, settled: int, out: bool) -> None:
    rows = Rows(1, ())
    rows.enter(0, sequence(0), 0)
    rows.last_step[0], rows.settled_step = last, settled
    assert rows.in_flight(0) is out


def test_stops() -> None:
    rows = Rows(4, (EOS,))
    rows.enter(0, sequence(0), 0)
    rows.enter(1, sequence(1, ignore_eos=True), 0)
    rows.enter(2, sequence(2, stop_token_ids=(8, 9)), 0)
    rows.enter(3, sequence(3, min_new_tokens=2), 0)
    everyone, first, second = array(0, 1, 2, 3), np.full(4, 4, np.int32), np.full(4, 5, np.int32)

    def stopped(token: int, settled: NDArray[np.int32]) -> list[bool]:
        hit = rows.stopped(everyone, np.full(4, token, np.int32), settled)
        return [False] * 4 if hit is None else hit.tolist()

    assert stopped(EOS, first) == [True, False, True, False]
    assert stopped(EOS, second) == [True, False, True, True]
    assert stopped(9, first) == [False, False, True, False]
    assert stopped(7, first) == [False] * 4
    rows.leave(2)
    rows.enter(2, sequence(4), 0)
    assert stopped(9, first) == [False] * 4, "the next owner of a row has stops of its own"


def test_more_tokens_at_least_than_there_can_be() -> None:
    rows = Rows(1, (EOS,))
    rows.enter(0, sequence(0, max_new=3, min_new_tokens=2**31 - 1), 0)
    assert rows.stop_from[0] == rows.end[0]
