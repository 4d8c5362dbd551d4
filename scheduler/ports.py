"""What the core and the loop need from outside.

`kvloom.allocator.KVMemory` meets `Memory` structurally: the two packages do not import each other.  The core deals in
rows and token counts; which pages back them is the memory's own affair.
"""

from collections.abc import Callable, Sequence as SequenceOf
from typing import Any, Protocol

from kvloom.scheduler.plan import Committed, IntArray, Plan
from kvloom.scheduler.request import TokenArray


class Shortfall(Protocol):
    """Why memory could not be reserved: a value, not an error."""

    @property
    def fits(self) -> int: ...  # how many of the rows asked for, from the first on, would fit
    @property
    def upto(self) -> int: ...  # tokens that the next one could hold


# The tokens of a row from one place to another, int32.
TokensOf = Callable[[int, int, int], TokenArray]

# A prefix found in the cache: the memory's own value, of which the core reads how many `tokens` are cached, how many
# `host_tokens` behind them the host has (int both), and hands it back.
Match = Any
# KV of a preempted row: the memory's own value, of which the core reads `tokens` (int) and hands it back.
Kept = Any


class RowMemory(Protocol):
    """Rows and their pages.  All or nothing: a verb that answers with a shortage has changed no row."""

    @property
    def max_rows(self) -> int: ...
    @property
    def max_seq(self) -> int: ...  # most tokens a row can hold
    @property
    def next_step(self) -> int: ...  # no fence given so far is at this step or beyond

    def match(self, tokens: TokenArray, namespace: str) -> Match:
        """The longest cached prefix of `tokens`.  Pure."""

    def admit(self, match: Match, length: int, spare: int) -> int | None:
        """A row for `length` tokens that has all those of `match`, if `spare` pages stay free.  None: not now."""

    def reserve(self, rows: IntArray, lengths: IntArray, op: str = "decode", spare: int = 0) -> Shortfall | None:
        """Let each row hold `lengths` tokens (never fewer than now), for a "prefill" or a "decode".  None: done.

        If any pages are needed, `spare` more must stay free in their pool.
        """

    def release(self, rows: SequenceOf[int], fences: SequenceOf[int], reason: str) -> None:
        """One free group: give back rows and their pages, each usable again once step `fences[i]` is settled."""

    def settle(self, step: int) -> None:
        """Step `step` is over: what waited for it is free."""


class PrefixMemory(Protocol):
    """What requests leave to each other, and what leaves their windows."""

    @property
    def windowed(self) -> bool: ...  # pages leave while their row runs: publish prompts before `trim`
    def publish(self, rows: IntArray, lengths: IntArray, tokens_of: TokensOf) -> None:
        """The first `lengths` tokens of each row have valid KV: whole pages enter the prefix cache."""

    def trim(self, rows: IntArray, lengths: IntArray, tokens_of: TokensOf) -> None:
        """Give back pages left of the window of rows whose settled length is `lengths`."""

    def looked_up(self, tokens: TokenArray, match: Match) -> None:
        """Count the first look-up of a request."""

    def tick(self, now: float) -> None:
        """It is `now`, in seconds: whatever ends with time does."""


class HostMemory(Protocol):
    """Where the KV of preempted rows may wait."""

    def offload(self, row: int, length: int) -> Kept | None:
        """The KV of the first `length` tokens of a row that no step in flight names, to come back to; None: no room."""

    def restore(self, kept: Kept, length: int, spare: int) -> int | None:
        """`admit` with the KV that was offloaded."""

    def forget(self, kept: Kept) -> None:
        """Nobody comes back for it."""


class Memory(RowMemory, PrefixMemory, HostMemory, Protocol):
    """KV memory as the core sees it.  Its text (`str`) says who holds what, for messages."""


class Clock(Protocol):
    """Seconds that never go back."""

    def __call__(self) -> float:
        """Now."""


class Observer(Protocol):
    """Told after the fact; cannot change anything.  An exception in one is logged and counted, nothing more."""

    def on_step(self, plan: Plan, committed: Committed, seconds: float) -> None:
        """A step was committed or abandoned `seconds` after it was planned."""

    def on_finished(self, committed: Committed, now: float) -> None:
        """Requests ended (`committed.finished`), in a step or between steps."""
