"""Bytes sent over one TCP connection, and the answers: as many as there are whole requests, or the connection ends."""

import asyncio
import contextlib
from dataclasses import dataclass, field

import h11

from kvtier.concurrency.header_lines import read_headers_in_linear_time

MAX_HEADER_BYTES = 64 * 1024
EVENT_STREAM = b"text/event-stream"
_ANSWER_S = 20.0
"""For all answers of a connection, on a busy machine."""
_STREAM_S = 0.2
"""What a stream without end is read for."""
_QUIET_S = 0.05
"""After bytes that are not yet a request, or only its beginning."""
_MAX_REQUESTS = 50
read_headers_in_linear_time()  # in this process too


class HangError(AssertionError):
    """A whole request was not answered, and the connection is still open, or ended without an answer."""


@dataclass(frozen=True)
class Sent:
    """A request within the bytes, as h11 reads it."""

    method: bytes
    target: bytes
    headers: list[tuple[bytes, bytes]]


@dataclass
class Requests:
    """What the bytes are to h11.

    Attributes:
        begun: Whose headers are whole.
        num_whole: Of them, those whose body is whole too.
        is_doubtful: The server may refuse it, or not, by how the bytes arrive: headers have a bound.
        is_refused: What follows is no HTTP.
        is_last: Nothing is read behind the last one: it is no HTTP, or the connection is to end.
    """

    begun: list[Sent] = field(default_factory=list)
    num_whole: int = 0
    is_refused: bool = False
    is_doubtful: bool = False
    is_last: bool = False


@dataclass
class Answer:
    """What came back.

    Attributes:
        sent: The request; None: an answer to what is no HTTP.
        is_whole: The body is; else it is a stream that was left, or the connection ended.
    """

    sent: Sent | None
    status: int
    headers: dict[str, str]
    body: bytes = b""
    is_whole: bool = False

    @property
    def is_stream(self) -> bool:
        """It has no end."""
        return self.headers.get("content-type", "").startswith("text/event-stream")


def requests_in(data: bytes) -> Requests:
    """Return what a server of h11 reads, which refuses each request by an answer of its own."""
    found = Requests(is_doubtful=len(data) > MAX_HEADER_BYTES)
    server = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEADER_BYTES)
    if not data:  # to h11 that would be the end of the connection
        return found
    server.receive_data(data)
    try:
        while len(found.begun) < _MAX_REQUESTS:
            event = server.next_event()
            if event is h11.NEED_DATA:
                return found
            if isinstance(event, h11.Request):
                found.begun.append(Sent(event.method, event.target, list(event.headers)))
            elif isinstance(event, h11.EndOfMessage):
                found.num_whole += 1
                server.send(h11.Response(status_code=404, headers=[("content-length", "0")]))
                server.send(h11.EndOfMessage())
                if server.our_state is h11.MUST_CLOSE:
                    found.is_last = True
                    return found
                server.start_next_cycle()
    except h11.RemoteProtocolError:
        found.is_refused = found.is_last = True
    return found


class _Answers:
    """Reads answers; the client of h11 refuses what no server may send."""

    def __init__(self, requests: Requests) -> None:
        self._requests, self._client = requests, h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEADER_BYTES)
        self.found: list[Answer] = []
        self.is_over = False
        """The server has said that it closes the connection."""
        self._ask()

    @property
    def num_whole(self) -> int:
        return sum(answer.is_whole for answer in self.found)

    def _ask(self) -> None:
        number = len(self.found)
        self._sent = self._requests.begun[number] if number < len(self._requests.begun) else None
        method = self._sent.method if self._sent and self._sent.method == b"HEAD" else b"GET"
        self._client.send(h11.Request(method=method, target="/", headers=[("host", "x")]))
        self._client.send(h11.EndOfMessage())

    def feed(self, data: bytes) -> None:
        """Take bytes; none: the connection has ended."""
        self._client.receive_data(data)
        while not self.is_over and (event := self._client.next_event()) is not h11.NEED_DATA:
            if isinstance(event, h11.Response):
                headers = {name.decode(): value.decode("latin-1") for name, value in event.headers}
                assert len(headers) == len(event.headers), f"a header twice: {event.headers}"
                self.found.append(Answer(self._sent, event.status_code, headers))
            elif isinstance(event, h11.Data):
                self.found[-1].body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                self.found[-1].is_whole = True
                if self._client.their_state is not h11.DONE:
                    self.is_over = True
                else:
                    self._client.start_next_cycle()
                    self._ask()
            elif isinstance(event, h11.ConnectionClosed):
                self.is_over = True


async def exchanged(port: int, data: bytes, requests: Requests) -> list[Answer]:
    """Send bytes; return the answers. A stream without end is left after a moment.

    Raises:
        HangError: See there.
        h11.RemoteProtocolError: What came back is no HTTP.
    """
    answers = _Answers(requests)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        with contextlib.suppress(ConnectionError):  # the server may refuse without reading all of it
            async with asyncio.timeout(_ANSWER_S):
                await _read(reader, answers, requests)
    except TimeoutError as exc:
        raise HangError(f"{answers.num_whole} of {requests.num_whole} requests are answered; then nothing") from exc
    finally:
        writer.transport.abort()
    return answers.found


async def _read(reader: asyncio.StreamReader, answers: _Answers, requests: Requests) -> None:
    while not answers.is_over:
        if answers.found and answers.found[-1].is_stream:
            patience_s = _STREAM_S
        elif answers.num_whole < requests.num_whole or (requests.is_last and not requests.is_doubtful):
            patience_s = _ANSWER_S * 2
        else:
            is_more = requests.is_last or len(requests.begun) > requests.num_whole or not requests.begun
            patience_s = _QUIET_S if is_more else 0
        if not patience_s:
            return
        try:
            data = await asyncio.wait_for(reader.read(65536), patience_s)
        except TimeoutError:
            if patience_s > _ANSWER_S:
                raise
            return
        if data or (answers.found and not answers.found[-1].is_whole):
            answers.feed(data)
        if not data:
            if answers.num_whole < requests.num_whole and not (requests.is_refused or requests.is_doubtful):
                raise HangError("the connection ended before a whole request was answered")
            return
