"""Server-sent events: `data: {one JSON}`, a blank line, and `[DONE]` in the end."""

import json
from collections.abc import Mapping

from starlette.types import Send

DONE = b"data: [DONE]\n\n"


def event(value: Mapping[str, object]) -> bytes:
    """One event.

    In ASCII: some clients split their input where Unicode has line ends (U+2028, U+0085), which JSON need not escape.
    """
    return b"data: " + json.dumps(value, separators=(",", ":")).encode("ascii") + b"\n\n"


class EventStream:
    """A response whose status line waits for the first event: until then, another response can be sent instead."""

    def __init__(self, send: Send, headers: Mapping[str, str]) -> None:
        self._send = send
        self._headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",  # nginx would collect events otherwise
            **headers,
        }
        self.started = False

    async def start(self) -> None:
        """Send the headers, once."""
        if not self.started:
            self.started = True
            headers = [(name.lower().encode(), value.encode()) for name, value in self._headers.items()]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def write(self, data: bytes) -> None:
        """Waits while the client is slow; what the model says meanwhile is one larger piece next time."""
        await self.start()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def close(self) -> None:
        """The end of the response."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
