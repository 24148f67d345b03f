"""Calls that need no credentials: few at a time, and each sends its message soon, or it would take a caller's place."""

from collections.abc import AsyncIterator
from typing import Any

from kvtier.access.caller_shares import CallerShares
from kvtier.access.gatekeeper import Gatekeeper
from kvtier.access.rate_limits import network_of
from kvtier.errors import MessageTimeoutError
from kvtier.rpc.doors.call_messages import host_of, only_message
from kvtier.rpc.error_statuses import Context, translated

OPEN_TIMEOUT_S = 5.0
"""For the message: some bytes, sent with the call by every client there is."""
MAX_OPEN = 100
MAX_OPEN_EACH = 20
"""Of one address: a load balancer has a handful."""


class OpenCalls:
    """Serves methods that have one message and one answer, without credentials. One for each server."""

    def __init__(self, gatekeeper: Gatekeeper) -> None:
        """Take what counts the refusals."""
        self._gatekeeper = gatekeeper
        self._places = CallerShares("calls without credentials are open", MAX_OPEN, MAX_OPEN_EACH)

    def serving(self, handler: Any, call: str) -> Any:
        """Return a method for a stream of messages that waits for the one there is, then calls the handler's."""

        async def answer(messages: AsyncIterator[Any], context: Context) -> Any:
            address = host_of(context.peer())
            async with translated(context):
                try:
                    with self._gatekeeper.holding(self._places, network_of(address)):
                        return await handler.unary_unary(await only_message(messages, OPEN_TIMEOUT_S), context)
                except MessageTimeoutError as error:
                    self._gatekeeper.note_silent_stranger(address, call, error)
                    raise

        return answer
