"""A step's result is somebody else's word: it is checked before anything is changed by it."""

from collections.abc import Mapping
from numbers import Integral

import numpy as np
from numpy.typing import NDArray

from kvloom.scheduler.errors import BadStepResult
from kvloom.scheduler.plan import IntArray, Plan, StepResult


def checked_tokens(plan: Plan, result: StepResult, vocab_size: int, alive: NDArray[np.bool_]) -> IntArray:
    """The tokens, int32 [S].  Rows with an error may have any token, and so may those no longer `alive` (by row slot).

    Raises BadStepResult when their number or type is wrong, or a token is outside the vocabulary.
    """
    tokens, wanted = np.asarray(result.tokens), len(plan.sample_rows)
    if tokens.shape != (wanted,) or (wanted and tokens.dtype.kind not in "iu"):
        raise BadStepResult(
            f"step {plan.step}: {wanted} whole numbers wanted, got {tokens.dtype} of shape {tokens.shape}"
        )
    errors: object = result.row_errors
    if not isinstance(errors, Mapping):
        raise BadStepResult(f"step {plan.step}: row_errors is a {type(errors).__name__}, no mapping")
    strange = [i for i, error in errors.items() if not (_is_index(i, wanted) and isinstance(error, Exception))]
    if strange:
        raise BadStepResult(
            f"step {plan.step}: row_errors of {strange}; wanted is an exception by index below {wanted}"
        )
    tokens = tokens.astype(np.int64, copy=False)
    wrong = tokens.view(np.uint64) >= vocab_size  # one look for both ends: below 0 is huge
    if wrong.any():
        wrong &= alive[plan.rows[plan.sample_rows]]
        wrong[list(errors)] = False
        if wrong.any():
            ids = plan.request_ids
            culprits = {ids[plan.sample_rows[i]]: int(tokens[i]) for i in np.flatnonzero(wrong)[:8]}
            raise BadStepResult(f"step {plan.step}: tokens outside 0 to {vocab_size - 1} for requests {culprits}")
    return tokens.astype(np.int32)


def _is_index(i: object, size: int) -> bool:
    return isinstance(i, Integral) and not isinstance(i, bool | np.bool_) and 0 <= int(i) < size
