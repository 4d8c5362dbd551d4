"""Callers' numbers, of whatever container, as host arrays; checked before anything is done with them."""

import operator
from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from kvloom.allocator.errors import InvalidArgument

IntT = TypeVar("IntT", np.int32, np.int64)
Ints = Sequence[int] | NDArray[np.integer] | torch.Tensor


def host_ints(name: str, values: Ints) -> NDArray[np.int64]:
    """`values` as int64 [N] on the host.

    Lists, numpy arrays and CPU tensors cost no synchronisation; a device tensor is copied to the host once.
    Raises InvalidArgument when they are not a flat row of whole numbers.
    """
    array: NDArray[np.generic]
    try:
        array = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    except (TypeError, ValueError):  # a dtype that numpy does not know, or rows of different lengths
        raise InvalidArgument(f"{name} must be a flat row of whole numbers, got {values!r}") from None
    if array.size == 0:
        return np.empty(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidArgument(f"{name} must be a flat row of whole numbers, got {array.dtype} of shape {array.shape}")
    if array.dtype.kind == "u" and array.max() >= 2**63:
        raise InvalidArgument(f"{name}: {array.max()} is no number of 64 bits with a sign")
    return array.astype(np.int64)


def int32s(name: str, values: Ints) -> NDArray[np.int32]:
    """`values` as a row of int32 [N] in one piece; the array itself where it is one.  Raises as `host_ints`."""
    if isinstance(values, np.ndarray) and values.dtype == np.int32 and values.ndim == 1 and values.flags.c_contiguous:
        return np.asarray(values, np.int32)
    array = host_ints(name, values)
    if len(array) and (array.min() < -(2**31) or array.max() >= 2**31):
        raise InvalidArgument(f"{name}: {array.min()} to {array.max()} are no numbers of 32 bits")
    return array.astype(np.int32)


def whole(name: str, value: int) -> int:
    """`value` as a plain int.  Raises InvalidArgument unless it is a whole number, of whatever make."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise InvalidArgument(f"{name}={value!r} is not a whole number") from None


def page_count(tokens: NDArray[IntT], page_size: int) -> NDArray[IntT]:
    """Pages that hold `tokens` tokens, element by element."""
    return (tokens + (page_size - 1)) // page_size


def starts(counts: NDArray[np.integer]) -> NDArray[np.int32]:
    """Exclusive cumulative sum with the total at the end: int32 [N + 1]."""
    out = np.empty(len(counts) + 1, np.int32)
    out[0] = 0
    np.add.accumulate(counts, 0, np.int32, out[1:])
    return out


def counting(count: int) -> NDArray[np.int32]:
    """0, 1, .. count - 1; shared, hence read-only."""
    return _counting_below(count.bit_length())[:count]


@lru_cache(maxsize=32)
def _counting_below(bits: int) -> NDArray[np.int32]:
    array = np.arange(2**bits, dtype=np.int32)
    array.setflags(write=False)
    return array


def places_below(count: int) -> NDArray[np.intp]:
    """0, 1, .. count - 1 as numpy indexes with them; shared, hence read-only."""
    return _places_below(count.bit_length())[:count]


@lru_cache(maxsize=32)
def _places_below(bits: int) -> NDArray[np.intp]:
    array = np.arange(2**bits, dtype=np.intp)
    array.setflags(write=False)
    return array


@lru_cache(maxsize=64)
def constant(count: int, value: int) -> NDArray[np.int32]:
    """`count` times the same; shared, hence read-only."""
    array = np.full(count, value, np.int32)
    array.setflags(write=False)
    return array


def spans(first: NDArray[np.integer], counts: NDArray[np.integer]) -> NDArray[np.int64]:
    """first[0], first[0] + 1, .. (counts[0] of them), first[1], ..: int64 [sum(counts)]."""
    ends = counts.cumsum()
    out = np.repeat(first - ends + counts, counts)
    out += counting(len(out))
    return out.astype(np.int64, copy=False)
