"""The kernels behind one dispatch point."""

from kvloom.allocator.kernels.base import Kernels
from kvloom.allocator.kernels.dispatch import kernels_for, warm_up

__all__ = ["Kernels", "kernels_for", "warm_up"]
