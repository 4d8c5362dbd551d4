"""Which kernels a device gets."""

from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from kvloom.allocator.devices import device_of
from kvloom.allocator.kernels import host_kernels, torch_kernels
from kvloom.allocator.kernels.base import Kernels

if TYPE_CHECKING:
    from kvloom.allocator.kernels.triton_launches import TritonKernels


def kernels_for(device: torch.device) -> Kernels:
    """Triton's on CUDA where triton is installed, the host's own on the CPU, else torch's.

    All callers on one CUDA device share one set, and what it has compiled.
    """
    if device.type == "cpu":
        return host_kernels
    return _triton_kernels_for(device) or torch_kernels


def warm_up(device: torch.device, index_dtypes: Iterable[torch.dtype] = (torch.int64,)) -> int:
    """Compile all that the kernels of `device` will need for slots of `index_dtypes`; how many variants there are now.

    The number does not move while serving; 0 where nothing is compiled.
    """
    kernels = _triton_kernels_for(device)
    return 0 if kernels is None else kernels.warm_up(index_dtypes)


def _triton_kernels_for(device: torch.device) -> "TritonKernels | None":
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    return _triton_kernels(device_of(device).index)


@cache
def _triton_kernels(index: int) -> "TritonKernels":
    # Imported late: the package works without triton, and on the CPU does not pay for loading it.
    from kvloom.allocator.kernels.triton_launches import TritonKernels  # noqa: PLC0415

    return TritonKernels(torch.device("cuda", index))
