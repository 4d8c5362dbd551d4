"""Run by `test_streams.py`, with TRITON_INTERPRET=1 in the environment."""

import os

import pytest
import torch

from kvloom.allocator.kernels.triton_launches import TritonKernels
from tests.allocator.conformance.kinds import PAGED, SWA, Kind
from tests.allocator.conformance.machine import check_against_twin
from tests.allocator.kernels.batches import Run, grow

KERNELS = TritonKernels(torch.device("cpu"))


def test_kernels_are_interpreted() -> None:
    assert os.environ["TRITON_INTERPRET"] == "1"


def test_d6_a_row_does_not_depend_on_what_its_neighbours_are() -> None:
    """Its offsets are given: what stands beside it, in whatever is sent, is read by nobody on its behalf."""
    lengths = [(5, 3), (0, 9), (6, 2), (3, 5), (4, 1)]
    batch = grow(4, lengths)
    for row in range(len(lengths)):
        run = Run(batch, torch.device("cpu"))
        others = torch.arange(len(lengths)) != row
        run.last_loc[others] = 10**6
        run.sent["prefix_lens"][others] = 10**5
        run.sent["seq_lens"][others] = 0
        own_pages = slice(*batch.page_start[row : row + 2])
        new_pages = run.sent["new_pages"][own_pages].clone()
        run.sent["new_pages"][:] = 10**6
        run.sent["new_pages"][own_pages] = new_pages
        run.extend(KERNELS)
        own = slice(*batch.token_start[row : row + 2])
        assert run.slots[own].tolist() == batch.slots[own]


@pytest.mark.parametrize("kind", [*PAGED, *SWA], ids=lambda kind: kind.name)
def test_same_as_the_twin(kind: Kind) -> None:
    check_against_twin(kind, kernels=KERNELS, examples=4)
