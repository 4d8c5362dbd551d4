"""SchedulerCore: who runs next, without doing anything about it.

A sans-IO state machine in the manner of h11 and etcd's raft: plain calls on plain values, time is an argument, nothing
waits, logs or draws a random number.  The same calls give the same plans, byte for byte.

    core.add(request, now)            a request enters the queue
    plan = core.plan(now)             what the next step does; reserves memory, touches nothing else outside
    core.commit(step, result, now)    its result; tokens and final events come back
    core.abandon(step, error, now)    or its failure: the requests of that step end, everyone else goes on
    core.abort(request_id, now)       at any moment

Every plan ends in exactly one commit or abandon, in order.  Every request ends in exactly one `Finished`.

Two lengths per sequence: *settled* (the step is committed) and *scheduled* (planned).  Stop checks, publishing and
trimming use the settled one only.  What a sequence gives back carries a fence: the last plan that names its row.
"""

from collections import deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kvloom.scheduler.assemble import assemble
from kvloom.scheduler.config import ModelLimits, SchedulerConfig
from kvloom.scheduler.decode import grow
from kvloom.scheduler.door import output_limit
from kvloom.scheduler.errors import BrokenInvariant, DuplicateRequest, InvalidConfig, PlanMisuse, QueueFull, Rejected
from kvloom.scheduler.plan import Committed, IntArray, Plan, SchedulerStatistics, StepResult
from kvloom.scheduler.ports import Memory
from kvloom.scheduler.prefill import Chunk, admit, continue_prefills, cut, next_in, reserve
from kvloom.scheduler.request import FinishReason, Move, Phase, Request, Sequence
from kvloom.scheduler.results import checked_tokens
from kvloom.scheduler.roster import Ended, Roster
from kvloom.scheduler.rows import SecondsArray


class SchedulerCore:
    """The scheduler's state and its only writer; one thread uses it.

    Raises InvalidConfig when the settings ask for more rows than the memory has.
    """

    def __init__(self, memory: Memory, config: SchedulerConfig, limits: ModelLimits) -> None:
        if config.max_running > memory.max_rows:
            raise InvalidConfig(f"max_running={config.max_running}, but the memory has {memory.max_rows} rows")
        self._memory = memory
        self._config = config
        self._limits = limits
        self._roster = Roster(memory, limits.eos_ids)
        self._rows = self._roster.rows
        self._counts = self._roster.counts
        self._plans: deque[Plan] = deque()
        self._step = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is live or any plan out."""
        return bool(self._roster.live or self._plans)

    @property
    def free_places(self) -> int:
        """Places in the queue; those that were preempted take none."""
        queued = len(self._roster.waiting) - self._counts.phases[Phase.PREEMPTED]
        return max(0, self._config.max_waiting - queued)

    @property
    def queue_is_full(self) -> bool:
        """Whether `add` would raise QueueFull."""
        return self.free_places == 0

    @property
    def live(self) -> list[Sequence]:
        """Every request that has not ended, in order of arrival."""
        return list(self._roster.live.values())

    def add(self, request: Request, now: float, sink: object = None) -> Sequence:
        """Queue a request; `sink` comes back with everything that concerns it.

        Raises DuplicateRequest, QueueFull, InvalidRequest, TooLong or NeverFits, and has changed nothing then; whoever
        turns the caller away counts it with `refuse`.
        """
        max_new = self.check(request)
        if self.queue_is_full:
            places = self._config.max_waiting
            raise QueueFull(f"all {places} places in the queue are taken", self._roster.retry_after(now))
        return self._roster.queue(request, max_new, now, sink)

    def check(self, request: Request) -> int:
        """Most output tokens the request can have.  Raises what `add` raises but for QueueFull; mutates nothing."""
        max_new = output_limit(request, self._limits, self._memory.max_seq)
        if request.id in self._roster.live:
            raise DuplicateRequest(f"request id {request.id!r} is in use")
        return max_new

    def refuse(self, error: Rejected) -> None:
        """Count a request that was refused at the door."""
        self._counts.received += 1
        self._counts.rejected[error.reason] += 1

    def abort(self, request_id: str, now: float) -> Committed:
        """End a request now, whatever it is doing; nothing happens when no such request is live."""
        sequence = self._roster.live.get(request_id)
        return self._end_all([sequence] if sequence else [], FinishReason.ABORT, now)

    def expire(self, now: float) -> Committed:
        """End the requests whose deadline has passed."""
        return self._end_all(self._roster.late(now), FinishReason.DEADLINE, now)

    def end_all(self, reason: FinishReason, now: float, error: Exception | None = None) -> Committed:
        """End every live request."""
        return self._end_all(list(self._roster.live.values()), reason, now, error)

    def plan(self, now: float) -> Plan | None:
        """The next step, or None when there is nothing to do (or as many plans are out as allowed).

        Raises BrokenInvariant when there is work, nothing in flight to wait for, and still no way forward.
        """
        if len(self._plans) >= self._config.steps_in_flight_max:
            return None
        budget = self._config.max_batch_tokens
        rows = self._rows
        self._memory.tick(now)
        decode = grow(rows, self._memory, budget, lambda row: self._roster.preempt(row, now))
        departures = rows.departures
        chunks = self._prefill(budget - len(decode), len(decode), now)
        if departures != rows.departures:  # somebody has made room for a chunk
            decode = decode[rows.alive[decode]]
        if not len(decode) and not chunks:
            self._require_progress()
            return None
        # Fences of whoever used this memory before are below that.
        self._step = max(self._step, self._memory.next_step)
        plan = assemble(self._step, rows, decode, chunks)
        self._step += 1
        self._plans.append(plan)
        return plan

    def commit(self, step: int, result: StepResult, now: float) -> Committed:
        """The result of the oldest plan out.

        Raises PlanMisuse (not the oldest) or BadStepResult (does not fit the plan): nothing has changed, and the step
        can still be committed or abandoned.
        """
        plan = self._oldest(step)
        tokens = checked_tokens(plan, result, self._limits.vocab_size, self._rows.alive)
        rows, sampled = self._rows, plan.sample_rows
        self._close(plan)
        failed = self._fail_rows(plan, result, now)
        live, lengths, sequences = plan.rows, plan.seq_lens, plan.sequences
        got, settled = (live, lengths) if len(sampled) == len(live) else (live[sampled], lengths[sampled])
        if plan.departures != rows.departures:  # somebody has left since: their tokens are for nobody
            alive = self._alive(plan)
            live, lengths = live[alive], lengths[alive]
            kept = alive[sampled]
            got, settled, tokens = got[kept], settled[kept], tokens[kept]
        if len(got) != len(plan.rows):
            sequences = rows.members(got)
        rows.settled[live] = lengths
        rows.append(got, tokens, settled)
        self._counts.output_tokens += len(got)
        first, gaps = self._time_tokens(plan, got, settled, now)
        if self._memory.windowed:
            prompts = live[lengths <= rows.target[live]]
            self._memory.publish(prompts, rows.settled[prompts], rows.tokens_of)
            self._memory.trim(live, lengths, rows.tokens_of)
        ended = [*failed, *self._stop(got, tokens, settled, now)]
        self._preempt_doomed(now)
        self._roster.give_back()
        return Committed(sequences, tokens.tolist(), ended, first, gaps)

    def abandon(self, step: int, error: Exception | None, now: float) -> Committed:
        """The oldest plan out has failed: its requests end with `error`, everyone else goes on.  Raises PlanMisuse.

        `error` None: nobody waits for it any more, which is no failure.
        """
        plan = self._oldest(step)
        self._close(plan)
        self._counts.failed_steps += error is not None
        live = plan.rows[self._alive(plan)]
        return self._end_all(self._rows.members(live), FinishReason.ERROR, now, error)

    def statistics(self) -> SchedulerStatistics:
        """Counts since start and the state now."""
        return self._roster.statistics(steps_in_flight=len(self._plans))

    def _prefill(self, budget: int, decoding: int, now: float) -> list[Chunk]:
        """Chunks under way, then new sequences from the queue, within `budget` tokens, beside rows that decode."""
        most, waiting = self._config.prefill_chunk, self._roster.waiting
        chunks = continue_prefills(self._rows, budget, most)
        budget -= sum(len(chunk.tokens) for chunk in chunks)
        if head := next_in(self._rows, waiting, self._config, self._roster.ended):
            self._roster.share(head)
        while budget > 0 and (head := next_in(self._rows, waiting, self._config, self._roster.ended)):
            admission = admit(head, self._rows, self._memory)
            if admission is None:
                break
            self._roster.enter(admission, now)
            chunks.append(cut(self._rows, admission.row, min(most, budget)))
            budget -= len(chunks[-1].tokens)
        spare = decoding * self._config.steps_in_flight_max  # a page each for the steps until their windows move on
        chunks = reserve(self._rows, self._memory, chunks, spare, lambda row: self._roster.preempt(row, now))
        for chunk in chunks:
            self._counts.prefilled(self._rows.at(chunk.row), chunk.start, chunk.start + len(chunk.tokens))
        return chunks

    def _preempt_doomed(self, now: float) -> None:
        if self._rows.dooms:
            for row in self._rows.order[self._rows.doomed[self._rows.order]].tolist():
                if not self._rows.in_flight(row):
                    self._roster.preempt(row, now)

    def _oldest(self, step: int) -> Plan:
        if not self._plans or self._plans[0].step != step:
            out = [plan.step for plan in self._plans]
            raise PlanMisuse(f"step {step} is not the oldest one out; out are {out}")
        return self._plans[0]

    def _close(self, plan: Plan) -> None:
        """The step is over, well or not: its fence falls."""
        self._plans.popleft()
        self._rows.settled_step = plan.step
        self._memory.settle(plan.step)
        self._counts.steps[plan.kind] += 1

    def _alive(self, plan: Plan) -> NDArray[np.bool_]:
        """Which rows of a plan still have the sequence they had; counts what was computed for the others."""
        rows = self._rows
        alive = rows.alive[plan.rows]
        aborted = rows.aborted[plan.rows] & ~alive
        self._counts.wasted["aborted"] += int(plan.q_lens[aborted].sum())
        self._counts.wasted["overshoot"] += int(plan.q_lens[~alive & ~aborted].sum())
        return alive

    def _fail_rows(self, plan: Plan, result: StepResult, now: float) -> list[Ended]:
        """End the requests whose row had an error."""
        rows = [(int(plan.rows[plan.sample_rows[i]]), error) for i, error in sorted(result.row_errors.items())]
        return [
            self._roster.end(self._rows.at(row), FinishReason.ERROR, now, error)
            for row, error in rows
            if self._rows.alive[row]
        ]

    def _time_tokens(
        self, plan: Plan, got: IntArray, settled: IntArray, now: float
    ) -> tuple[list[float], SecondsArray]:
        """Note when the rows got their token; returns seconds to first tokens, and between tokens."""
        rows = self._rows
        gaps = now - rows.last_token_at[got]
        rows.last_token_at[got] = now
        if plan.decode_rows == len(plan.rows):
            return [], gaps
        for row in plan.rows[plan.sample_rows[plan.sample_rows >= plan.decode_rows]].tolist():
            if rows.alive[row]:
                self._roster.move(rows.at(row), Move.PROMPT_DONE)
        first = settled == rows.prompt[got]
        firsts = rows.members(got[first])
        for sequence in firsts:
            sequence.first_token_at = now
        return [now - sequence.arrived_at for sequence in firsts], gaps[~first]

    def _stop(self, got: IntArray, tokens: IntArray, settled: IntArray, now: float) -> list[Ended]:
        """End the sequences that just got their last token."""
        rows = self._rows
        ended = settled >= rows.end[got]
        stopped = rows.stopped(got, tokens, settled)
        if stopped is not None:
            ended |= stopped
        if not ended.any():
            return []
        stops = np.zeros(len(got), np.bool_) if stopped is None else stopped
        return [
            self._roster.end(rows.at(row), FinishReason.STOP if stop else FinishReason.LENGTH, now)
            for row, stop in zip(got[ended].tolist(), stops[ended].tolist(), strict=True)
        ]

    def _end_all(
        self, sequences: Iterable[Sequence], reason: FinishReason, now: float, error: Exception | None = None
    ) -> Committed:
        ended = [self._roster.end(sequence, reason, now, error) for sequence in sequences]
        self._roster.give_back()
        return Committed(finished=ended)

    def _require_progress(self) -> None:
        if not self._plans and self._roster.live:
            statistics = self.statistics()
            raise BrokenInvariant(
                f"{statistics.waiting + statistics.preempted} requests wait, {len(self._rows.order)} run, "
                f"nothing is in flight, and none can go on; does somebody else use the memory?  {self._memory}"
            )
