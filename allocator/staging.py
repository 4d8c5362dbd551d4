"""One upload per step: all small host arrays travel in one pinned block, with one copy."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

_LEAST = 4096  # numbers in the smallest block

IntArray = NDArray[np.int32]


class PinnedRing:
    """Blocks of pinned host memory (int32), used in turn; one is rewritten only after the device has consumed it.

    An event costs as much as the copy it stands behind.  Whoever sends to one stream only may have one for every
    `blocks_per_event` blocks; it stands behind the last of them.
    """

    def __init__(self, device: torch.device, blocks: int = 4, blocks_per_event: int = 1) -> None:
        self.place = -1  # of the block given out last
        self._device = device
        self._blocks = [torch.empty(0, dtype=torch.int32)] * blocks
        self._arrays: list[IntArray] = [block.numpy() for block in self._blocks]
        self._per_event = blocks_per_event
        self._consumed: list[torch.cuda.Event | None] = [None] * (blocks // blocks_per_event)

    def turn(self) -> None:
        """On to the next block; waits for the device only when it is a round behind."""
        self.place = (self.place + 1) % len(self._blocks)
        if self.place % self._per_event == 0 and (event := self._consumed[self.place // self._per_event]) is not None:
            event.synchronize()

    def next(self, length: int) -> tuple[torch.Tensor, IntArray]:
        """The next block, of at least `length` numbers, as a tensor and as the array that shares its memory."""
        self.turn()
        if len(self._arrays[self.place]) < length:
            block = torch.empty(max(_LEAST, 2 * length), dtype=torch.int32, pin_memory=True)
            self._blocks[self.place], self._arrays[self.place] = block, block.numpy()
        return self._blocks[self.place], self._arrays[self.place]

    def consumed_here(self) -> None:
        """The block given out last is free once the device's current stream has come this far."""
        if (self.place + 1) % self._per_event:
            return
        at = self.place // self._per_event
        event = self._consumed[at]
        if event is None:
            event = self._consumed[at] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))


def shared(array: IntArray) -> torch.Tensor:
    """A tensor of the array's own memory; of a copy where the array is not to be written."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


class Staging:
    """Sends arrays of one step to a device.  On the CPU the tensors share the arrays' memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._ring = PinnedRing(device)

    def upload(self, arrays: Mapping[str, IntArray]) -> dict[str, torch.Tensor]:
        """Each array (int32 [N]) as a tensor on the device.

        On the CPU only an array that is not to be written is copied.  On CUDA never waits for the device unless it is a
        whole round of blocks behind.  Other devices get each array by itself, and are waited for.
        """
        if self.device.type != "cuda":
            return {name: shared(array).to(self.device) for name, array in arrays.items()}
        lengths = [len(array) for array in arrays.values()]
        total = sum(lengths)
        block, host = self._ring.next(total)
        np.concatenate(list(arrays.values()), out=host[:total])
        sent = block[:total].to(self.device, non_blocking=True)
        self._ring.consumed_here()
        return dict(zip(arrays, torch.split_with_sizes(sent, lengths), strict=True))
