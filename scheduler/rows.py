"""What the core knows about running sequences, as arrays by row.

A step touches every running sequence, so all that changes from step to step is kept here, one array per quantity: the
work per step is a few dozen array operations plus what must be done for each sequence whose course changed (admitted,
stopped, preempted).  Plain integers beside the arrays say when an operation can be left out.  Only the core, its roster
and the planners it calls write here.
"""

import numpy as np
from numpy.typing import NDArray

from kvloom.scheduler.errors import BrokenInvariant
from kvloom.scheduler.plan import History, IntArray, Penalties, Sampling
from kvloom.scheduler.randomness import uniforms
from kvloom.scheduler.request import Sequence, TokenArray

SecondsArray = NDArray[np.float64]
OUTPUT_BLOCK = 64  # outputs of a row that are kept in the arrays; older ones are moved out in blocks
NO_STOP = -1  # fills the unused places of a row's stop ids; no token has this id


class Rows:
    """Arrays [max_rows] by row slot, and the rows in order of age.

    prompt      tokens of the prompt; output number n (from 0) is fed back at position prompt + n
    target      tokens that prefill computes: the prompt, and outputs from before a preemption
    end         positions that get KV in all: prompt + max_new - 1, since the last output is not fed back
    stop_from   positions that must be settled before a stop token counts: prompt + min_new - 1
    scheduled   positions planned so far, steps in flight included
    settled     positions whose step is committed
    last_token  the newest output token known on the host
    last_step   the last plan that named the row: the fence of what it gives back
    alive       False once the sequence has left the row, though plans out may still name it
    aborted     it left because nobody wants its tokens any more
    doomed      to be preempted as soon as no plan out names it; not planned any more

    From the last chunk of its prompt on, a row has `settled - prompt + 1` outputs on the host and
    `scheduled - prompt + 1` planned.
    """

    def __init__(self, max_rows: int, eos_ids: tuple[int, ...]) -> None:
        def ints() -> IntArray:
            return np.zeros(max_rows, np.int32)

        def floats() -> NDArray[np.float32]:
            return np.zeros(max_rows, np.float32)

        def bools() -> NDArray[np.bool_]:
            return np.zeros(max_rows, np.bool_)

        self._eos_ids = eos_ids
        self.prompt, self.target, self.end, self.stop_from = ints(), ints(), ints(), ints()
        self.scheduled, self.settled, self.last_token = ints(), ints(), ints()
        self.last_step = np.full(max_rows, -1, np.int64)
        self.alive, self.aborted, self.doomed = bools(), bools(), bools()
        self.last_token_at = np.zeros(max_rows, np.float64)
        self._newest = np.zeros((max_rows, OUTPUT_BLOCK), np.int32)  # output n at n % OUTPUT_BLOCK
        self._older: list[list[TokenArray]] = [[] for _ in range(max_rows)]  # whole blocks
        self.stop_ids = np.full((max_rows, max(len(eos_ids), 1)), NO_STOP, np.int32)
        self.top_k, self.temperature, self.top_p, self.min_p = ints(), floats(), floats(), floats()
        self.repetition, self.presence, self.frequency = floats(), floats(), floats()
        self.seed = np.zeros(max_rows, np.int64)
        self.chooses, self.penalised = bools(), bools()  # chooses: not simply the likeliest token
        self.sequence: list[Sequence | None] = [None] * max_rows
        self.settled_step = -1  # the last step that was committed or abandoned
        self.planned_step = -1  # the last step that was planned
        self.running = 0  # rows alive
        self.departures = 0  # sequences that have left their row, ever
        self.prefilling = 0  # rows alive whose prompt is not wholly planned
        self.dooms = 0  # rows alive that are marked
        self._choosing = 0  # rows alive that are not greedy
        self._stopping = 0  # rows alive that have a stop token
        self._order: IntArray | None = None
        self._members: list[Sequence] = []

    @property
    def order(self) -> IntArray:
        """Rows of the running sequences, oldest first."""
        if self._order is None:
            rows = np.flatnonzero(self.alive)
            arrivals = np.array([self.at(row).arrival for row in rows.tolist()], np.int64)
            self._order = rows[np.argsort(arrivals)].astype(np.int32)
            self._order.setflags(write=False)  # plans, and with them runners, get this very array
            self._members = [self.at(row) for row in self._order.tolist()]
        return self._order

    def members(self, rows: IntArray) -> list[Sequence]:
        """The sequences in `rows`; the same list again, not to be changed, while all run undisturbed."""
        if rows is self._order:
            return self._members
        return [self.at(row) for row in rows.tolist()]

    def at(self, row: int) -> Sequence:
        """The sequence in a row that is in use."""
        sequence = self.sequence[row]
        if sequence is None:
            raise BrokenInvariant(f"nobody runs in row {row}")
        return sequence

    def in_flight(self, row: int) -> bool:
        """Whether a plan out names the row."""
        return bool(self.last_step[row] > self.settled_step)

    def enter(self, row: int, sequence: Sequence, computed: int) -> None:
        """A sequence takes a row; `computed` of its tokens have their KV already."""
        params, prompt = sequence.request.params, len(sequence.request.prompt)
        outputs = sequence.tokens[prompt:]
        self.sequence[row] = sequence
        self.prompt[row], self.target[row] = prompt, len(sequence.tokens)
        self.end[row] = prompt + sequence.max_new - 1
        self.stop_from[row] = prompt + min(params.min_new_tokens, sequence.max_new) - 1
        self.scheduled[row] = self.settled[row] = computed
        self.last_step[row] = -1
        self.alive[row] = True
        self.doomed[row] = self.aborted[row] = False
        self.last_token_at[row] = sequence.last_token_at
        self._set_stops(row, params.stop_token_ids if params.ignore_eos else (*self._eos_ids, *params.stop_token_ids))
        self.temperature[row], self.top_k[row] = params.temperature, params.top_k
        self.top_p[row], self.min_p[row] = params.top_p, params.min_p
        self.repetition[row] = params.repetition_penalty
        self.presence[row], self.frequency[row] = params.presence_penalty, params.frequency_penalty
        self.seed[row] = sequence.request.seed
        self.penalised[row] = params.penalised
        self.chooses[row] = params.temperature > 0 or params.penalised
        self._count(row, 1)
        whole = len(outputs) // OUTPUT_BLOCK * OUTPUT_BLOCK
        self._older[row] = [outputs[:whole]]
        self._newest[row, : len(outputs) - whole] = outputs[whole:]

    def leave(self, row: int, *, aborted: bool = False) -> TokenArray:
        """The sequence leaves its row; returns its output tokens.  Plans out may still name the row."""
        self._count(row, -1)
        self.departures += 1
        self.alive[row] = False
        self.aborted[row] = aborted
        self.sequence[row] = None
        outputs = self._outputs_of(row)
        self._older[row] = []
        return outputs

    def tokens_of(self, row: int, start: int, stop: int) -> TokenArray:
        """The tokens at positions `start` to `stop` of a row in use, as far as they are known on the host; int32."""
        known, prompt = self.at(row).tokens, int(self.prompt[row])
        if stop <= len(known):
            return known[start:stop]
        outputs = self._outputs_of(row)
        return np.concatenate((known[start:prompt], outputs[max(start - prompt, 0) : stop - prompt]))

    def doom(self, row: int) -> None:
        """Mark a row: it is not planned any more, and preempted once no plan out names it."""
        self.doomed[row] = True
        self.dooms += 1

    def append(self, rows: IntArray, tokens: IntArray, settled: IntArray) -> None:
        """One more output token for each of `rows`, whose step has settled `settled` positions."""
        place = (settled - self.prompt[rows]) % OUTPUT_BLOCK
        self._newest[rows, place] = tokens
        self.last_token[rows] = tokens
        for row in rows[place == OUTPUT_BLOCK - 1].tolist():
            self._older[row].append(self._newest[row].copy())

    def decodable(self) -> IntArray:
        """Rows that can take a further token: prompt planned, more outputs allowed, not marked; oldest first."""
        rows = self.order
        if not self.prefilling and not self.dooms and self.planned_step == self.settled_step:
            return rows  # nothing in flight: a row that has all its outputs has left already
        scheduled = self.scheduled[rows]
        ready = (scheduled >= self.target[rows]) & (scheduled < self.end[rows]) & ~self.doomed[rows]
        return rows if ready.all() else rows[ready]

    def prompts_under_way(self) -> IntArray:
        """Rows whose prompt is not wholly planned yet, oldest first."""
        if not self.prefilling:
            return self.order[:0]
        rows = self.order
        return rows[(self.scheduled[rows] < self.target[rows]) & ~self.doomed[rows]]

    def stopped(self, rows: IntArray, tokens: IntArray, settled: IntArray) -> NDArray[np.bool_] | None:
        """Which of `rows` end with the token they just got; None: none does."""
        if not self._stopping:
            return None
        hit = self.stop_ids[rows] == tokens[:, None]
        return hit.any(axis=1) & (settled >= self.stop_from[rows]) if hit.any() else None

    def choices(self, rows: IntArray, seq_lens: IntArray, sampled: IntArray) -> Sampling | None:
        """How the sampled `rows` choose when they have `seq_lens[sampled]` positions; None when all are greedy.

        Call before `scheduled` moves.
        """
        if not self._choosing or not self.chooses[rows].any():
            return None
        return Sampling(
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            uniform=uniforms(self.seed[rows], seq_lens[sampled] - self.prompt[rows]),
            penalties=self._penalties(rows),
        )

    def _penalties(self, rows: IntArray) -> Penalties | None:
        penalised = self.penalised[rows]
        if not penalised.any():
            return None
        first = rows[penalised & (self.scheduled[rows] < self.target[rows])]  # their last chunk is planned just now
        return Penalties(
            repetition=self.repetition[rows],
            presence=self.presence[rows],
            frequency=self.frequency[rows],
            histories=tuple(History(row, self.at(row).request.prompt, self._outputs_of(row)) for row in first.tolist()),
        )

    def _outputs_of(self, row: int) -> TokenArray:
        prompt = self.prompt[row]
        count = max(self.settled[row] + 1, self.target[row]) - prompt  # before the prompt is done: those from before
        return np.concatenate((*self._older[row], self._newest[row, : count % OUTPUT_BLOCK]))

    def _count(self, row: int, by: int) -> None:
        """A sequence has entered its row, or leaves it."""
        self._order = None
        self.running += by
        self.prefilling += by * int(self.scheduled[row] < self.target[row])
        self.dooms += by * int(self.doomed[row])
        self._choosing += by * int(self.chooses[row])
        self._stopping += by * int(self.stop_ids[row].max() != NO_STOP)

    def _set_stops(self, row: int, stops: tuple[int, ...]) -> None:
        short = len(stops) - self.stop_ids.shape[1]
        if short > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, short)), constant_values=NO_STOP)
        self.stop_ids[row] = NO_STOP
        self.stop_ids[row, : len(stops)] = stops
