"""How a step written into a block that stays where it is gets to the device, with the launch behind it.

Uploading and launching cost a dozen microseconds each; replaying a small CUDA graph of the two costs three.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvloom.allocator.staging import PinnedRing

BLOCKS = 8  # uploads that may be on their way

Fields = tuple[NDArray[np.int32], ...]


class Sender(Protocol):
    """Where a step is written, and how it is sent."""

    def next_fields(self) -> Fields:
        """Where to write a step, field by field.

        There stands one of the last steps that were written, or what the block held when the sender was made.
        """

    def send(self) -> None:
        """To the device."""

    def send_and(self, launch: Callable[[], None]) -> None:
        """To the device, and launch there: always the same launch."""


def sender_for(block: torch.Tensor, lengths: Sequence[int], launch: Callable[[], None]) -> Sender:
    """For a block (int32) of fields of these lengths, on the CPU or CUDA."""
    return _GraphSender(block, lengths, launch) if block.device.type == "cuda" else _HostSender(block, lengths)


class _HostSender:
    """On the CPU the block is the host's, and nothing has to travel."""

    def __init__(self, block: torch.Tensor, lengths: Sequence[int]) -> None:
        self._fields = _fields(block.numpy(), lengths)

    def next_fields(self) -> Fields:
        """See `Sender`."""
        return self._fields

    def send(self) -> None:
        """See `Sender`."""

    def send_and(self, launch: Callable[[], None]) -> None:
        """See `Sender`."""
        launch()


class _GraphSender:
    """A small graph for each pinned block: replaying it costs a third of the copy that it makes."""

    def __init__(self, block: torch.Tensor, lengths: Sequence[int], launch: Callable[[], None]) -> None:
        self._ring = PinnedRing(block.device, BLOCKS, BLOCKS // 2)
        self._sent = True  # the block given out last
        self._fields: list[Fields] = []
        self._uploads: list[torch.cuda.CUDAGraph] = []
        self._steps: list[torch.cuda.CUDAGraph] = []
        first = block.cpu()
        for _ in range(BLOCKS):
            pinned, array = self._ring.next(len(block))
            pinned[: len(block)] = first
            self._fields.append(_fields(array, lengths))
            self._uploads.append(_captured(block, pinned))
            self._steps.append(_captured(block, pinned, launch))

    def next_fields(self) -> Fields:
        """See `Sender`."""
        # A block that did not leave comes again: it must not be passed over, an event may stand behind it.
        if self._sent:
            self._ring.turn()
            self._sent = False
        return self._fields[self._ring.place]

    def send(self) -> None:
        """See `Sender`."""
        self._replay(self._uploads)

    def send_and(self, launch: Callable[[], None]) -> None:
        """See `Sender`."""
        self._replay(self._steps)

    def _replay(self, graphs: list[torch.cuda.CUDAGraph]) -> None:
        graphs[self._ring.place].replay()
        self._sent = True
        self._ring.consumed_here()


def _fields(array: NDArray[np.int32], lengths: Sequence[int]) -> Fields:
    ends = list(accumulate(lengths))
    return tuple(array[end - length : end] for end, length in zip(ends, lengths, strict=True))


def _captured(
    block: torch.Tensor, pinned: torch.Tensor, launch: Callable[[], None] = lambda: None
) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    # thread_local: other threads may be busy on the device.
    with torch.cuda.device(block.device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        block.copy_(pinned[: len(block)], non_blocking=True)
        launch()
    return graph
