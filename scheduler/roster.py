"""Who is here: every live sequence, from the queue through its row to its end.

The one writer of sequences, their phases and the counters.  The core decides what happens; the roster makes it so and
keeps memory, rows, queue and counts in step with each other.
"""

import heapq
from collections import defaultdict, deque

import numpy as np

from kvloom.scheduler.counts import Counts
from kvloom.scheduler.plan import SchedulerStatistics
from kvloom.scheduler.ports import Memory
from kvloom.scheduler.prefill import Admission
from kvloom.scheduler.request import Finished, FinishReason, Move, Phase, Request, Sequence, Timings, Usage
from kvloom.scheduler.rows import Rows
from kvloom.scheduler.waiting import WaitingQueue

Ended = tuple[Sequence, Finished]


class Roster:
    """Live sequences by id, in the queue or in a row.

    Public parts, for the core to read: rows, waiting, counts, live.
    """

    def __init__(self, memory: Memory, eos_ids: tuple[int, ...]) -> None:
        self._memory = memory
        self.rows = Rows(memory.max_rows, eos_ids)
        self.waiting = WaitingQueue()
        self.counts = Counts()
        self.live: dict[str, Sequence] = {}
        self._arrivals = 0
        self._shared_for: tuple[Sequence, int] | None = None  # who was to enter, and the departures by then
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._admissions: deque[float] = deque(maxlen=32)  # when the last ones left the queue
        self._leaving: defaultdict[str, list[int]] = defaultdict(list)  # rows to give back, by reason

    @property
    def next_deadline(self) -> float | None:
        """The earliest deadline of a live sequence."""
        while self._deadlines and self._deadlines[0][2].phase is Phase.FINISHED:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    @property
    def ended(self) -> int:
        """Requests that have ended, ever."""
        return self.counts.finished.total()

    def late(self, now: float) -> list[Sequence]:
        """Sequences whose deadline has passed, earliest first; each is named once."""
        late = []
        while (deadline := self.next_deadline) is not None and deadline <= now:
            late.append(heapq.heappop(self._deadlines)[2])
        return late

    def retry_after(self, now: float) -> float:
        """Seconds until a place in the queue comes free, from how fast the last requests left it; 1 when unknown."""
        if len(self._admissions) < 2:
            return 1.0
        pace = (now - self._admissions[0]) / len(self._admissions)
        return min(max(pace, 0.05), 60.0)

    def queue(self, request: Request, max_new: int, now: float, sink: object) -> Sequence:
        """A new sequence at the end of the queue."""
        sequence = Sequence(
            request, self._arrivals, now, max_new, sink, tokens=request.prompt, queued_at=now, last_token_at=now
        )
        self._arrivals += 1
        self.counts.received += 1
        self.counts.phases[Phase.WAITING] += 1
        self.live[request.id] = sequence
        self.waiting.push(sequence)
        if request.deadline is not None:
            self._forget_ended()
            heapq.heappush(self._deadlines, (request.deadline, sequence.arrival, sequence))
        return sequence

    def share(self, head: Sequence) -> None:
        """Whoever comes may use what the others have computed so far.

        Not again for one that did not fit, unless somebody has left since: pages come back then.
        """
        asked = (head, self.rows.departures)
        if asked != self._shared_for:
            self._shared_for = asked
            running = self.rows.order
            self._memory.publish(running, self.rows.settled[running], self.rows.tokens_of)

    def enter(self, admission: Admission, now: float) -> None:
        """The head of the queue takes its row."""
        sequence, row, known, loaded = admission
        self.waiting.remove(sequence)
        self.move(sequence, Move.ADMIT)
        if sequence.admitted_at is None:
            sequence.admitted_at = now
            sequence.cached_tokens = known
        self.counts.reused(sequence, known, loaded)
        self.counts.wasted["preempted"] += max(0, sequence.computed - known)
        sequence.computed, sequence.kept = 0, None
        sequence.queue_seconds += now - sequence.queued_at
        sequence.row = row
        self._admissions.append(now)
        self.rows.enter(row, sequence, known)

    def preempt(self, row: int, now: float) -> None:
        """The sequence in `row`, which no plan out names, gives back its memory and goes to the head of the queue."""
        rows, sequence = self.rows, self.rows.at(row)
        self.move(sequence, Move.PREEMPT)
        self.counts.preemptions += 1
        sequence.ended_before = self.ended
        self._publish(row)
        sequence.computed = int(rows.settled[row])
        sequence.kept = self._memory.offload(row, sequence.computed)
        sequence.preemptions += 1
        sequence.row = -1
        sequence.queued_at = now
        sequence.last_token_at = float(rows.last_token_at[row])
        sequence.tokens = np.concatenate((sequence.request.prompt, rows.leave(row)))
        self.waiting.push(sequence)
        self._memory.release([row], [int(rows.last_step[row])], "preempt")

    def end(self, sequence: Sequence, reason: FinishReason, now: float, error: Exception | None = None) -> Ended:
        """The one way out: exactly one `Finished` for each request."""
        wanted = reason in (FinishReason.STOP, FinishReason.LENGTH)
        self.move(sequence, Move.FINISH)
        if sequence.row >= 0:
            if reason is not FinishReason.ERROR:  # what a failed step left behind is for nobody
                self._publish(sequence.row)
            outputs = len(self.rows.leave(sequence.row, aborted=not wanted))
            how = "finish" if wanted else "error" if reason is FinishReason.ERROR else "abort"
            self._leaving[how].append(sequence.row)
            sequence.row = -1
        else:
            outputs = len(sequence.tokens) - len(sequence.request.prompt)
            sequence.queue_seconds += now - sequence.queued_at
            self.counts.wasted["preempted"] += sequence.computed
            if sequence.kept is not None:
                self._memory.forget(sequence.kept)
            self.waiting.remove(sequence)
        del self.live[sequence.request.id]
        self.counts.finished[reason] += 1
        usage = Usage(len(sequence.request.prompt), outputs, sequence.cached_tokens, sequence.preemptions)
        timings = Timings(
            arrived_at=sequence.arrived_at,
            finished_at=now,
            admitted_at=sequence.admitted_at,
            first_token_at=sequence.first_token_at,
            queue_seconds=sequence.queue_seconds,
        )
        request = sequence.request
        return sequence, Finished(request.id, reason, usage, timings, error, request.metadata)

    def give_back(self) -> None:
        """One free group for all that left in this call, by reason; their fences are the last plans that name them."""
        for reason, rows in self._leaving.items():
            self._memory.release(rows, self.rows.last_step[rows].tolist(), reason)
        self._leaving.clear()

    def statistics(self, steps_in_flight: int) -> SchedulerStatistics:
        """Counts since start and the state now."""
        counts, head = self.counts, self.waiting.peek()
        return SchedulerStatistics(
            waiting=counts.phases[Phase.WAITING],
            preempted=counts.phases[Phase.PREEMPTED],
            prefilling=counts.phases[Phase.PREFILLING],
            decoding=counts.phases[Phase.DECODING],
            steps_in_flight=steps_in_flight,
            waiting_prompt_tokens=self.waiting.tokens,
            oldest_waiting_at=head.arrived_at if head else None,
            received=counts.received,
            rejected=dict(counts.rejected),
            finished=dict(counts.finished),
            preemptions=counts.preemptions,
            prompt_tokens_computed=counts.prompt_computed,
            prompt_tokens_recomputed=counts.prompt_recomputed,
            prompt_tokens_cached=counts.prompt_cached,
            prompt_tokens_loaded=counts.prompt_loaded,
            output_tokens=counts.output_tokens,
            wasted_tokens=dict(counts.wasted),
            steps=dict(counts.steps),
            failed_steps=counts.failed_steps,
        )

    def _publish(self, row: int) -> None:
        """Before a row is left: what it has computed may serve others, or itself when it comes back."""
        self._memory.publish(np.array([row], np.int32), self.rows.settled[row : row + 1], self.rows.tokens_of)

    def _forget_ended(self) -> None:
        """Those who ended long before their deadline are not kept until it comes."""
        if len(self._deadlines) > 2 * len(self.live) + 64:
            self._deadlines = [entry for entry in self._deadlines if entry[2].phase is not Phase.FINISHED]
            heapq.heapify(self._deadlines)

    def move(self, sequence: Sequence, move: Move) -> None:
        """Change the phase by the table.  Raises BrokenInvariant for a move that is not in it."""
        phase = sequence.moved(move)
        self.counts.phases[sequence.phase] -= 1
        self.counts.phases[phase] += 1
        sequence.phase = phase
