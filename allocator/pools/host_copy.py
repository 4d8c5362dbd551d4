"""KV on its way to the host, or there."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class HostCopy:
    """KV of some slots on the host: for each buffer of the storage one tensor [part, slot, head, number].

    Taken from a device it is pinned memory that the device may still be writing: read it after `wait`.  `event` is None
    where there is nothing to wait for.  Treat the tensors as read-only.
    """

    tensors: tuple[Tensor, ...]
    event: torch.Event | None = None

    @property
    def ready(self) -> bool:
        """Whether all of it is on the host.  Does not wait."""
        return self.event is None or self.event.query()

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def part(self, first: int, count: int) -> "HostCopy":
        """The KV of `count` of its slots from the `first` on: the same memory."""
        return HostCopy(tuple(tensor[:, first : first + count] for tensor in self.tensors), self.event)

    def wait(self) -> None:
        """Block the host until all of it is there."""
        if self.event is not None:
            self.event.synchronize()

    def wait_on(self, device: torch.device) -> None:
        """Let what is launched on the current stream of `device` from here on wait instead; on the CPU, the host."""
        if device.type == "cpu":
            self.wait()
        elif self.event is not None:
            torch.accelerator.current_stream(device).wait_event(self.event)
