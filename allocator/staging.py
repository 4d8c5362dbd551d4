"""One upload per step: all small host arrays travel in one pinned block, with one copy."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_ALIGN = 16  # bytes; so that every field can be loaded in wide words
_TORCH_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}


class Staging:
    """Blocks of pinned host memory, used in turn; a block is rewritten only after the device has consumed it.

    On the CPU the tensors share the arrays' memory; only an array that is not to be written is copied.
    """

    def __init__(self, device: torch.device, blocks: int = 4) -> None:
        self.device = device
        self._blocks: list[torch.Tensor | None] = [None] * blocks
        self._consumed: list[torch.cuda.Event | None] = [None] * blocks
        self._turn = 0

    def upload(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, torch.Tensor]:
        """Each array (int32, int64 or float32, contiguous) as a tensor of the same shape on the device.

        Never waits for the device unless it is `blocks` uploads behind.
        """
        if self.device.type == "cpu":
            return {
                name: torch.from_numpy(array if array.flags.writeable else array.copy())
                for name, array in arrays.items()
            }
        offsets, total = self._layout(arrays)
        block = self._next_block(total)
        host = block.numpy()
        for name, array in arrays.items():
            at = offsets[name]
            host[at : at + array.nbytes] = array.reshape(-1).view(np.uint8)
        sent = block[:total].to(self.device, non_blocking=True)
        event = self._consumed[self._turn] = self._consumed[self._turn] or torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return {
            name: sent[offsets[name] : offsets[name] + array.nbytes].view(_TORCH_DTYPES[array.dtype]).view(array.shape)
            for name, array in arrays.items()
        }

    @staticmethod
    def _layout(arrays: Mapping[str, NDArray[Any]]) -> tuple[dict[str, int], int]:
        offsets: dict[str, int] = {}
        total = 0
        for name, array in arrays.items():
            offsets[name] = total
            total += -(-array.nbytes // _ALIGN) * _ALIGN
        return offsets, total

    def _next_block(self, nbytes: int) -> torch.Tensor:
        self._turn = (self._turn + 1) % len(self._blocks)
        event = self._consumed[self._turn]
        if event is not None:  # waits only when the device is that far behind
            event.synchronize()
        block = self._blocks[self._turn]
        if block is None or block.numel() < nbytes:
            block = torch.empty(max(4096, 2 * nbytes), dtype=torch.uint8, pin_memory=True)
            self._blocks[self._turn] = block
        return block
