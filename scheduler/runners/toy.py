"""A runner without weights: to try a server, to measure the host, to see whether tokens reach the right row."""

import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvloom.allocator import Batch, KVCache
from kvloom.scheduler.errors import InvalidConfig
from kvloom.scheduler.runners.base import RunnerSpec, StepOutput

TEXT = (
    b"A loom holds many threads at once. The weaver looks at all of them, picks the ones whose turn it is, and throws "
    b"the shuttle; what is woven is rolled up, and the thread that has come to its end makes room for another. "
    b"No thread knows of its neighbours, and yet the cloth is one.\n"
)


class ToyRunner:
    """Speaks one text over and over, as bytes, each token a function of the last one and its position; keeps no KV.

    At position p comes byte p of the text.  If the token before is not the one that stands there (the end of a prompt,
    or a token that was handed to the wrong row) a digit comes instead, made from that token and its position, and then
    the text goes on: in a stream with digits after its first token, tokens went astray.

    With `eos_ids` the text ends with the first of them, and holds none before that; without, it never ends.
    `step_seconds` is slept in each step, to imitate a model that takes that long.

    Raises `InvalidConfig` for a vocabulary that has no token but `eos_ids`, or eos ids outside of it.
    """

    def __init__(
        self,
        vocab_size: int = 256,
        max_seq: int = 4096,
        eos_ids: Sequence[int] = (),
        step_seconds: float = 0.0,
    ) -> None:
        if any(not 0 <= token < vocab_size for token in eos_ids):
            raise InvalidConfig(f"eos_ids={tuple(eos_ids)} must lie in the vocabulary, 0 to {vocab_size - 1}")
        if vocab_size - len(set(eos_ids)) < 1:
            raise InvalidConfig(f"vocab_size={vocab_size} leaves no token beside eos_ids={tuple(eos_ids)}")
        if max_seq < 1 or step_seconds < 0:
            raise InvalidConfig(f"max_seq={max_seq} must be at least 1 and step_seconds={step_seconds} at least 0")
        self._text = _tokens(TEXT, vocab_size, eos_ids)
        if eos_ids:
            self._text[-1] = eos_ids[0]
        self._digits = _tokens(b"0123456789", vocab_size, eos_ids)
        self._is_digit = np.isin(np.arange(vocab_size), self._digits)
        self._step_seconds = step_seconds
        self._spec = RunnerSpec(vocab_size=vocab_size, max_seq=max_seq, eos_ids=tuple(eos_ids))

    @property
    def spec(self) -> RunnerSpec:
        """No layers, hence no KV storage."""
        return self._spec

    def attach(self, pools: Mapping[str, KVCache]) -> None:
        """Nothing to keep."""

    def warmup(self, max_rows: int, max_tokens: int) -> None:
        """Nothing to compile."""

    def forward(self, batch: Batch) -> StepOutput:
        """One int32 token per sampled row, whatever the sampling parameters."""
        if self._step_seconds:
            time.sleep(self._step_seconds)
        host = batch.host
        token_ids = batch.token_ids.numpy() if batch.has_token_src else host.token_ids
        last, position = token_ids[host.logits_idx], host.positions[host.logits_idx]
        place = position % len(self._text)
        astray = (last != self._text[place]) & ~self._is_digit[last]
        following = self._text[(place + 1) % len(self._text)]
        # Any cheap mixing will do; int64, so that no vocabulary is too large for it.
        digits = self._digits[(last.astype(np.int64) * 31 + position * 17) % 10]
        return StepOutput(next_tokens=torch.from_numpy(np.where(astray, digits, following)))

    def close(self) -> None:
        """Nothing to give back."""


def _tokens(text: bytes, vocab_size: int, eos_ids: Sequence[int]) -> NDArray[np.int32]:
    """`text` as token ids, folded into a small vocabulary and moved away from `eos_ids`."""
    free = np.setdiff1d(np.arange(vocab_size), np.asarray(eos_ids, np.int64))
    ids = np.frombuffer(text, np.uint8).astype(np.int64) % vocab_size
    return np.where(np.isin(ids, free), ids, free[ids % len(free)]).astype(np.int32)
