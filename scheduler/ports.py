"""What the core and the loop need from outside.

`kvloom.allocator.KVMemory` meets `Memory` structurally: the two packages do not import each other.  The core deals in
rows and token counts; which pages back them is the memory's own affair.
"""

from collections.abc import Sequence as SequenceOf
from typing import Any, Protocol

from kvloom.scheduler.plan import Committed, IntArray, Plan
from kvloom.scheduler.request import TokenArray


class Shortfall(Protocol):
    """Why memory could not be reserved: a value, not an error."""

    @property
    def fits(self) -> int: ...  # how many of the rows asked for, from the first on, would fit


# A prefix found in the cache: the memory's own value, of which the core reads `tokens` (int) and hands it back.
Match = Any


class Memory(Protocol):
    """KV memory as the core sees it.  All or nothing: a verb that answers with a shortage has changed nothing.

    Its text (`str`) says who holds what, for messages.
    """

    @property
    def max_rows(self) -> int: ...
    @property
    def max_seq(self) -> int: ...  # most tokens a row can hold
    @property
    def next_step(self) -> int: ...  # no fence given so far is at this step or beyond

    def match(self, tokens: TokenArray, namespace: str) -> Match:
        """The longest cached prefix of `tokens`.  Pure."""

    def admit(self, match: Match, length: int, spare: int) -> int | None:
        """Take a row and pages for `length` tokens, reusing `match`, if `spare` pages stay free.  None: not now."""

    def reserve(self, rows: IntArray, lengths: IntArray) -> Shortfall | None:
        """Let each row hold `lengths` tokens (never fewer than now).  None: done."""

    def publish(self, rows: IntArray, lengths: IntArray) -> None:
        """The first `lengths` tokens of each row have valid KV: whole pages may enter the prefix cache."""

    def trim(self, rows: IntArray, lengths: IntArray) -> None:
        """Give back pages left of the window of rows whose settled length is `lengths`."""

    def release(self, rows: SequenceOf[int], fences: SequenceOf[int], reason: str) -> None:
        """One free group: give back rows and their pages, each usable again once step `fences[i]` is settled."""

    def settle(self, step: int) -> None:
        """Step `step` is over: what waited for it is free."""


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
