"""What a runner says about its KV storage: one `PoolSpec` per pool."""

from dataclasses import dataclass

import torch

from kvloom.allocator.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """The KV storage of some layers of a model.

    `layers` are the model's own layer indices, in order; a runner without KV (a toy) has none.  Per layer and token a
    pool keeps `2 * kv_heads * head_dim` numbers of `dtype`.  `window` is the number of positions that a layer of this
    pool looks back on, None for all of them.
    """

    name: str = "full"
    layers: tuple[int, ...] = ()
    kv_heads: int = 0
    head_dim: int = 0
    dtype: torch.dtype = torch.float32
    window: int | None = None

    def __post_init__(self) -> None:
        if self.kv_heads < 0 or self.head_dim < 0:
            raise InvalidArgument(f"pool {self.name!r}: kv_heads={self.kv_heads}, head_dim={self.head_dim} below 0")
        if self.window is not None and self.window < 1:
            raise InvalidArgument(f"pool {self.name!r}: window={self.window} must be at least 1")

    @property
    def bytes_per_token(self) -> int:
        """KV bytes that one token takes in all layers of the pool."""
        return 2 * len(self.layers) * self.kv_heads * self.head_dim * self.dtype.itemsize
