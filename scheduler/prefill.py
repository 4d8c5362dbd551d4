"""Which prompts are computed this step: first what is under way, then who may enter.

A prompt's pages are reserved whole when it enters, so a prefill once begun never stalls half-way for pages; but for
those of window pools, which come chunk by chunk.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kvloom.scheduler.config import SchedulerConfig
from kvloom.scheduler.decode import make_room
from kvloom.scheduler.ports import Memory
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
    """The head of the queue has a row and pages, and need not compute its first `known` tokens.

    The last `loaded` of these were evicted from the prefix cache, and came back from the host.
    """

    sequence: Sequence
    row: int
    known: int
    loaded: int = 0


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


def reserve(rows: Rows, memory: Memory, chunks: list[Chunk], spare: int, preempt: Callable[[int], None]) -> list[Chunk]:
    """Pages for the chunks, oldest first; returns those that got them, the last one perhaps shortened.

    Only in window pools there is something to reserve: in the others a prompt has all its pages from the start.
    `spare` pages stay free for those who decode.  When not even the first can go on, and nobody decodes, the youngest
    makes room, as in a decode step.
    Mutates `memory`, marks at most one victim in `rows.doomed`, and calls `preempt(row)` for victims not in flight.
    """
    while chunks:
        ends = [chunk.start + len(chunk.tokens) for chunk in chunks]
        named = np.array([chunk.row for chunk in chunks], np.int32)
        shortfall = memory.reserve(named, np.array(ends, np.int32), "prefill", spare)
        if shortfall is None:
            break
        short = chunks[shortfall.fits]
        chunks = chunks[: shortfall.fits]
        if shortfall.upto > short.start:
            chunks.append(short._replace(tokens=short.tokens[: shortfall.upto - short.start], last=False))
        elif not chunks and not spare:
            chunks = [short] if make_room(rows, preempt, short.row) else []
    return chunks


def next_in(rows: Rows, waiting: WaitingQueue, config: SchedulerConfig, ended: int) -> Sequence | None:
    """The head of the queue, if it may enter: strictly first come, first served.  Mutates nothing.

    While a victim is on its way out nobody enters: its pages are spoken for.  Who was preempted comes back once a
    request has ended since (`ended` have so far) or nobody runs; else the same need would throw it out again.
    """
    head = waiting.peek()
    if head is None or rows.running >= config.max_running or rows.dooms:
        return None
    return None if rows.running and ended <= head.ended_before else head


def admit(head: Sequence, rows: Rows, memory: Memory) -> Admission | None:
    """Row and pages for the head of the queue, or None when there are none now.

    One page per running sequence stays free, so that what enters is not at once the next to make room.  Mutates
    `memory`, but no row of it unless it succeeds.
    """
    spare, loaded = rows.running, 0
    if head.kept is not None:
        known = head.kept.tokens
        row = memory.restore(head.kept, len(head.tokens), spare)
    else:
        match = memory.match(head.tokens, head.request.cache_namespace)
        known, loaded = match.tokens + match.host_tokens, match.host_tokens
        row = memory.admit(match, len(head.tokens), spare)
        if row is not None and head.admitted_at is None:
            memory.looked_up(head.tokens, match)
    return None if row is None else Admission(head, row, known, loaded)
