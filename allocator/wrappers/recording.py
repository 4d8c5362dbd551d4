"""A log of every verb, and the same again on another allocator."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from kvloom.allocator.base import BaseTokenToKVPoolAllocator
from kvloom.allocator.snapshots import AllocatorState
from kvloom.allocator.wrappers.base import AllocatorWrapper


class RecordingAllocator(AllocatorWrapper):
    """Writes down each verb with its arguments before it passes it on, so that the last entry of a crash is its cause.

    log  one dict per call: "verb" and the arguments by name, copied: plain numbers and lists, so that each entry is a
         line of JSON as long as the arguments were.  A state is {"state": its number in the order of taking} there.  It
         grows without bound.

    Arguments on a device are copied to the host, which waits for it.
    """

    def __init__(self, inner: BaseTokenToKVPoolAllocator | AllocatorWrapper) -> None:
        super().__init__(inner)
        self.log: list[dict[str, Any]] = []
        self._numbers: WeakKeyDictionary[AllocatorState, int] = WeakKeyDictionary()
        self._states = 0

    def _call(self, verb: str, **arguments: Any) -> Any:
        self.log.append({"verb": verb, **{name: self._plain(value) for name, value in arguments.items()}})
        answer = super()._call(verb, **arguments)
        if isinstance(answer, AllocatorState):
            self._numbers[answer] = self._states
            self._states += 1
        return answer

    def _plain(self, value: Any) -> Any:
        if isinstance(value, AllocatorState):
            return {"state": self._numbers.get(value)}  # None for another allocator's, which is refused as well
        if isinstance(value, torch.Tensor | np.ndarray | np.generic):
            return value.tolist()
        if isinstance(value, Sequence) and not isinstance(value, str):
            return [self._plain(item) for item in value]
        return value


def replay(log: Iterable[Mapping[str, Any]], allocator: BaseTokenToKVPoolAllocator | AllocatorWrapper) -> list[Any]:
    """Do what `log` says with a fresh `allocator` of the same sizes; what each call answered, or the error it raised.

    Mutates `allocator`, which ends as the recorded one did, with the same free list.
    """
    states: list[AllocatorState] = []
    answers: list[Any] = []
    for entry in log:
        arguments = dict(entry)
        verb = arguments.pop("verb")
        match arguments:
            case {"state": {"state": int(number)}}:
                arguments["state"] = states[number]
        try:
            answer = getattr(allocator, verb)(**arguments)
        except Exception as error:  # what was misused when it was recorded is misused again
            answer = error
        if isinstance(answer, AllocatorState):
            states.append(answer)
        answers.append(answer)
    return answers
