"""An HTTP proxy on loopback between an S3 client and its server, which does harm when a test says so.

It passes on every header as it came, Host too: a server that checks signatures checks what the client has signed. Each
proxy has a loop in a thread of its own, so that a test may block, and each host of a fleet can have one.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from urllib.parse import urlsplit

_PIECE_BYTES = 64 * 1024
_HEAD_BYTES = 64 * 1024
_SLOW_DOWN = (
    b'<?xml version="1.0" encoding="UTF-8"?>\n'
    b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
)


class Link(Enum):
    """What the network between client and server does with connections."""

    UP = auto()
    REFUSES = auto()
    """Each connection ends at once."""
    SILENT = auto()
    """Bytes get lost on their way: no answer, and no end of the connection."""


class Fault(Enum):
    """What is done to one request."""

    UNAVAILABLE = auto()
    """Not passed on; answered by 503 (SlowDown)."""
    ERROR = auto()
    """Not passed on; answered by 500."""
    CUT_REQUEST = auto()
    """Half of its body is passed on, then the connection ends on both sides."""
    SPOIL_REQUEST = auto()
    """One bit of its body is another one."""
    LOST_ANSWER = auto()
    """The server carries it out; the connection ends before the answer."""
    LATE_ANSWER = auto()
    """The server carries it out; the answer never comes, and the connection stays."""
    CUT_ANSWER = auto()
    """The connection ends in the middle of the answer's body."""
    SPOIL_ANSWER = auto()
    """One bit of the answer's body is another one."""


@dataclass(frozen=True)
class Head:
    """The first line and the headers of a request or an answer.

    Attributes:
        raw: As it came, with the empty line.
    """

    raw: bytes

    @property
    def words(self) -> list[str]:
        """The first line: method, target and version, or version, status and reason."""
        return self.raw.partition(b"\r\n")[0].decode("latin-1").split(" ", 2)

    def header(self, name: str) -> str:
        """Return a header's value; empty if there is none."""
        for line in self.raw.split(b"\r\n")[1:]:
            key, _, value = line.decode("latin-1").partition(":")
            if key.strip().lower() == name:
                return value.strip()
        return ""

    @property
    def has_length(self) -> bool:
        """Where the body ends is said, so another message can follow."""
        return bool(self.header("content-length")) or self.is_chunked

    @property
    def has_body(self) -> bool:
        """A request brings something that could be harmed."""
        return self.is_chunked or int(self.header("content-length") or 0) > 0

    @property
    def is_chunked(self) -> bool:
        """The body comes in chunks, each after its length."""
        return "chunked" in self.header("transfer-encoding").lower()

    @property
    def is_conditional_write(self) -> bool:
        """It is `put_new` or `swap`."""
        return self.words[0] == "PUT" and bool(self.header("if-match") or self.header("if-none-match"))


Which = Callable[[Head], bool]
_IN_REQUEST = frozenset({Fault.CUT_REQUEST, Fault.SPOIL_REQUEST})
_IN_ANSWER = frozenset({Fault.CUT_ANSWER, Fault.SPOIL_ANSWER})
_CUTS = frozenset({Fault.CUT_REQUEST, Fault.CUT_ANSWER})
_SPOILS = frozenset({Fault.SPOIL_REQUEST, Fault.SPOIL_ANSWER})


@dataclass
class _Rule:
    """A fault for the next requests that it is for."""

    fault: Fault
    times: int
    which: Which


class _CutError(Exception):
    """The connection is to end now."""


@dataclass
class FaultProxy:
    """What a test turns; all of it may be turned while requests run. Made by `fault_proxy`.

    Attributes:
        url: For AWS_ENDPOINT_URL.
        link: What the network does.
        bytes_per_s: Of bodies, all connections together, each way; 0: no limit.
        num_requests: Requests that came, by method.
        num_faults: Requests that were harmed; of bodies, where one was cut or spoiled.
        num_parted: Connections and requests that met a link that is not up.
    """

    upstream: str
    url: str = ""
    link: Link = Link.UP
    bytes_per_s: int = 0
    num_requests: Counter[str] = field(default_factory=Counter)
    num_faults: Counter[Fault] = field(default_factory=Counter)
    num_parted: int = 0
    _rules: list[_Rule] = field(default_factory=list)
    _connections: set["asyncio.Task[None]"] = field(default_factory=set)
    _loop: asyncio.AbstractEventLoop | None = None
    _free_s: float = 0.0

    def harm(self, fault: Fault, times: int = 1, which: Which = lambda head: True) -> None:
        """Do this to the next requests that `which` names; what is for a request's body, to those that have one.

        An answer without a body cannot be cut or spoiled: it passes, and `num_faults` does not count it.
        """
        self._rules.append(_Rule(fault, times, which))

    def heal(self) -> None:
        """Be an honest proxy from now on; what was silent ends."""
        self._rules, self.link, self.bytes_per_s = [], Link.UP, 0
        self.end_connections()

    def cut_off(self, link: Link = Link.REFUSES) -> None:
        """Part client and server, and end what runs between them."""
        self.link = link
        if link is Link.REFUSES:
            self.end_connections()

    def end_connections(self) -> None:
        """End every connection, at once."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in self._connections])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            while await self._pass_one(reader, writer):
                pass
        except (_CutError, OSError, EOFError, asyncio.LimitOverrunError, asyncio.CancelledError):
            writer.transport.abort()
        finally:
            self._connections.discard(task)
            writer.close()

    async def _pass_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Pass on one request and its answer; say whether another may follow."""
        if self.link is Link.REFUSES:
            await self._check_link()
        head = Head(await reader.readuntil(b"\r\n\r\n"))
        await self._check_link()
        self.num_requests[head.words[0]] += 1
        fault = self._fault_of(head)
        if fault in (Fault.UNAVAILABLE, Fault.ERROR):
            async for _ in _body(reader, head):
                pass
            await _answer(writer, 503 if fault is Fault.UNAVAILABLE else 500)
            return True
        address = urlsplit(self.upstream)
        server_reader, server_writer = await asyncio.open_connection(address.hostname, address.port, limit=_HEAD_BYTES)
        try:
            await self._copy(head, reader, server_writer, fault if fault in _IN_REQUEST else None)
            answer = Head(await server_reader.readuntil(b"\r\n\r\n"))
            if fault is Fault.LOST_ANSWER:
                raise _CutError
            if fault is Fault.LATE_ANSWER:
                await asyncio.Event().wait()
            has_body = head.words[0] != "HEAD" and answer.words[1] not in ("204", "304")
            in_answer = fault if fault in _IN_ANSWER else None
            await self._copy(answer, server_reader, writer, in_answer, has_body=has_body)
            return (answer.has_length or not has_body) and answer.words[0] != "HTTP/1.0"
        finally:
            server_writer.transport.abort()

    def _fault_of(self, head: Head) -> Fault | None:
        for rule in self._rules:
            if rule.times > 0 and (head.has_body or rule.fault not in _IN_REQUEST) and rule.which(head):
                rule.times -= 1
                if rule.fault not in _IN_REQUEST | _IN_ANSWER:
                    self.num_faults[rule.fault] += 1
                return rule.fault
        return None

    async def _copy(
        self,
        head: Head,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        fault: Fault | None,
        *,
        has_body: bool = True,
    ) -> None:
        """Copy a message; with a fault, harm its body."""
        writer.write(head.raw)
        await writer.drain()
        if not has_body:
            return
        num_bytes = int(head.header("content-length") or 0)
        sent = 0
        async for piece, is_payload in _body(reader, head):
            await self._check_link()
            if is_payload:
                num_bytes = num_bytes or len(piece)  # its length is not known: as if its first piece were all of it
            if is_payload and fault in _CUTS and sent + len(piece) > num_bytes // 2:
                writer.write(piece[: max(0, num_bytes // 2 - sent)])
                await writer.drain()
                self.num_faults[fault] += 1
                raise _CutError
            if is_payload and fault in _SPOILS and sent <= num_bytes // 2 < sent + len(piece):
                piece = _spoiled(piece, num_bytes // 2 - sent)
                self.num_faults[fault] += 1
            sent += len(piece) * is_payload
            await self._pace(len(piece))
            writer.write(piece)
            await writer.drain()

    async def _check_link(self) -> None:
        self.num_parted += self.link is not Link.UP
        if self.link is Link.SILENT:
            await asyncio.Event().wait()
        if self.link is Link.REFUSES:
            raise _CutError

    async def _pace(self, num_bytes: int) -> None:
        if self.bytes_per_s:
            now_s = asyncio.get_running_loop().time()
            self._free_s = max(self._free_s, now_s) + num_bytes / self.bytes_per_s
            await asyncio.sleep(self._free_s - now_s)

    async def _run(self, is_ready: threading.Event, stop: asyncio.Event) -> None:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=_HEAD_BYTES)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        is_ready.set()
        await stop.wait()
        server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)


@contextmanager
def fault_proxy(upstream: str) -> Iterator[FaultProxy]:
    """Run a proxy before a server during the block."""
    proxy, loop, is_ready, stop = FaultProxy(upstream), asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    proxy._loop = loop
    thread = threading.Thread(target=lambda: loop.run_until_complete(proxy._run(is_ready, stop)), daemon=True)
    thread.start()
    assert is_ready.wait(10)
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        assert not thread.is_alive()
        loop.close()


def _spoiled(piece: bytes, at: int) -> bytes:
    return piece[:at] + bytes([piece[at] ^ 1]) + piece[at + 1 :]


async def _body(reader: asyncio.StreamReader, head: Head) -> AsyncIterator[tuple[bytes, bool]]:
    """Yield a body in pieces, as it is on the wire, and whether a piece is payload (lengths of chunks are not)."""
    is_request = not head.words[0].startswith("HTTP")
    if head.is_chunked:
        while True:
            line = await reader.readline()
            yield line, False
            num_bytes = int(line.partition(b";")[0], 16)
            async for piece in _exactly(reader, num_bytes):
                yield piece, True
            yield await reader.readline(), False  # the end of the chunk, or of the body: S3 sends no trailers
            if not num_bytes:
                return
    elif head.header("content-length"):
        async for piece in _exactly(reader, int(head.header("content-length"))):
            yield piece, True
    elif not is_request:
        while piece := await reader.read(_PIECE_BYTES):
            yield piece, True


async def _exactly(reader: asyncio.StreamReader, num_bytes: int) -> AsyncIterator[bytes]:
    while num_bytes:
        piece = await reader.read(min(num_bytes, _PIECE_BYTES))
        if not piece:
            raise EOFError
        num_bytes -= len(piece)
        yield piece


async def _answer(writer: asyncio.StreamWriter, status: int) -> None:
    reason = "Service Unavailable" if status == 503 else "Internal Server Error"
    head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/xml\r\nContent-Length: {len(_SLOW_DOWN)}\r\n\r\n"
    writer.write(head.encode() + _SLOW_DOWN)
    await writer.drain()
