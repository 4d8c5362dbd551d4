"""Staging where nothing has to travel: on the CPU."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvloom.allocator.staging import Staging


@pytest.mark.parametrize("array", [np.arange(6, dtype=np.int32), np.empty(0, np.int32)])
def test_each_array_arrives(array: NDArray[np.int32]) -> None:
    other = np.array([7], np.int32)
    sent = Staging(torch.device("cpu")).upload({"first": array, "other": other})
    assert list(sent) == ["first", "other"]
    assert sent["first"].numpy().dtype == array.dtype
    np.testing.assert_array_equal(sent["first"].numpy(), array)
    assert sent["other"].tolist() == [7]


def test_the_cpu_copies_nothing() -> None:
    array = np.zeros(4, np.int32)
    sent = Staging(torch.device("cpu")).upload({"a": array})["a"]
    array[2] = 5
    assert sent.tolist() == [0, 0, 5, 0]


def test_an_array_that_is_not_to_be_written_cannot_be_written_through_its_tensor() -> None:
    array = np.arange(3, dtype=np.int32)
    array.setflags(write=False)
    sent = Staging(torch.device("cpu")).upload({"a": array})["a"]
    sent += 1
    assert (sent.tolist(), array.tolist()) == ([1, 2, 3], [0, 1, 2])


def test_uploads_do_not_disturb_those_before() -> None:
    staging = Staging(torch.device("cpu"))
    sent = [staging.upload({"a": np.full(3, turn, np.int32)})["a"] for turn in range(6)]
    assert [tensor.tolist() for tensor in sent] == [[turn] * 3 for turn in range(6)]
