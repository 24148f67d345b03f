"""A real daemon with a TCP port and TLS, in a thread, and its callers."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import grpc

from kvtier import Client
from kvtier._pb import cache_pb2 as pb
from kvtier._pb import cache_pb2_grpc
from kvtier.config import DaemonConfig
from kvtier.config.model import AccessConfig
from kvtier.obs.log import events_to
from kvtier.rpc.server import serve
from tests.fakes.certificates import Authority
from tests.fakes.scripted_engine import DEADLINE_S, config_in

T = TypeVar("T")

LOOPBACK = "127.0.0.1:0"
_REFUSED_S = 0.5
"""Of a call that is refused: from its first answer to its end, which come together. This process has to run so long."""
STREAMS = ("WatchPrompt", "WatchEvents", "Export")


class TcpDaemon:
    """What `serving` yields; its clients are closed with it."""

    def __init__(
        self,
        config: DaemonConfig,
        address: str,
        authority: Authority | None,
        stack: ExitStack,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.config, self.address, self.authority = config, address, authority
        self._stack, self._loop = stack, loop
        self.local = stack.enter_context(Client(config.server.socket))

    def token(self, name: str, role: Any, **more: Any) -> str:
        """Make a grant; return its token."""
        return self.local.create_grant(name, role=role, **more).token

    def run(self, scenario: Coroutine[Any, Any, T]) -> T:
        """Run what an engine does, in the daemon's loop; meanwhile calls that block belong into threads."""
        return asyncio.run_coroutine_threadsafe(scenario, self._loop).result(2 * DEADLINE_S)

    def client(self, token: str | None = None, **more: Any) -> Client:
        """Return a client over TCP."""
        given: dict[str, Any] = {"token": token} | more
        if self.authority is not None:
            given.setdefault("ca_file", self.authority.ca_file)
        return self._stack.enter_context(Client(server=self.address, **given))

    def channel(self, cert: tuple[Path, Path] | None = None) -> grpc.Channel:
        """Return a channel over TCP."""
        own = [("grpc.use_local_subchannel_pool", 1)]
        if self.authority is None:
            return self._stack.enter_context(grpc.insecure_channel(self.address, options=own))
        files = (None, None) if cert is None else (cert[1].read_bytes(), cert[0].read_bytes())
        credentials = grpc.ssl_channel_credentials(self.authority.ca_file.read_bytes(), *files)
        return self._stack.enter_context(grpc.secure_channel(self.address, credentials, options=own))


def bearer(token: str | None) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a call with this token."""
    return () if token is None else (("authorization", f"Bearer {token}"),)


def outcome(channel: grpc.Channel, call: str, request: Any, token: str | None = None, timeout_s: float = 10.0) -> str:
    """Make any call of CacheService; return the name of its status. What streams is read to its first message."""
    method = getattr(cache_pb2_grpc.CacheServiceStub(channel), call)
    given = iter([request]) if call in ("Import", "ApplyPrompts") else request
    try:
        answer = method(given, timeout=timeout_s, metadata=bearer(token))
        if call == "WatchEvents":
            return _outcome_of_watch(answer)
        if call in STREAMS:
            next(answer)
            answer.cancel()
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


def _outcome_of_watch(call: Any) -> str:
    """Return how a call ended that has no message when all is well, but says at once that it is open."""
    ended = threading.Event()
    if not call.add_callback(ended.set):
        ended.set()
    call.initial_metadata()
    for _ in range(10):
        if ended.wait(_REFUSED_S / 10):
            return str(call.code().name)
    call.cancel()
    return "OK"


@contextmanager
def serving(
    folder: Path,
    *,
    tls: bool = True,
    listen: str = LOOPBACK,
    client_ca: bool = False,
    config: DaemonConfig | None = None,
    **access: Any,
) -> Iterator[TcpDaemon]:
    """Run a daemon during the block; `config`: all other settings, None: a small daemon's."""
    authority = Authority(folder) if tls else None
    if authority is not None:
        access["tls_cert_file"], access["tls_key_file"] = authority.issue("daemon")
        access["client_ca_file"] = authority.ca_file if client_ca else None
    config = config or config_in(folder)
    config = replace(config, server=replace(config.server, listen=listen), access=AccessConfig(**access))
    addresses: list[str] = []

    def sink(name: str, level: int, unix_s: float, fields: Mapping[str, object]) -> None:
        if name == "tcp_served":
            addresses.append(str(fields["address"]))

    ready, stops, failures = threading.Event(), list[Any](), list[BaseException]()

    async def run() -> None:
        stop = asyncio.Event()
        stops.append((asyncio.get_running_loop(), stop))
        await serve(config, stop=stop, ready=ready.set)

    def main() -> None:
        try:
            asyncio.run(run())
        except BaseException as exc:
            failures.append(exc)
        finally:
            ready.set()

    thread = threading.Thread(target=main)
    with events_to(sink):
        thread.start()
        assert ready.wait(DEADLINE_S)
    if failures:
        thread.join()
        raise failures[0]
    loop, stop = stops[0]
    try:
        with ExitStack() as stack:
            yield TcpDaemon(config, addresses[0] if addresses else "", authority, stack, loop)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def pin_request(name: str, first: int = 0, **more: Any) -> pb.PinRequest:
    """Return a pin of made-up tokens."""
    return pb.PinRequest(name=name, tokens=range(first, first + 80), **more)
