"""The messages of a call, each waited for with a bound: gRPC has none, and a call takes one of the places there are."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import unquote

from kvtier.errors import InvalidArgumentError, MessageTimeoutError

MESSAGE_TIMEOUT_S = 30.0
"""For each message of a caller: 16 MiB over a slow line, or the next piece of a bundle; as HTTP waits for a body."""


async def only_message(messages: AsyncIterator[Any], timeout_s: float | None) -> Any:
    """Return the message of a call that has one.

    Raises:
        InvalidArgumentError: The call ended without it.
        MessageTimeoutError: It did not come.
    """
    message = await _next(messages, timeout_s)
    if message is None:
        raise InvalidArgumentError("message", None, "the call ended without its message; send one")
    return message


async def each_message(messages: AsyncIterator[Any], timeout_s: float | None) -> AsyncIterator[Any]:
    """Yield the messages of a call that has many.

    Raises:
        MessageTimeoutError: The next one did not come.
    """
    while (message := await _next(messages, timeout_s)) is not None:
        yield message


async def _next(messages: AsyncIterator[Any], timeout_s: float | None) -> Any:
    try:
        async with asyncio.timeout(timeout_s):
            return await anext(messages, None)
    except TimeoutError as exc:
        raise MessageTimeoutError(timeout_s or 0.0) from exc


def host_of(peer: str) -> str:
    """Return the host of gRPC's name of a peer: `ipv4:127.0.0.1:4711`, `ipv6:%5B::1%5D:4711`."""
    address = unquote(peer.partition(":")[2])
    return address.rpartition(":")[0].strip("[]") or address
