"""uvicorn, told how to stop with an engine inside."""

import socket
from collections.abc import Callable
from contextlib import suppress

import anyio
import uvicorn

from kvloom.scheduler import Engine


class DrainingServer(uvicorn.Server):
    """Told to stop, it accepts no more connections and drains the engine while answers still go out.

    uvicorn alone would wait for the answers and only then stop the application; the answers that are not done in time
    it would cut off without a word.  Here the engine ends them, so each one gets its last event.

    ready          called with the server's address once it can be reached
    drain_seconds  how long answers may go on
    """

    def __init__(
        self, config: uvicorn.Config, engine: Engine, drain_seconds: float, ready: Callable[[str], None] | None = None
    ) -> None:
        super().__init__(config)
        self._engine = engine
        self._drain_seconds = drain_seconds
        self._ready = ready

    def run_until_told(self) -> None:
        """Blocks; Ctrl-C is a way to say it, and no error."""
        with suppress(KeyboardInterrupt):
            self.run()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Also says where, since a port of 0 means any."""
        await super().startup(sockets)
        if self.started and self._ready is not None:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self._ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Returns when all is over; a second Ctrl-C does not wait for the drain."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._engine.drain, self._drain_seconds)
            await super().shutdown(sockets)
            group.cancel_scope.cancel()
