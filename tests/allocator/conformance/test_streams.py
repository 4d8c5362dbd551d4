"""Every public allocator, in every wrapping and with every set of kernels, against its twin."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvloom.allocator.kernels import torch_kernels
from tests.allocator.conformance.kinds import KINDS, PAGED, SWA, WRAPPINGS, Kind
from tests.allocator.conformance.machine import check_against_twin

HERE = Path(__file__).parent

each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
both_ways = pytest.mark.parametrize("need_sort", [False, True], ids=["at_once", "need_sort"])


@both_ways
@pytest.mark.parametrize("wrapping", WRAPPINGS)
@each_kind
def test_same_as_the_twin(kind: Kind, wrapping: str, need_sort: bool) -> None:
    check_against_twin(kind, wrapping, need_sort, examples=12)


@pytest.mark.parametrize("kind", [*PAGED, *SWA], ids=lambda kind: kind.name)
def test_with_torchs_kernels(kind: Kind) -> None:
    check_against_twin(kind, kernels=torch_kernels, examples=8)


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed here")
def test_with_tritons_kernels() -> None:
    """Interpreted, in a process of its own: see `tests/allocator/kernels/test_triton_kernels.py`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "interpreted.py")]
    answer = subprocess.run(
        command, cwd=HERE.parents[2], env=environment, capture_output=True, text=True, check=False, timeout=110
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
