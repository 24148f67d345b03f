"""Calls that need no credentials: few wait for their message, and not for long, or they would take callers' places."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from kvtier.access.gatekeeper import Gatekeeper
from kvtier.errors import MessageTimeoutError
from kvtier.rpc.doors.call_messages import host_of, only_message
from kvtier.rpc.error_statuses import Context, translated

OPEN_TIMEOUT_S = 5.0
"""For the message: some bytes, sent with the call by every client there is."""
MAX_OPEN = 100
"""That wait for their message. Then a new call ends the one that has waited longest: to refuse the new one would let
strangers shut out a load balancer, which shares its address with all whom it lets through."""


class OpenCalls:
    """Serves methods that have one message and one answer, without credentials. One for each server."""

    def __init__(self, gatekeeper: Gatekeeper) -> None:
        """Take what counts the refusals."""
        self._gatekeeper = gatekeeper
        self._waiting: dict[asyncio.Timeout, None] = {}  # the longest first

    def serving(self, handler: Any, call: str) -> Any:
        """Return a method for a stream of messages that waits for the one there is, then calls the handler's."""

        async def answer(messages: AsyncIterator[Any], context: Context) -> Any:
            async with translated(context):
                try:
                    message = await self._message(messages)
                except MessageTimeoutError as error:
                    self._gatekeeper.note_silent_stranger(host_of(context.peer()), call, error)
                    raise
                return await handler.unary_unary(message, context)

        return answer

    async def _message(self, messages: AsyncIterator[Any]) -> Any:
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S) as wait:
                self._waiting[wait] = None
                self._end_longest()
                try:
                    return await only_message(messages, None)
                finally:
                    self._waiting.pop(wait, None)
        except TimeoutError as exc:
            raise MessageTimeoutError(round(time.monotonic() - began_s, 1)) from exc

    def _end_longest(self) -> None:
        if len(self._waiting) > MAX_OPEN:
            longest = next(iter(self._waiting))
            del self._waiting[longest]
            if not longest.expired():
                longest.reschedule(0.0)
