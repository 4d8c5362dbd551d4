"""A step's result is somebody else's word: it is checked before anything is changed by it."""

import numpy as np

from kvloom.scheduler.errors import BadStepResult
from kvloom.scheduler.plan import Plan, StepResult
from kvloom.scheduler.rows import IntArray


def checked_tokens(plan: Plan, result: StepResult, vocab_size: int) -> IntArray:
    """The tokens, int32 [S].  Rows with an error may have any token.

    Raises BadStepResult when their number or type is wrong, or a token is outside the vocabulary.
    """
    tokens, wanted = np.asarray(result.tokens), len(plan.sample_rows)
    if tokens.shape != (wanted,) or (wanted and tokens.dtype.kind not in "iu"):
        raise BadStepResult(
            f"step {plan.step}: {wanted} whole numbers wanted, got {tokens.dtype} of shape {tokens.shape}"
        )
    strange = [i for i in result.row_errors if not 0 <= i < wanted]
    if strange:
        raise BadStepResult(f"step {plan.step}: errors for rows {strange}, but {wanted} rows were sampled")
    tokens = tokens.astype(np.int64, copy=False)
    wrong = tokens.view(np.uint64) >= vocab_size  # one look for both ends: below 0 is huge
    if wrong.any():
        wrong[list(result.row_errors)] = False
        if wrong.any():
            ids = plan.request_ids
            culprits = {ids[plan.sample_rows[i]]: int(tokens[i]) for i in np.flatnonzero(wrong)[:8]}
            raise BadStepResult(f"step {plan.step}: tokens outside 0 to {vocab_size - 1} for requests {culprits}")
    return tokens.astype(np.int32)
