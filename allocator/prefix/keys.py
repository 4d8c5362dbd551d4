"""Tokens as bytes: two runs are equal when their bytes are, and comparing them is one memcmp.

No hash is ever trusted: a child is found by the bytes of its first page, all else is compared.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvloom.allocator.errors import InvalidArgument

TOKEN_BYTES = 4
Tokens = bytes | bytearray | memoryview


def int32_row(name: str, values: Any) -> NDArray[np.int32]:
    """`values` of whatever integer container and dtype as int32 [N] in one piece; the array itself where it is one.

    Raises InvalidArgument when they are not a flat row of whole numbers of 32 bits.
    """
    array = np.asarray(values)
    if array.dtype == np.int32 and array.ndim == 1:
        return np.ascontiguousarray(array)
    if array.size == 0:
        return np.empty(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "biu":
        raise InvalidArgument(f"{name} must be a flat row of whole numbers, got {array.dtype} of shape {array.shape}")
    if array.min() < -(2**31) or array.max() >= 2**31:
        raise InvalidArgument(f"{name}: {array.min()} to {array.max()} are no numbers of 32 bits")
    return array.astype(np.int32)


def whole_pages(tokens: Any, page_size: int) -> bytes:
    """The pages of `tokens` that a match may have: one token at least is left over.  Raises as `int32_row`."""
    return int32_row("tokens", tokens)[: max(0, len(tokens) - 1) // page_size * page_size].tobytes()


def equal_bytes(left: Tokens, right: Tokens) -> int:
    """Bytes, up to a multiple of four, before two runs of tokens of one length differ; all when they do not."""
    if len(left) == 0:
        return 0
    different = np.frombuffer(left, np.int32) != np.frombuffer(right, np.int32)
    first = int(different.argmax())
    return first * TOKEN_BYTES if different[first] else len(left)
