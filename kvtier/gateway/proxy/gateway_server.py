"""The gateway's server: uvicorn, which says when it serves, and is stopped by a signal from its start on."""

import signal
import socket
from collections.abc import Callable

import uvicorn


class GatewayServer(uvicorn.Server):
    """Serves until SIGTERM or SIGINT.

    Args:
        config: With the app.
        when_ready: Called when it serves.
    """

    def __init__(self, config: uvicorn.Config, when_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._when_ready = when_ready

    def serve_until_signal(self, listener: socket.socket) -> None:
        """Serve. uvicorn takes the signals over when its loop runs, and raises them again when it has stopped."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stop())
        self.run(sockets=[listener])

    def _stop(self) -> None:
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn."""
        await super().startup(sockets)
        if not self.should_exit:
            self._when_ready()
