"""Calls of the daemon for a request, and their values as JSON."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
from fastapi import Depends
from starlette.requests import Request
from starlette.responses import Response

from kvtier.access.caller import Caller, acting_for
from kvtier.access.caller_shares import CallerShares
from kvtier.errors import DrainingError
from kvtier.library.client import Client
from kvtier.library.rendering.field_names import FieldNames
from kvtier.library.values.plain_json import to_jsonable
from kvtier.web.call_threads import CallThreads

T = TypeVar("T")


class WebClient(Client):
    """The library's client in the daemon: it lets engines have the interpreter meanwhile, and names HTTP's fields."""

    _NAMES: ClassVar[FieldNames] = FieldNames(
        {
            "url": "http.vllm_url",
            "tokens=...": "tokens",
            "file": "body",
            "key_file": "it to `kvtier import --key-file FILE`",  # no key goes over HTTP
        }
    )
    _IN_TURNS: ClassVar[bool] = True


class DaemonDoor:
    """The daemon's own socket, and the threads that call it."""

    def __init__(
        self, socket: Path, vllm_url: str, threads: CallThreads, transfer_threads: CallThreads, bodies: CallerShares
    ) -> None:
        """Take the socket, the base URL of vLLM, threads for calls and for bundles, and places for bodies on their way.

        Bodies have places of their own, as many as calls: they are held in memory until they are whole.
        """
        self.client = WebClient(socket, daemon_uid=os.getuid(), url=vllm_url)
        self._threads, self._transfer_threads, self._bodies = threads, transfer_threads, bodies
        self._is_closed = False

    def close(self) -> None:
        """End the calls that run."""
        self._is_closed = True
        self.client.close()

    async def receive_body(self, request: Request, caller: Caller) -> bytes:
        """Return a request's body, once it is whole. TooManyCallsError: as many come as may, or of this caller."""
        with self._bodies.holding(caller.grant_id):
            return await request.body()

    async def run(self, call: Callable[[], T], caller: Caller, *, is_transfer: bool = False) -> T:
        """Make a call in a thread, which takes a place of its caller's share.

        Raises:
            TooManyCallsError: As many run as may, or as may for this caller.
            DrainingError: The server ends.
        """
        try:
            return await (self._transfer_threads if is_transfer else self._threads).run(call, caller.grant_id)
        except (RuntimeError, ValueError) as exc:  # of clients that were closed under the call
            if self._is_closed:
                raise DrainingError from exc
            raise


class DaemonCalls:
    """What a handler calls, for its caller."""

    def __init__(self, door: DaemonDoor, caller: Caller) -> None:
        self._door, self.caller, self.client = door, caller, door.client

    async def receive_body(self, request: Request) -> bytes:
        """Return the body of the request; as `DaemonDoor.receive_body`."""
        return await self._door.receive_body(request, self.caller)

    def acting(self, call: Callable[[], T]) -> T:
        """Make a call for the caller, in this thread: the daemon checks that one's role and owner."""
        with acting_for(self.caller):
            return call()

    async def run(self, call: Callable[[], T]) -> T:
        """Make a call in a thread. Raises TooManyCallsError, and what the call raises."""
        return await self._door.run(lambda: self.acting(call), self.caller)

    async def transfer(self, call: Callable[[], T]) -> T:
        """Make a call that sends or receives a bundle; as `run`."""
        return await self._door.run(lambda: self.acting(call), self.caller, is_transfer=True)

    async def answer(self, call: Callable[[Client], Any]) -> Response:
        """Answer with what a call returns: a value of the library, or plain JSON values."""
        return json_response(await self.run(lambda: json_bytes(call(self.client))))


async def daemon_calls(request: Request) -> DaemonCalls:
    """Return the calls of a request's caller."""
    return DaemonCalls(request.app.state.door, request.state.caller)


Daemon = Annotated[DaemonCalls, Depends(daemon_calls)]


def json_response(body: bytes) -> Response:
    """Return an answer of JSON."""
    return Response(body, media_type="application/json")


def json_bytes(value: Any) -> bytes:
    """Return a value as JSON; NaN is null. By a quick encoder, because it holds the interpreter to its end."""
    return msgspec.json.encode(to_jsonable(value))
