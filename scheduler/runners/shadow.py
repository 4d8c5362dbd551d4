"""A runner that computes nothing but knows at once when somebody else's KV is read.

For every slot it keeps a digest of the whole token prefix that wrote it.  Before it "computes" a row it compares the
digest in each slot that the row may read with the row's own prefix, so a wrong hit, aliasing, a page freed too early or
a stale table line shows in the step where it happens.  The next token is a function of the whole context: a request
that was preempted, chunked or run among others must say exactly what it says alone (`continuation`).
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvloom.allocator import Batch, KVCache, PoolSpec
from kvloom.scheduler.errors import FatalRunnerError
from kvloom.scheduler.runners.base import RunnerSpec, StepOutput

# One number of 64 bits for each token.  More pools are like it, under other names, with other layers and windows.
SHADOW_POOL = PoolSpec(layers=(0,), kv_heads=1, head_dim=1, dtype=torch.int64)
_START = 0x243F6A8885A308D3  # any odd-looking number: the digest of no tokens
_MASK = 2**64 - 1


class ShadowViolation(FatalRunnerError):
    """A row would have read or overwritten KV that is not its own: a defect of kvloom."""


class ShadowRunner:
    """Deterministic, host only.  `eos_ids` are said like any other token, so stops happen by themselves.

    A row that begins with a cached prefix is compared with its request's prompt if that was told (`tell`).  Without,
    the prefix is believed, and a wrong one shows in what the request says.
    """

    def __init__(
        self,
        vocab_size: int = 97,
        max_seq: int = 4096,
        eos_ids: Sequence[int] = (),
        pools: tuple[PoolSpec, ...] = (SHADOW_POOL,),
    ) -> None:
        self._spec = RunnerSpec(
            vocab_size=vocab_size,
            max_seq=max_seq,
            eos_ids=tuple(eos_ids),
            pools=pools,
            needs=frozenset({"page_table"}),
        )
        self._page_size = 1
        self._shadows: dict[str, NDArray[np.uint64]] = {}  # by pool
        self._told: dict[str, list[int]] = {}  # request id -> digest of each prefix of its prompt
        self._digests: dict[str, list[int]] = {}  # request id -> digest of each of its prefixes
        self._starts: dict[str, int] = {}
        self._given_up: set[str] = set()
        self.checked_slots = 0

    @property
    def spec(self) -> RunnerSpec:
        """Pools of numbers."""
        return self._spec

    def tell(self, request_id: str, prompt: Sequence[int], identity: str = "") -> None:
        """A request of this id has this prompt; what is computed under one identity must not serve another."""
        self._starts[request_id] = start_of(identity)
        self._told[request_id] = digests_of(prompt, identity)

    def give_up(self, request_ids: Iterable[str]) -> None:
        """A step of these requests has failed and wrote nothing: they have ended, and nobody looks at their results."""
        self._given_up.update(request_ids)

    def attach(self, pools: Mapping[str, KVCache]) -> None:
        """The digests are the KV of the first layer of each pool, so that they go where KV goes; 0: never written."""
        for spec in self._spec.pools:
            pool = pools[spec.name]
            self._page_size = pool.page_size
            self._shadows[spec.name] = pool.get_key_buffer(spec.layers[0]).view(-1).numpy().view(np.uint64)

    def warmup(self, max_rows: int, max_tokens: int) -> None:
        """Nothing to compile."""

    def forward(self, batch: Batch) -> StepOutput:
        """Check, write, and say the next tokens.  Raises ShadowViolation."""
        host = batch.host
        token_ids = batch.token_ids.tolist()
        newest: list[int] = []
        for row, request_id in enumerate(batch.request_ids):
            start, stop = int(host.q_start[row]), int(host.q_start[row + 1])
            prefix = int(host.prefix_lens[row])
            lines = {pool: self._slots(table[row].numpy(), prefix + stop - start)
                     for pool, table in batch.page_table.items()}  # fmt: skip
            digests = self._begin(request_id, prefix, lines)
            if len(digests) < prefix or request_id in self._given_up:
                newest.append(0)
                for pool, out_loc in batch.out_loc.items():
                    self._shadows[pool][out_loc[start:stop].numpy()] = 0
                continue
            del digests[prefix:]  # the request starts over after a preemption
            for token in token_ids[start:stop]:
                before = digests[-1] if digests else self._starts.get(request_id, _START)
                digests.append(digest(before, token))
            for spec in self._spec.pools:
                written = batch.out_loc[spec.name][start:stop].numpy()
                self._check(request_id, spec, lines[spec.name], digests, prefix, written)
                self._shadows[spec.name][written] = np.array(digests[prefix:], np.uint64)
            newest.append(digests[-1])
        tokens = [newest[row] % self._spec.vocab_size for row in host.sample_rows.tolist()]
        return StepOutput(next_tokens=torch.tensor(tokens, dtype=torch.int64))

    def close(self) -> None:
        """Forget everything."""
        self._digests.clear()
        self._told.clear()
        self._starts.clear()
        self._given_up.clear()

    def _begin(self, request_id: str, prefix: int, lines: Mapping[str, NDArray[np.int64]]) -> list[int]:
        """The digests of a request's prefixes as far as they are known."""
        digests = self._digests.setdefault(request_id, [])
        if len(digests) < prefix:  # others have computed what it begins with
            told = self._told.get(request_id)
            if told is None:
                first = self._spec.pools[0].name
                told = [int(value) for value in self._shadows[first][lines[first][:prefix]]]
            digests += told[len(digests) : prefix]
        return digests

    def _slots(self, line: NDArray[np.int32], length: int) -> NDArray[np.int64]:
        positions = np.arange(length)
        return line[positions // self._page_size].astype(np.int64) * self._page_size + positions % self._page_size

    def _check(
        self,
        request_id: str,
        spec: PoolSpec,
        slots: NDArray[np.int64],
        digests: list[int],
        prefix: int,
        out_loc: NDArray[np.int64],
    ) -> None:
        """What the row reads, from the first position in the window of its first new token on."""
        first = 0 if spec.window is None else max(prefix + 1 - spec.window, 0)
        if not np.array_equal(slots[prefix:], out_loc):
            raise ShadowViolation(f"{request_id!r}: slots {out_loc.tolist()} are not where its page table says")
        if (slots[first:] < self._page_size).any():
            raise ShadowViolation(f"{request_id!r}: a position lies in the dump page of {spec.name!r}")
        wrong = self._shadows[spec.name][slots[first:prefix]] != np.array(digests[first:prefix], np.uint64)
        self.checked_slots += prefix - first
        if wrong.any():
            at = first + int(np.flatnonzero(wrong)[0])
            raise ShadowViolation(
                f"{request_id!r}: slot {slots[at]} of position {at} in {spec.name!r} holds the KV of another prefix"
            )


def start_of(identity: str) -> int:
    """The digest of no tokens."""
    state = _START
    for character in identity:
        state = digest(state, ord(character))
    return state


def digests_of(tokens: Sequence[int], identity: str = "") -> list[int]:
    """The digest of each prefix of `tokens`, the shortest first."""
    state = start_of(identity)
    digests: list[int] = []
    for token in tokens:
        state = digest(state, int(token))
        digests.append(state)
    return digests


def digest(before: int, token: int) -> int:
    """Digest of a prefix that grows by one token (64 bit, FNV-1a with a final shuffle)."""
    value = ((before ^ (token + 1)) * 0x100000001B3) & _MASK
    value ^= value >> 29
    return (value * 0xBF58476D1CE4E5B9) & _MASK


def continuation(prompt: Sequence[int], count: int, vocab_size: int = 97, identity: str = "") -> list[int]:
    """What `ShadowRunner` says after `prompt` when nothing goes wrong: `count` tokens."""
    state = digests_of(prompt, identity)[-1] if len(prompt) else start_of(identity)
    said = []
    for _ in range(count):
        said.append(state % vocab_size)
        state = digest(state, said[-1])
    return said
