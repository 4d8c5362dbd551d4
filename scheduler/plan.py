"""What goes between the core and the outside: frozen values, plain numbers and arrays.

A plan names rows and counts, never pages or slots: the core reasons in counts, the allocator deals in indices.  The
arrays of a plan are not written after it was made; a plan is out until it is committed or abandoned.
"""

from collections.abc import Mapping, Sequence as SequenceOf
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvloom.scheduler.request import Finished, Sequence

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]


_NONE = np.empty(0)


@dataclass(frozen=True, slots=True)
class History:
    """All tokens a row knows when it is first sampled after it was (re)admitted; penalties count them."""

    row_slot: int
    prompt: IntArray
    outputs: IntArray


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of the sampled rows, float32 [S]; `histories` of those that are sampled for the first time."""

    repetition: FloatArray
    presence: FloatArray
    frequency: FloatArray
    histories: SequenceOf[History]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the sampled rows choose, arrays [S]; `uniform` in [0, 1) is each row's random number of this step."""

    temperature: FloatArray
    top_k: IntArray
    top_p: FloatArray
    min_p: FloatArray
    uniform: FloatArray
    penalties: Penalties | None


class Plan(NamedTuple):
    """One step: R rows, T tokens, S sampled rows; decode rows (one token each) come first.

    rows [R]          row slots
    prefix_lens [R]   tokens of the row before this step
    q_lens [R]        tokens of the row in this step; seq_lens = prefix_lens + q_lens
    token_ids [T]     0 where the token is still in flight
    token_src [T]     row slot whose last sampled token goes here, else -1; None when every token is known
    sample_rows [S]   which rows (indices into R) want a token
    sampling          None: all sampled rows are greedy
    sequences         who was in the rows when the plan was made
    departures        sequences that had left their rows by then: unchanged means that all are still there
    """

    step: int
    rows: IntArray
    prefix_lens: IntArray
    q_lens: IntArray
    seq_lens: IntArray
    decode_rows: int
    token_ids: IntArray
    token_src: IntArray | None
    sample_rows: IntArray
    sampling: Sampling | None
    sequences: SequenceOf[Sequence]
    departures: int

    @property
    def tokens(self) -> int:
        """T."""
        return len(self.token_ids)

    @property
    def kind(self) -> str:
        """prefill, decode or mixed: the label of the step metrics."""
        if self.decode_rows == len(self.rows):
            return "decode"
        return "mixed" if self.decode_rows else "prefill"

    @property
    def request_ids(self) -> list[str]:
        """Ids in the order of the rows."""
        return [sequence.request.id for sequence in self.sequences]


class StepResult(NamedTuple):
    """What a step brought: one token per sampled row, int [S] on the host; errors by index into the sampled rows."""

    tokens: NDArray[np.integer]
    row_errors: Mapping[int, Exception] = MappingProxyType({})


class Committed(NamedTuple):
    """What a commit (or abandon) means for others: tokens to hand over, in row order, and requests that ended.

    `sequences[i]` got `tokens[i]`; deliver these before `finished`.  `first_token_seconds` and `inter_token_seconds`
    are this step's observations, for histograms.
    """

    sequences: SequenceOf[Sequence] = ()
    tokens: SequenceOf[int] = ()
    finished: SequenceOf[tuple[Sequence, Finished]] = ()
    first_token_seconds: SequenceOf[float] = ()
    inter_token_seconds: NDArray[np.float64] = _NONE


class SchedulerStatistics(NamedTuple):
    """Counts since start, and how many requests are in which state now.

    Conservation: received = sum(rejected) + sum(finished) + waiting + preempted + prefilling + decoding.
    """

    waiting: int
    preempted: int
    prefilling: int
    decoding: int
    steps_in_flight: int
    waiting_prompt_tokens: int
    oldest_waiting_at: float | None  # on the core's clock
    received: int
    rejected: Mapping[str, int]
    finished: Mapping[str, int]
    preemptions: int
    prompt_tokens_computed: int
    prompt_tokens_recomputed: int
    prompt_tokens_cached: int
    prompt_tokens_loaded: int  # evicted from the cache, and back from the host
    output_tokens: int
    wasted_tokens: Mapping[str, int]
    steps: Mapping[str, int]
    failed_steps: int
