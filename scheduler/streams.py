"""One token stream per request: the loop writes, one reader reads.

What a slow reader has not fetched is merged into its next delta, so a stream never holds more than the request's own
output, and a slow reader costs nobody else anything.
"""

import asyncio
from dataclasses import dataclass

from kvloom.scheduler.errors import Misuse
from kvloom.scheduler.request import Finished, FinishReason, Timings, Usage


@dataclass(frozen=True, slots=True)
class Delta:
    """The tokens since the last delta, at least one; more than one when the reader was slower than the loop."""

    token_ids: list[int]
    logprobs: None = None


@dataclass(frozen=True, slots=True)
class Result:
    """A whole answer."""

    token_ids: list[int]
    reason: FinishReason
    usage: Usage
    timings: Timings


class TokenStream:
    """`async for delta in stream`; `stream.final` is set once the request has ended, whatever the reason.

    `push` and `finish` are the loop's; they never wait.  asyncio's future is used directly because waking a reader is
    on the hot path: once per running request and step.
    """

    __slots__ = ("_tokens", "_waiter", "final", "request_id")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.final: Finished | None = None
        self._tokens: list[int] = []
        self._waiter: asyncio.Future[None] | None = None

    def push(self, token: int) -> None:
        """One more token; wakes the reader if it waits."""
        self._tokens.append(token)
        if self._waiter is not None:
            self._wake()

    def finish(self, final: Finished) -> None:
        """The request has ended; what is buffered can still be read."""
        self.final = final
        if self._waiter is not None:
            self._wake()

    def __aiter__(self) -> "TokenStream":
        return self

    async def __anext__(self) -> Delta:
        """The next tokens.  Raises Misuse when another task is reading the same stream."""
        while not self._tokens:
            if self.final is not None:
                raise StopAsyncIteration
            if self._waiter is not None:
                raise Misuse(f"two tasks read the stream of request {self.request_id!r}")
            waiter = self._waiter = asyncio.get_running_loop().create_future()
            try:
                await waiter
            finally:
                if self._waiter is waiter:  # another reader may have come since this one was woken
                    self._waiter = None
        tokens, self._tokens = self._tokens, []
        return Delta(tokens)

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():  # done: the reader was cancelled and has not run since
            waiter.set_result(None)
