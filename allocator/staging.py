"""One upload per step: all small host arrays travel in one pinned block, with one copy."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

_LEAST = 4096  # numbers in the smallest block

IntArray = NDArray[np.int32]


class PinnedRing:
    """Blocks of pinned host memory (int32), used in turn; one is rewritten only after the device has consumed it.

    An event costs as much as the copy it stands behind, so there is one for each half of the ring, not for each block;
    hence all uploads of one ring go to one stream.
    """

    def __init__(self, blocks: int = 8) -> None:
        self._blocks = [torch.empty(0, dtype=torch.int32)] * blocks
        self._arrays: list[IntArray] = [block.numpy() for block in self._blocks]
        self._half = blocks // 2
        self._consumed: list[torch.cuda.Event | None] = [None, None]
        self.place = -1  # of the block given out last

    def turn(self) -> None:
        """On to the next block; waits for the device only when it is half a round behind."""
        self.place = (self.place + 1) % len(self._blocks)
        if self.place % self._half == 0 and (event := self._consumed[self.place // self._half]) is not None:
            event.synchronize()

    def next(self, length: int) -> tuple[torch.Tensor, IntArray]:
        """The next block, of at least `length` numbers, as a tensor and as the array that shares its memory."""
        self.turn()
        if len(self._arrays[self.place]) < length:
            block = torch.empty(max(_LEAST, 2 * length), dtype=torch.int32, pin_memory=True)
            self._blocks[self.place], self._arrays[self.place] = block, block.numpy()
        return self._blocks[self.place], self._arrays[self.place]

    def consumed_here(self) -> None:
        """The block given out last is free once the current stream has come this far."""
        if (self.place + 1) % self._half:
            return
        half = self.place // self._half
        event = self._consumed[half]
        if event is None:
            event = self._consumed[half] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()


class Staging:
    """Sends arrays of one step to a device.  On the CPU the tensors share the arrays' memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._ring = PinnedRing()

    def upload(self, arrays: Mapping[str, IntArray]) -> dict[str, torch.Tensor]:
        """Each array (int32 [N]) as a tensor on the device.

        On the CPU only an array that is not to be written is copied.  Elsewhere never waits for the device unless it is
        half a round of blocks behind.
        """
        if self.device.type == "cpu":
            return {
                name: torch.from_numpy(array if array.flags.writeable else array.copy())
                for name, array in arrays.items()
            }
        lengths = [len(array) for array in arrays.values()]
        total = sum(lengths)
        block, host = self._ring.next(total)
        np.concatenate(list(arrays.values()), out=host[:total])
        sent = block[:total].to(self.device, non_blocking=True)
        self._ring.consumed_here()
        return dict(zip(arrays, torch.split_with_sizes(sent, lengths), strict=True))
