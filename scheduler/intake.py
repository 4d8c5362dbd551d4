"""From what a caller passes to a `Request`."""

from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from kvloom.scheduler.errors import InvalidRequest
from kvloom.scheduler.request import TokenArray

Prompt = SequenceOf[int] | NDArray[np.integer]


def as_prompt(values: Prompt) -> TokenArray:
    """`values` as an array of our own, int32 [P].  Raises InvalidRequest unless they are a flat row of whole numbers.

    Whether the ids are in the vocabulary is checked at the door.
    """
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:
        raise InvalidRequest("prompt", f"is no row of token ids: {error}") from error
    if array.size == 0:
        return np.empty(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidRequest("prompt", f"is no flat row of token ids: {array.dtype} of shape {array.shape}")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= 2**31:
        raise InvalidRequest("prompt", f"token ids from {low} to {high}; they cannot be below 0 or above {2**31 - 1}")
    return array.astype(np.int32)
