"""Bundles, streamed down and up: neither is ever whole in memory."""

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Query
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from kvtier.errors import KvtierError
from kvtier.library.client import Client
from kvtier.library.values.public_values import Prompt
from kvtier.web.api.daemon_calls import Daemon, DaemonCalls, json_bytes, json_response
from kvtier.web.api.disconnection import until_disconnected
from kvtier.web.api.json_schemas import answers
from kvtier.web.api.prompt_routes import PromptName
from kvtier.web.problems import Problem

T = TypeVar("T")

router = APIRouter(tags=["bundles"])

_TYPE = "application/octet-stream"
_NO_CHUNKS = Problem(
    status=HTTPStatus.HTTP_VERSION_NOT_SUPPORTED,
    title="HttpVersionError",
    detail="a bundle is sent in chunks, which HTTP/1.0 does not have: one that breaks off would look whole; use "
    "HTTP/1.1, in a proxy of nginx by proxy_http_version 1.1",
)


class ClientGoneError(KvtierError):
    """The client of a stream has disconnected."""

    def __init__(self) -> None:
        super().__init__("the client has disconnected")


@router.get(
    "/prompts/{name}/bundle",
    response_class=Response,
    response_model=None,
    responses={200: {"description": "A safetensors file.", "content": {_TYPE: {}}}},
)
async def export_bundle(
    daemon: Daemon,
    request: Request,
    name: PromptName,
    namespace_id: str = "",
    decoded: Annotated[bool, Query(description="KV as plain tensors, for a notebook; no import takes them.")] = False,
) -> Response:
    """Return a durable prompt with its KV cache, as `kvtier export`."""
    if request.scope["http_version"] == "1.0":  # nothing but the end of the connection would say where the body ends
        return _NO_CHUNKS.response()
    return _Download(daemon, lambda client, file: client.export(name, file, namespace_id=namespace_id, decoded=decoded))


@router.post(
    "/bundles",
    **answers(Prompt),
    openapi_extra={"requestBody": {"required": True, "content": {_TYPE: {}}}},
)
async def import_bundle(
    daemon: Daemon,
    request: Request,
    name: Annotated[str, Query(description="Empty: the name in the file.")] = "",
    replace: bool = False,
    ttl_s: Annotated[int, Query(ge=0)] = 0,
    public: bool = False,
) -> Response:
    """Pin a prompt from a file that `export` has written; vLLM computes nothing."""
    upload: Any = _Upload(request)
    how: dict[str, Any] = {"name": name, "replace": replace, "ttl_s": ttl_s, "public": public}
    prompt = await daemon.transfer(lambda: daemon.client.import_bundle(upload, **how))
    return json_response(json_bytes(prompt))


class _Upload:
    """A request's body as a file. A thread reads it, and the loop receives: no more than what was asked for."""

    def __init__(self, request: Request) -> None:
        self._loop = asyncio.get_running_loop()
        self._pieces = request.stream()
        self._left = b""

    def read(self, num_bytes: int) -> bytes:
        """Return at most this many bytes; none: the body has ended. Raises ClientGoneError."""
        while len(self._left) < num_bytes and (piece := _on(self._loop, self._next)):
            self._left += piece
        taken, self._left = self._left[:num_bytes], self._left[num_bytes:]
        return taken

    async def _next(self) -> bytes:
        try:
            async for piece in self._pieces:
                if piece:
                    return piece
        except ClientDisconnect as exc:
            raise ClientGoneError from exc
        return b""


class _Download(Response):
    """What a call writes into a file, sent as it writes. What fails before the first byte is a problem."""

    def __init__(self, daemon: DaemonCalls, call: Callable[[Client, Any], object]) -> None:
        super().__init__(media_type=_TYPE)
        del self.headers["content-length"]
        self._daemon, self._call = daemon, call

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        loop, has_begun = asyncio.get_running_loop(), False
        left = asyncio.ensure_future(until_disconnected(receive))

        async def take(piece: bytes) -> None:
            nonlocal has_begun
            if left.done():
                raise ClientGoneError
            if not has_begun:
                has_begun = True
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": piece, "more_body": True})

        try:
            await self._daemon.transfer(lambda: self._call(self._daemon.client, _Sink(loop, take)))
            await take(b"")  # of a file without a byte
            await send({"type": "http.response.body", "body": b""})
        except ClientGoneError:
            pass
        except KvtierError:
            if not has_begun:
                raise
            # The client sees a body without its end: uvicorn closes the connection.
        finally:
            left.cancel()


class _Sink:
    """A file that a thread writes to, at the pace of its reader."""

    def __init__(self, loop: asyncio.AbstractEventLoop, take: Callable[[bytes], Any]) -> None:
        self._loop, self._take = loop, take

    def write(self, piece: bytes) -> int:
        """Wait until the piece is on its way. Raises ClientGoneError."""
        _on(self._loop, lambda: self._take(piece))
        return len(piece)

    def flush(self) -> None:
        """Do nothing: each piece is sent at once."""


def _on(loop: asyncio.AbstractEventLoop, call: Callable[[], Any]) -> Any:
    """Run a coroutine on the server's loop, for a thread."""
    try:
        return asyncio.run_coroutine_threadsafe(call(), loop).result()
    except (RuntimeError, asyncio.CancelledError) as exc:  # the server has ended
        raise ClientGoneError from exc
