"""A runner that computes nothing but knows at once when somebody else's KV is read.

For every slot it keeps a digest of the whole token prefix that wrote it.  Before it "computes" a row it compares the
digest in each slot that the row may read with the row's own prefix, so a wrong hit, aliasing, a page freed too early or
a stale table line shows in the step where it happens.  The next token is a function of the whole context: a request
that was preempted, chunked or run among others must say exactly what it says alone (`continuation`).
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvloom.allocator import Batch, KVCache, PoolSpec
from kvloom.scheduler.errors import FatalRunnerError
from kvloom.scheduler.runners.base import RunnerSpec, StepOutput

_START = 0x243F6A8885A308D3  # any odd-looking number: the digest of no tokens
_MASK = 2**64 - 1


class ShadowViolation(FatalRunnerError):
    """A row would have read or overwritten KV that is not its own: a defect of kvloom."""


class ShadowRunner:
    """Deterministic, host only.  `eos_ids` are said like any other token, so stops happen by themselves."""

    def __init__(self, vocab_size: int = 97, max_seq: int = 4096, eos_ids: Sequence[int] = ()) -> None:
        self._spec = RunnerSpec(
            vocab_size=vocab_size,
            max_seq=max_seq,
            eos_ids=tuple(eos_ids),
            pools=(PoolSpec(),),
            needs=frozenset({"page_table"}),
        )
        self._page_size = 1
        self._shadow = np.zeros(0, np.uint64)
        self._digests: dict[str, list[int]] = {}  # request id -> digest of each of its prefixes
        self.checked_slots = 0

    @property
    def spec(self) -> RunnerSpec:
        """One pool without layers."""
        return self._spec

    def attach(self, pools: Mapping[str, KVCache]) -> None:
        """One digest per slot of the pool, 0 where nothing was written."""
        pool = pools["full"]
        self._page_size = pool.page_size
        self._shadow = np.zeros(pool.size + pool.page_size, np.uint64)

    def warmup(self, max_rows: int, max_tokens: int) -> None:
        """Nothing to compile."""

    def forward(self, batch: Batch) -> StepOutput:
        """Check, write, and say the next tokens.  Raises ShadowViolation."""
        host = batch.host
        token_ids = batch.token_ids.tolist()
        table, out_loc = batch.page_table["full"].numpy(), batch.out_loc["full"].numpy()
        newest: list[int] = []
        for row, request_id in enumerate(batch.request_ids):
            start, stop = int(host.q_start[row]), int(host.q_start[row + 1])
            prefix = int(host.prefix_lens[row])
            digests = self._digests.setdefault(request_id, [])
            # An earlier step of this request failed and wrote nothing: it has ended, and nobody looks at its result.
            if len(digests) < prefix:
                self._shadow[out_loc[start:stop]] = 0
                newest.append(0)
                continue
            del digests[prefix:]  # the request starts over after a preemption
            for token in token_ids[start:stop]:
                digests.append(digest(digests[-1] if digests else _START, token))
            self._check(request_id, table[row], digests, prefix, out_loc[start:stop])
            self._shadow[out_loc[start:stop]] = np.array(digests[prefix:], np.uint64)
            newest.append(digests[-1])
        tokens = [newest[row] % self._spec.vocab_size for row in host.sample_rows.tolist()]
        return StepOutput(next_tokens=torch.tensor(tokens, dtype=torch.int64))

    def close(self) -> None:
        """Forget everything."""
        self._digests.clear()

    def _check(
        self, request_id: str, line: NDArray[np.int32], digests: list[int], prefix: int, out_loc: NDArray[np.int64]
    ) -> None:
        positions = np.arange(len(digests))
        slots = line[positions // self._page_size].astype(np.int64) * self._page_size + positions % self._page_size
        if not np.array_equal(slots[prefix:], out_loc):
            raise ShadowViolation(f"{request_id!r}: slots {out_loc.tolist()} are not where its page table says")
        if (slots < self._page_size).any():
            raise ShadowViolation(f"{request_id!r}: a position lies in the dump page")
        wrong = self._shadow[slots[:prefix]] != np.array(digests[:prefix], np.uint64)
        self.checked_slots += prefix
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            raise ShadowViolation(f"{request_id!r}: slot {slots[at]} of position {at} holds the KV of another prefix")


def digest(before: int, token: int) -> int:
    """Digest of a prefix that grows by one token (64 bit, FNV-1a with a final shuffle)."""
    value = ((before ^ (token + 1)) * 0x100000001B3) & _MASK
    value ^= value >> 29
    return (value * 0xBF58476D1CE4E5B9) & _MASK


def continuation(prompt: Sequence[int], count: int, vocab_size: int = 97) -> list[int]:
    """What `ShadowRunner` says after `prompt` when nothing goes wrong: `count` tokens."""
    state = _START
    for token in prompt:
        state = digest(state, int(token))
    said = []
    for _ in range(count):
        said.append(state % vocab_size)
        state = digest(state, said[-1])
    return said
