"""The engine's session with the daemon: one background thread that attaches, reads, and attaches again.

Nothing here blocks the caller: messages go into a queue, the daemon's messages come back through a listener in this
thread. Nothing is opened at import or construction, so a process may fork or spawn before `start`.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import grpc

from kvtier._pb import engine_pb2 as pb
from kvtier._pb import engine_pb2_grpc
from kvtier.client.outbox import Outbox, in_bounds
from kvtier.client.trusted_socket import open_trusted, unreachable
from kvtier.concurrency.pauses import RETRY_S
from kvtier.errors import DaemonUnreachableError, KvtierError, SessionRefusedError, UntrustedSocketError

PROBE_PERIOD_S = 0.25
_WELCOME_TIMEOUT_S = 30.0
_BACKOFF_FIRST_S, _BACKOFF_MAX_S = 0.05, 0.5
_HOW_TO_START = (
    'start `kvtier-daemon`, or name its socket with $KVTIER_SOCKET or "socket" in kv_connector_extra_config '
    "(containers: mount its folder)"
)
_REFUSALS = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
    }
)

logger = logging.getLogger(__name__)


class NotReadyError(KvtierError):
    """The Hello cannot be made yet; ask again shortly."""


@dataclass(frozen=True, eq=False)
class Attachment:
    """One session as long as its stream lives. Messages sent to it never reach another session.

    Attributes:
        turn: How often `EngineSession.reopen` had been called before it.
        welcome: What the daemon answered.
    """

    _outbox: Outbox
    turn: int
    welcome: pb.Welcome

    def send(self, message: pb.EngineMessage) -> None:
        """Enqueue a message; never blocks. After the stream's end it goes nowhere."""
        self._outbox.put(message)

    def send_later(self, message: pb.EngineMessage) -> None:
        """Enqueue a message that may wait for others, see `Outbox`; never blocks."""
        self._outbox.put_later(message)

    @property
    def is_behind(self) -> bool:
        """Whether the daemon does not read what is sent. Then what it can do without is better not sent."""
        return self._outbox.is_behind()

    def flush(self) -> None:
        """Send waiting messages now; never blocks."""
        self._outbox.flush()


class SessionListener(Protocol):
    """Called in the session's thread. Implementations only enqueue."""

    def on_attached(self, attachment: Attachment) -> None:
        """A new session is up."""

    def on_message(self, attachment: Attachment, message: pb.DaemonMessage) -> None:
        """The daemon sent a message in this session (never Welcome)."""

    def on_detached(self, attachment: Attachment) -> None:
        """This session is over."""


class EngineSession:
    """Keeps a session with the daemon at `socket_path` open, for ever, from `start` to `close`.

    Args:
        socket_path: The daemon's unix socket, absolute.
        make_hello: Called in the thread with the turn before each attempt; raises `NotReadyError` to be asked again.
        listener: Called in the thread.
        daemon_uid: As whom the daemon may run, besides our own uid and root.

    Attributes:
        turn: How often `reopen` was called; sessions of an earlier turn are void.
    """

    def __init__(
        self,
        socket_path: Path,
        make_hello: Callable[[int], pb.Hello],
        listener: SessionListener,
        daemon_uid: int | None = None,
    ) -> None:
        self._socket_path, self._daemon_uid = socket_path, daemon_uid
        self._make_hello, self._listener = make_hello, listener
        self._stop = threading.Event()
        self.turn = 0
        self._probing = False
        self._call: Any = None  # grpc-stubs know neither its iterator nor `cancel`
        self._outbox = Outbox()
        self._reported: set[str] = set()  # problems since the last session was up
        self._thread = threading.Thread(target=self._run, name="kvtier-session", daemon=True)

    def start(self) -> None:
        """Begin to attach; returns at once."""
        self._thread.start()

    @property
    def is_failing(self) -> bool:
        """Whether an attempt to attach has failed since the last session was up. Any thread."""
        return bool(self._reported)

    def probe(self, wanted: bool) -> None:
        """Start or stop Pings every 0.25 s; their Pongs reach the listener."""
        self._probing = wanted

    def reopen(self) -> None:
        """End the session and open another with a new Hello; returns at once.

        What was enqueued may be lost; the daemon treats it as a lost connection.
        """
        self.turn += 1
        self._cancel()

    def reconnect(self) -> None:
        """End the session and open another with the same Hello; returns at once."""
        self._cancel()

    def close(self, timeout_s: float = 1.0) -> None:
        """End the session, letting what is enqueued go out first, for at most `timeout_s`."""
        self._stop.set()
        self._outbox.put(pb.EngineMessage(goodbye=pb.Goodbye()))
        self._outbox.close()
        if not self._thread.is_alive():
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._cancel()
            self._thread.join(timeout_s)

    def _cancel(self) -> None:
        call = self._call  # read once: the thread forgets it when the stream ends
        if call is not None:
            call.cancel()

    def _run(self) -> None:
        delay_s = _BACKOFF_FIRST_S
        while not self._stop.is_set():
            attached_at_s = time.monotonic()
            try:
                self._attach_once()
            except NotReadyError:
                self._stop.wait(_BACKOFF_FIRST_S)
                continue
            except (DaemonUnreachableError, UntrustedSocketError) as exc:
                level = logging.ERROR if isinstance(exc, UntrustedSocketError) else logging.WARNING
                self._report(f"kvtier: {exc}; vLLM serves without kvtier until then", level)
            except Exception as exc:  # a cache failure never reaches vLLM, whatever it is
                problem = str(exc) if isinstance(exc, SessionRefusedError) else f"kvtier: attach failed: {exc!r}"
                self._report(f"{problem}; vLLM serves without kvtier until that is mended", logging.ERROR)
                self._stop.wait(RETRY_S)
                continue
            if time.monotonic() - attached_at_s > 1.0:
                delay_s = _BACKOFF_FIRST_S
            self._stop.wait(delay_s)
            delay_s = min(2 * delay_s, _BACKOFF_MAX_S)

    def _attach_once(self) -> None:
        """Attach and read until the stream ends."""
        turn = self.turn
        hello = self._make_hello(turn)
        try:
            socket = open_trusted(self._socket_path, self._daemon_uid)
        except OSError as exc:
            raise unreachable(self._socket_path, exc, _HOW_TO_START) from exc
        outbox = Outbox()
        with socket, socket.channel() as channel, closing(outbox):
            self._outbox, self._probing = outbox, False
            self._call = call = engine_pb2_grpc.EngineServiceStub(channel).Attach(self._outgoing(hello, outbox))
            try:
                if turn == self.turn and not self._stop.is_set():
                    self._read(call, outbox, turn)
            finally:
                self._call = None

    def _read(self, call: Any, outbox: Outbox, turn: int) -> None:
        attachment: Attachment | None = None
        watchdog = threading.Timer(_WELCOME_TIMEOUT_S, call.cancel)
        watchdog.daemon = True
        watchdog.start()
        try:
            for message in _each(call):
                if attachment is not None:
                    self._listener.on_message(attachment, message)
                elif message.WhichOneof("kind") == "welcome":
                    watchdog.cancel()
                    if turn != self.turn:
                        return
                    attachment, welcome = Attachment(outbox, turn, message.welcome), message.welcome
                    logger.info("kvtier attached session=%s namespace=%s", welcome.session_id, welcome.namespace_id)
                    self._reported.clear()
                    self._listener.on_attached(attachment)
        except grpc.RpcError as exc:
            self._translate(exc, turn, was_attached=attachment is not None)
        finally:
            watchdog.cancel()
            if attachment is not None:
                self._listener.on_detached(attachment)

    def _outgoing(self, hello: pb.Hello, outbox: Outbox) -> Iterator[pb.EngineMessages]:
        """Yield what goes to the daemon; runs in gRPC's own thread."""
        yield pb.EngineMessages(messages=[pb.EngineMessage(hello=hello)])
        num_pings, last_ping_s = 0, 0.0
        while (messages := outbox.take()) is not None:
            if self._probing and time.monotonic() - last_ping_s >= PROBE_PERIOD_S:
                num_pings, last_ping_s = num_pings + 1, time.monotonic()
                messages.append(pb.EngineMessage(ping=pb.Ping(id=num_pings)))
            yield from in_bounds(messages)

    def _translate(self, exc: grpc.RpcError, turn: int, *, was_attached: bool) -> None:
        code, details = exc.code(), exc.details()
        cannot_serve = code is grpc.StatusCode.INTERNAL and not was_attached  # its ledger, its disk: it says which
        if cannot_serve or code in _REFUSALS:
            raise SessionRefusedError(
                f"kvtier-daemon at {self._socket_path} refused this engine ({code.name}): {details}"
            ) from exc
        if turn == self.turn and not self._stop.is_set():
            # The next attempt reports why it is gone; if that attempt succeeds, there is nothing to report.
            logger.info("kvtier session lost (%s: %s)", code.name, details)

    def _report(self, problem: str, level: int) -> None:
        """Log a problem once in an outage: each error, and of warnings only the first as one."""
        if problem not in self._reported:
            is_news = level >= logging.ERROR or not self._reported
            logger.log(level if is_news else logging.INFO, "%s", problem)
        self._reported.add(problem)


def _each(received: Iterable[pb.DaemonMessages]) -> Iterator[pb.DaemonMessage]:
    for together in received:
        yield from together.messages
