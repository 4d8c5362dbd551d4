"""What is checked before a request is queued, so that nothing can fail for it, or for others, inside a step."""

import math

import numpy as np

from kvloom.scheduler.config import ModelLimits
from kvloom.scheduler.errors import InvalidRequest, NeverFits, TooLong
from kvloom.scheduler.request import Request
from kvloom.scheduler.sampling_params import SEED_MAX


def output_limit(request: Request, limits: ModelLimits, memory_max_seq: int) -> int:
    """Most output tokens the request can have: its own wish, within the model's context and the pool.

    A sequence of p prompt and g output tokens needs KV for p + g - 1 positions, since the last token is not fed back.
    Raises InvalidRequest, TooLong or NeverFits.
    """
    prompt, params = request.prompt, request.params
    if prompt.ndim != 1 or prompt.dtype != np.int32:
        raise InvalidRequest("prompt", f"must be int32 of one dimension, got {prompt.dtype} of shape {prompt.shape}")
    if len(prompt) == 0:
        raise InvalidRequest("prompt", "is empty; at least one token is needed")
    if prompt.min() < 0 or prompt.max() >= limits.vocab_size:
        wrong = prompt[(prompt < 0) | (prompt >= limits.vocab_size)]
        raise InvalidRequest("prompt", f"token ids run from 0 to {limits.vocab_size - 1}; got {wrong[:8].tolist()}")
    if any(token >= limits.vocab_size for token in params.stop_token_ids):
        raise InvalidRequest("stop_token_ids", f"token ids run from 0 to {limits.vocab_size - 1}")
    if not -SEED_MAX - 1 <= request.seed <= SEED_MAX:
        raise InvalidRequest("seed", f"{request.seed!r} is no number of 64 bits")
    if request.deadline is not None and math.isnan(request.deadline):
        raise InvalidRequest("deadline", "is not a number of seconds")
    if not isinstance(request.cache_namespace, str):
        raise InvalidRequest("cache_namespace", f"{request.cache_namespace!r} is no string")
    if len(prompt) >= limits.max_seq:
        raise TooLong(
            f"prompt of {len(prompt)} tokens; the model's context of {limits.max_seq} leaves no room for a token"
        )
    if len(prompt) > memory_max_seq:
        raise NeverFits(f"prompt of {len(prompt)} tokens; the KV memory holds sequences of up to {memory_max_seq}")
    room = min(limits.max_seq - len(prompt), memory_max_seq - len(prompt) + 1)
    return room if params.max_new_tokens is None else min(room, params.max_new_tokens)
