"""From what a caller passes to a `Request`."""

from collections.abc import Mapping, Sequence as SequenceOf
from numbers import Real

import numpy as np
from numpy.typing import NDArray

from kvloom.scheduler.errors import InvalidRequest
from kvloom.scheduler.request import Request, TokenArray
from kvloom.scheduler.sampling_params import SamplingParams

_FAR = 1e12  # seconds; no deadline is farther
_OWN = "#"  # how ids begin that we make, so that they never meet a caller's
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
    if array.dtype == object:
        raise InvalidRequest("prompt", "holds something that is no whole number of 64 bits")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidRequest("prompt", f"is no flat row of token ids: {array.dtype} of shape {array.shape}")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= 2**31:
        raise InvalidRequest("prompt", f"token ids from {low} to {high}; they cannot be below 0 or above {2**31 - 1}")
    return array.astype(np.int32)


class Intake:
    """Makes requests; those that bring no id or no seed get one, the seeds from `seed` on."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._made = 0

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        *,
        request_id: str | None,
        deadline: float | None,
        now: float,
        cache_namespace: str,
        metadata: Mapping[str, object] | None,
    ) -> Request:
        """The request as the core wants it; `deadline` is in seconds from `now`.  Raises InvalidRequest."""
        if request_id is not None and (not isinstance(request_id, str) or not request_id):
            raise InvalidRequest("request_id", f"{request_id!r} is no string, or an empty one")
        if request_id is not None and request_id.startswith(_OWN):
            raise InvalidRequest("request_id", f"{request_id!r} begins with {_OWN!r}, as the engine's own ids do")
        if deadline is not None and (isinstance(deadline, bool) or not isinstance(deadline, Real)):
            raise InvalidRequest("deadline", f"{deadline!r} is not a number of seconds")
        if params is not None and not isinstance(params, SamplingParams):
            raise InvalidRequest("params", f"{params!r} is no SamplingParams")
        self._made += 1
        params = params or SamplingParams()
        return Request(
            id=f"{_OWN}{self._made}" if request_id is None else request_id,
            prompt=as_prompt(prompt),
            params=params,
            deadline=None if deadline is None else now + float(min(deadline, _FAR)),
            seed=_in_64_bits(self._seed + self._made) if params.seed is None else params.seed,
            cache_namespace=cache_namespace,
            metadata=metadata or {},
        )


def _in_64_bits(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63
