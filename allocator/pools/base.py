"""What every KV storage offers.  It holds bytes by slot; who owns a slot is the allocators' business."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvloom.allocator.devices import device_of
from kvloom.allocator.errors import InvalidArgument
from kvloom.allocator.indices import whole
from kvloom.allocator.pools.host_copy import HostCopy

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


def as_integers(numbers: Tensor) -> Tensor:
    """The same memory as integers of the same width: every device can index those, but not every 8-bit float."""
    return numbers.view(INTEGERS[numbers.itemsize])


class KVCache(ABC):
    """KV of `size` tokens in the layers `layers`, which are the model's own layer indices, in order.

    Slots run from 0 to `size + page_size - 1`; those of page 0, below `page_size`, are the dump: padding writes there
    and nobody reads it.
    Raises InvalidArgument when the numbers make no sense.
    """

    # Each storage sets these two.  The views are made once: an attention layer asks for its own in each step.
    _buffers: tuple[Tensor, ...]  # all memory there is, each [part, slot, head, number]
    _by_layer: Mapping[int, tuple[Tensor, Tensor]]  # keys and values

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        layer_num: int,
        layers: Sequence[int] | None = None,
    ) -> None:
        layers = range(layer_num) if layers is None else layers
        size, page_size = whole("size", size), whole("page_size", page_size)
        if page_size < 1:
            raise InvalidArgument(f"page_size={page_size} must be at least 1")
        if size < 1:
            raise InvalidArgument(f"a KV storage of {size} tokens; at least 1")
        if len(set(layers)) != len(layers):
            raise InvalidArgument(f"layers {list(layers)} name a layer twice")
        if len(layers) != layer_num:
            raise InvalidArgument(f"layer_num={layer_num}, but the layers are {list(layers)}")
        self.size = size
        self.page_size = page_size
        self.dtype = dtype
        self.device = device_of(device)
        self.layers = tuple(layers)

    @property
    def nbytes(self) -> int:
        """Bytes of device memory, the dump page included."""
        return sum(buffer.nbytes for buffer in self._buffers)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in all layers."""
        return self.nbytes // (self.size + self.page_size)

    def get_key_buffer(self, layer: int) -> Tensor:
        """Keys of a layer, a view [slot, head, number].  Raises InvalidArgument for a layer that is not here."""
        return self.get_kv_buffer(layer)[0]

    def get_value_buffer(self, layer: int) -> Tensor:
        """Values of a layer, a view [slot, head, number].  Raises InvalidArgument for a layer that is not here."""
        return self.get_kv_buffer(layer)[1]

    def get_kv_buffer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Both.  Raises InvalidArgument for a layer that is not here."""
        try:
            return self._by_layer[layer]
        except KeyError:
            raise InvalidArgument(f"no layer {layer} here; the layers are {list(self.layers)}") from None

    @abstractmethod
    def set_kv_buffer(self, layer: int, loc: Tensor, key: Tensor, value: Tensor) -> None:
        """Write the KV of T tokens to slots `loc` (int64 or int32 [T]) of a layer, cast to `dtype`.

        Mutates the buffers.  Raises InvalidArgument, before anything is written, for a layer that is not here or
        shapes that do not fit.  Does not synchronise; the slots themselves are trusted.
        """

    def get_cpu_copy(self, indices: Tensor) -> HostCopy:
        """KV of the slots `indices` (int64 or int32 [T]), all layers, on its way to the host.  Never waits for it.

        Pinning memory takes a while; what a copy of before has pinned and nobody holds any more is used again.  The
        slots may be written again at once by what is launched later on the current stream.
        """
        gathered = [as_integers(buffer).index_select(1, slots) for buffer, slots in self._places(indices)]
        copies = [part.view(buffer.dtype) for part, buffer in zip(gathered, self._buffers, strict=True)]
        if self.device.type == "cpu":
            return HostCopy(tuple(copies))
        pinned = [torch.empty(copy.shape, dtype=copy.dtype, pin_memory=True) for copy in copies]
        for host, copy in zip(pinned, copies, strict=True):
            host.copy_(copy, non_blocking=True)
        return HostCopy(tuple(pinned), torch.accelerator.current_stream(self.device).record_event())

    def load_cpu_copy(self, copy: HostCopy, indices: Tensor) -> None:
        """Write what `get_cpu_copy` gave to as many slots `indices` (int64 or int32 [T]).

        On a device the current stream waits for the copy, never the host.
        Mutates the buffers.  Raises InvalidArgument when the copy is not of that many slots of such a storage.
        """
        expected = [(buffer.shape[0], *indices.shape, *buffer.shape[2:], buffer.dtype) for buffer in self._buffers]
        given = [(*tensor.shape, tensor.dtype) for tensor in copy.tensors]
        if given != expected:
            raise InvalidArgument(f"a copy of {given} where {expected} is due")
        copy.wait_on(self.device)
        for tensor, (buffer, slots) in zip(copy.tensors, self._places(indices), strict=True):
            as_integers(buffer)[:, slots] = as_integers(_sent(tensor, self.device))

    def copy_slots(self, source: Tensor, target: Tensor) -> None:
        """Copy the KV of slots `source` to slots `target` (int64 or int32 [T] both), all layers.  Never waits.

        Reads all before it writes any, so the two may overlap.  Mutates the buffers.  Raises InvalidArgument unless
        they are equally many.
        """
        if source.shape != target.shape or source.dim() != 1:
            raise InvalidArgument(f"{tuple(source.shape)} slots cannot be copied to {tuple(target.shape)}")
        for (buffer, read), (_, written) in zip(self._places(source), self._places(target), strict=True):
            numbers = as_integers(buffer)
            numbers[:, written] = numbers.index_select(1, read)

    def _places(self, slots: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Each buffer, and where in it the slots are, on the device."""
        slots = self._on_device(slots)
        return [(buffer, slots) for buffer in self._buffers]

    def _on_device(self, slots: Tensor) -> Tensor:
        """Slots on the host are looked at; those on a device are trusted, for looking would wait."""
        if (
            slots.device.type == "cpu"
            and slots.numel()
            and not 0 <= slots.min() <= slots.max() < self.size + self.page_size
        ):
            raise InvalidArgument(f"slots run from 0 to {self.size + self.page_size - 1}; got {slots[:8].tolist()}")
        return slots.to(self.device, non_blocking=True)


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of pinned memory, or of some places of its second dimension, on its way to a device; never waits."""
    if device.type == "cpu" or tensor.is_contiguous():
        return tensor.to(device, non_blocking=True)
    # In one go the host would gather the places first: it would wait, or read what is not there yet.
    return torch.stack([part.to(device, non_blocking=True) for part in tensor.unbind(0)])
