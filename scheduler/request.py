"""A request is what was asked; a sequence is what is happening to it."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvloom.scheduler.errors import BrokenInvariant
from kvloom.scheduler.sampling_params import SamplingParams

TokenArray = NDArray[np.int32]


class FinishReason(enum.StrEnum):
    """Why a request ended; the values are label values of `kvloom_requests_finished_total`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    DEADLINE = "deadline"
    ERROR = "error"
    SHUTDOWN = "shutdown"


class Phase(enum.StrEnum):
    """Where a live sequence stands; the values are label values of `kvloom_requests`."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Move(enum.StrEnum):
    """What can happen to a sequence."""

    ADMIT = "admit"
    PROMPT_DONE = "prompt_done"
    PREEMPT = "preempt"
    FINISH = "finish"


# Illegal moves are a table look-up: a miss raises and changes nothing.
TRANSITIONS: Mapping[tuple[Phase, Move], Phase] = {
    (Phase.WAITING, Move.ADMIT): Phase.PREFILLING,
    (Phase.PREEMPTED, Move.ADMIT): Phase.PREFILLING,
    (Phase.PREFILLING, Move.PROMPT_DONE): Phase.DECODING,
    (Phase.PREFILLING, Move.PREEMPT): Phase.PREEMPTED,
    (Phase.DECODING, Move.PREEMPT): Phase.PREEMPTED,
    (Phase.WAITING, Move.FINISH): Phase.FINISHED,
    (Phase.PREEMPTED, Move.FINISH): Phase.FINISHED,
    (Phase.PREFILLING, Move.FINISH): Phase.FINISHED,
    (Phase.DECODING, Move.FINISH): Phase.FINISHED,
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """What a caller asks for.

    id        unique among live requests
    prompt    int32 [P], P >= 1; not copied, must not change while the request lives
    params    how to choose tokens and when to stop
    deadline  absolute, on the clock that is passed to the core, in seconds; None: never
    seed      64-bit number that the request's random numbers come from
    metadata  the caller's own, returned untouched with `Finished`
    """

    id: str
    prompt: TokenArray
    params: SamplingParams = SamplingParams()
    deadline: float | None = None
    seed: int = 0
    cache_namespace: str = ""
    metadata: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request; `cached_tokens` is the part of the prompt whose KV was found in the prefix cache."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds on the clock passed to the core; None where the request never came so far."""

    arrived_at: float
    finished_at: float
    admitted_at: float | None = None
    first_token_at: float | None = None
    queue_seconds: float = 0.0

    @property
    def total_seconds(self) -> float:
        """From arrival to the end."""
        return self.finished_at - self.arrived_at

    @property
    def first_token_seconds(self) -> float | None:
        """From arrival to the first token."""
        return None if self.first_token_at is None else self.first_token_at - self.arrived_at


@dataclass(frozen=True, slots=True)
class Finished:
    """The one final event of a request."""

    request_id: str
    reason: FinishReason
    usage: Usage
    timings: Timings
    error: Exception | None = None
    metadata: Mapping[str, object] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Sequence:
    """One live request.  Only `SchedulerCore` writes it; what changes from step to step lives in arrays (`rows.py`).

    arrival        place in the order of arrival: smaller is older
    max_new        most output tokens, after the limits of model and pool
    sink           the caller's own handle, carried along so that delivery needs no look-up
    row            its line in the table while it runs, else -1
    tokens         int32: what prefill computes, the prompt and the outputs from before a preemption
    prefilled      prompt tokens planned or reused at least once; what is planned below that is work done twice
    kept           the memory's own value for its KV on the host, until it comes back
    ended_before   requests that had ended when it was preempted last, -1 if it never was
    computed       tokens that had their KV when it was preempted last, until it comes back
    """

    request: Request
    arrival: int
    arrived_at: float
    max_new: int
    sink: Any
    tokens: TokenArray
    queued_at: float
    phase: Phase = Phase.WAITING
    row: int = -1
    prefilled: int = 0
    computed: int = 0
    ended_before: int = -1
    kept: Any = None
    cached_tokens: int = 0
    preemptions: int = 0
    queue_seconds: float = 0.0
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float = 0.0

    def moved(self, move: Move) -> Phase:
        """The phase after `move`.  Raises BrokenInvariant for a move that is not in the table; mutates nothing."""
        phase = TRANSITIONS.get((self.phase, move))
        if phase is None:
            raise BrokenInvariant(f"request {self.request.id!r} cannot {move} while {self.phase}")
        return phase
