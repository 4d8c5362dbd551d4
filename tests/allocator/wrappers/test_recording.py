"""RecordingAllocator: the log is plain data, a copy, and enough to do it all again; at random: `conformance`."""

import copy
import json
from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvloom.allocator import (
    AllocatorError,
    DoubleFree,
    GroupMisuse,
    InvalidArgument,
    RecordingAllocator,
    StaleState,
    replay,
)
from tests.allocator.books import books
from tests.allocator.test_cases import paged, per_token, taken


def test_every_verb_and_its_arguments_by_name() -> None:
    allocator = RecordingAllocator(paged(8, 4))
    slots = taken(allocator.alloc(4))
    row = taken(allocator.alloc_extend(torch.tensor([0]), np.array([5], np.int32), [-1], 5))
    allocator.alloc_decode([np.int64(6)], row[-1:])  # type: ignore[list-item]
    state = allocator.backup_state()
    allocator.alloc(8)
    allocator.restore_state(state)
    with allocator.free_group():
        allocator.free(slots[:1])
    allocator.clear()
    assert allocator.log == [
        {"verb": "alloc", "need_size": 4},
        {"verb": "alloc_extend", "prefix_lens": [0], "seq_lens": [5], "last_loc": [-1], "extend_num_tokens": 5},
        {"verb": "alloc_decode", "seq_lens": [6], "last_loc": [12]},
        {"verb": "backup_state"},
        {"verb": "alloc", "need_size": 8},
        {"verb": "restore_state", "state": {"state": 0}},
        {"verb": "free_group_begin"},
        {"verb": "free", "free_index": [4]},
        {"verb": "free_group_end"},
        {"verb": "clear"},
    ]
    assert [json.loads(json.dumps(entry)) for entry in allocator.log] == allocator.log


def test_arguments_are_copied() -> None:
    allocator = RecordingAllocator(paged(8, 4))
    slots, lengths = taken(allocator.alloc(4)), [5]
    allocator.alloc_extend([0], lengths, [-1], 5)
    allocator.free(slots)
    slots.zero_()
    lengths[0] = 9
    assert allocator.log[1]["seq_lens"] == [5]
    assert allocator.log[2] == {"verb": "free", "free_index": [4, 5, 6, 7]}


def test_misuse_is_part_of_the_story() -> None:
    ours = RecordingAllocator(per_token(8))
    foreign = per_token(8).backup_state()
    a = taken(ours.alloc(3))
    ours.free(a[:1])
    state = ours.backup_state()
    ours.free_group_begin()
    misuses: list[tuple[type[AllocatorError], Callable[[], object]]] = [
        (DoubleFree, lambda: ours.free(a[:2])),
        (InvalidArgument, lambda: ours.free([1.0])),  # type: ignore[list-item]
        (InvalidArgument, lambda: ours.alloc(-1)),
        (InvalidArgument, lambda: ours.free("12")),  # type: ignore[arg-type]
        (GroupMisuse, ours.free_group_begin),
        (GroupMisuse, lambda: ours.restore_state(state)),
        (StaleState, lambda: ours.restore_state(foreign)),
    ]
    for error, misuse in misuses:
        with pytest.raises(error):
            misuse()
    ours.free_group_end()
    again = per_token(8)
    answers = replay(ours.log, again)
    assert [type(answer) for answer in answers if isinstance(answer, Exception)] == [
        DoubleFree, InvalidArgument, InvalidArgument, InvalidArgument, GroupMisuse, GroupMisuse, StaleState
    ]  # fmt: skip
    assert answers[0].tolist() == [1, 2, 3]
    assert books(again.ledger) == books(ours.ledger)


def test_the_cause_of_a_crash_is_its_last_entry() -> None:
    allocator = RecordingAllocator(per_token(8))

    def crash(need_size: int) -> None:
        raise MemoryError(need_size)

    allocator.inner.alloc = crash
    with pytest.raises(MemoryError):
        allocator.alloc(2)
    assert allocator.log == [{"verb": "alloc", "need_size": 2}]


def test_states_have_numbers_in_the_order_of_taking() -> None:
    ours = RecordingAllocator(per_token(8))
    first = ours.backup_state()
    ours.backup_state()  # forgotten at once
    ours.alloc(2)
    third = ours.backup_state()
    ours.alloc(2)
    ours.restore_state(third)
    ours.restore_state(first)
    assert [entry["state"] for entry in ours.log if entry["verb"] == "restore_state"] == [{"state": 2}, {"state": 0}]
    again = per_token(8)
    replay(ours.log, again)
    assert again.available_size() == 8


def test_misuse_is_replayed_as_misuse() -> None:
    ours = RecordingAllocator(paged(8, 4))
    ours.backup_state()
    with pytest.raises(AllocatorError):
        ours.restore_state(0)  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        ours.free_swa([4])
    with pytest.raises(AllocatorError):
        ours.alloc(3)
    again = paged(8, 4)
    answers = replay([json.loads(json.dumps(entry)) for entry in ours.log], again)
    assert [type(answer).__name__ for answer in answers] == [
        "AllocatorState", "StaleState", "AttributeError", "InvalidArgument",
    ]  # fmt: skip
    assert copy.copy(ours).inner is ours.inner
