"""Which kernels a device gets, and that triton is asked for only where it is needed."""

from importlib.util import find_spec

import pytest
import torch

from kvloom.allocator.kernels import dispatch, host_kernels, kernels_for, torch_kernels, warm_up


def test_the_cpu_gets_the_hosts_kernels() -> None:
    assert kernels_for(torch.device("cpu")) is host_kernels
    assert warm_up(torch.device("cpu")) == 0


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed here")
def test_a_cuda_device_gets_tritons_and_always_the_same() -> None:
    kernels = kernels_for(torch.device("cuda", 0))
    assert type(kernels).__name__ == "TritonKernels"
    assert kernels_for(torch.device("cuda", 0)) is kernels
    assert kernels_for(torch.device("cuda", 1)) is not kernels


def test_a_cuda_device_without_triton_gets_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "find_spec", lambda _: None)
    assert kernels_for(torch.device("cuda", 0)) is torch_kernels
    assert warm_up(torch.device("cuda", 0)) == 0


def test_any_other_device_gets_torchs() -> None:
    assert kernels_for(torch.device("meta")) is torch_kernels
