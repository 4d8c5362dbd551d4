"""Which prompts are computed this step: first what is under way, then who may enter.

A prompt's pages are reserved whole when it enters, so a prefill once begun never stalls half-way for pages.
"""

from typing import NamedTuple

from kvloom.scheduler.config import SchedulerConfig
from kvloom.scheduler.ports import Match, Memory
from kvloom.scheduler.request import Sequence, TokenArray
from kvloom.scheduler.rows import Rows
from kvloom.scheduler.waiting import WaitingQueue


class Chunk(NamedTuple):
    """A part of one row's prompt: `tokens` from `start` on; `last` when a token is sampled behind it."""

    row: int
    start: int
    tokens: TokenArray
    last: bool


class Admission(NamedTuple):
    """The head of the queue has a row and pages; `match` is what it need not compute."""

    sequence: Sequence
    row: int
    match: Match


def continue_prefills(rows: Rows, budget: int, chunk: int) -> list[Chunk]:
    """Chunks of prompts under way, oldest first, at most `chunk` tokens each, `budget` together.  Mutates nothing."""
    chunks = []
    for row in rows.prompts_under_way().tolist():
        if budget <= 0:
            break
        chunks.append(cut(rows, row, min(chunk, budget)))
        budget -= len(chunks[-1].tokens)
    return chunks


def cut(rows: Rows, row: int, most: int) -> Chunk:
    """The next chunk of a row's prompt, at most `most` tokens.  Mutates nothing."""
    start, target = int(rows.scheduled[row]), int(rows.target[row])
    stop = min(target, start + most)
    return Chunk(row, start, rows.at(row).tokens[start:stop], stop == target)


def admit_next(rows: Rows, waiting: WaitingQueue, memory: Memory, config: SchedulerConfig) -> Admission | None:
    """Row and pages for the head of the queue, or None: strictly first come, first served.

    One page per running sequence stays free, so that what enters is not at once the next to make room.  While a
    victim is on its way out nobody enters: its pages are spoken for.  Mutates `memory` only when it succeeds.
    """
    head = waiting.peek()
    running = rows.order
    if head is None or len(running) >= config.max_running or rows.dooms:
        return None
    match = memory.match(head.tokens, head.request.cache_namespace)
    row = memory.admit(match, len(head.tokens), len(running))
    return None if row is None else Admission(head, row, match)
