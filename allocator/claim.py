"""Which engine has a memory, and whose KV is in it."""

from collections.abc import Callable
from weakref import ref

from kvloom.allocator.errors import InvalidArgument


class Claim:
    """At most one engine at a time; the last runner is known weakly, so that its model can go."""

    def __init__(self) -> None:
        self._taken = False
        self._runner: Callable[[], object] = _nobody

    def take(self, runner: object) -> bool:
        """Belong to an engine with this `runner`; whether what is cached is the KV of another.

        Raises InvalidArgument when an engine has it.
        """
        if self._taken:
            raise InvalidArgument("this memory belongs to another engine, not left yet or with a step still out")
        self._taken = True
        strange = self._runner() is not runner
        try:
            self._runner = ref(runner)
        except TypeError:  # of a class that cannot be known weakly: it is a stranger each time
            self._runner = _nobody
        return strange

    def give_back(self) -> None:
        """Be free for the next engine."""
        self._taken = False


def _nobody() -> None:
    return None
