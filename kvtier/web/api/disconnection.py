"""When the client of a stream leaves."""

from typing import Any


async def until_disconnected(receive: Any) -> None:
    """Wait until the client of a request has left, whose body was read. `receive`: see ASGI."""
    while (await receive())["type"] != "http.disconnect":
        pass
