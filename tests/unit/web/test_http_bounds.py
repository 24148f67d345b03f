"""What clients can do to the server over real sockets: each bound holds, and others are answered meanwhile."""

import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from kvtier import Client
from kvtier.web.transport.http_bounds import HttpBounds
from kvtier.web.transport.http_server import HttpServer
from tests.fakes.fake_cache_service import FakeCacheService
from tests.fakes.waiting import wait_for
from tests.unit.web.http_rig import gatekeeper_in, headers_of_viewer, served_door

BOUNDS = HttpBounds(max_connections=20, max_body_bytes=100_000, sweep_s=0.05, max_calls=4)
BRIEF_S = 0.5
"""A timeout where it is to be over, and nowhere else: a client on a busy machine takes as long for one request."""
PIN = b"PUT /api/v1/prompts/p HTTP/1.1\r\nHost: localhost\r\n"


@contextmanager
def served(bounds: HttpBounds = BOUNDS, **door: object) -> Iterator[HttpServer]:
    with served_door(bounds=bounds, **door) as server:  # type: ignore[arg-type]
        yield server
    assert not [each.name for each in threading.enumerate() if each.name == "kvtier-http"]


def connect(server: HttpServer) -> socket.socket:
    port = httpx.URL(server.url).port
    assert port is not None
    connection = socket.create_connection(("127.0.0.1", port))
    connection.settimeout(30)
    return connection


def answer_to(connection: socket.socket) -> bytes:
    """Return all that comes until the server closes the connection."""
    whole = b""
    try:
        while part := connection.recv(65536):
            whole += part
    except ConnectionResetError:
        pass
    return whole


def assert_serves(server: HttpServer) -> None:
    def is_answered() -> bool:
        try:
            return httpx.get(f"{server.url}/healthz", timeout=30).status_code == 200
        except httpx.RemoteProtocolError:
            return False  # our own headers took longer than a brief timeout

    wait_for(is_answered)


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HT", b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-A: "])
def test_headers_that_do_not_come_end_the_connection(sent: bytes) -> None:
    with served(replace(BOUNDS, header_timeout_s=BRIEF_S)) as server, closing(connect(server)) as silent:
        silent.sendall(sent)
        assert answer_to(silent) == b""
        assert_serves(server)


def test_headers_that_come_byte_by_byte_end_the_connection_on_a_kept_one_too() -> None:
    with served(replace(BOUNDS, header_timeout_s=BRIEF_S)) as server, ExitStack() as opened:

        def answered() -> socket.socket | None:
            connection = opened.enter_context(closing(connect(server)))
            with suppress(ConnectionError):
                connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
                if connection.recv(65536).startswith(b"HTTP/1.1 200"):
                    return connection
            return None  # our own headers took longer

        slow = next(filter(None, (answered() for _ in range(20))))
        stop = threading.Event()

        def drip() -> None:
            while not stop.wait(0.05):
                try:
                    slow.sendall(b"X")
                except OSError:
                    return

        dripping = threading.Thread(target=drip)
        dripping.start()
        answer_to(slow)
        stop.set()
        dripping.join()


def test_headers_that_are_too_long_are_refused() -> None:
    with served() as server, closing(connect(server)) as long:
        long.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * 70_000)
        assert re.match(rb"HTTP/1.1 4\d\d|$", answer_to(long))
        assert_serves(server)


def test_blanks_before_what_no_header_may_have_are_refused_at_once() -> None:
    """h11 tried each way to divide them: half a minute, in which the daemon answered no engine."""
    with served() as server, closing(connect(server)) as client:
        began_s = time.process_time()
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nX: " + b" " * 60_000 + b"\0\r\n\r\n")
        assert answer_to(client).startswith(b"HTTP/1.1 400")
        assert time.process_time() - began_s < 2.0
    with served() as server, closing(connect(server)) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost:x\r\nX: \t a  b\t \r\nY:\r\nZ: \r\nConnection: close\r\n\r\n")
        assert answer_to(client).startswith(b"HTTP/1.1 200")


def test_a_body_that_does_not_come_ends_the_connection() -> None:
    with served(replace(BOUNDS, body_timeout_s=BRIEF_S)) as server, closing(connect(server)) as slow:
        slow.sendall(PIN + b"Content-Length: 1000\r\n\r\n{")
        answer_to(slow)
        assert_serves(server)


@pytest.mark.parametrize("path", ["/api/v1/prompts/p", "/metrics", "/nothing"])
def test_a_body_that_is_too_long_is_refused_before_it_is_read(path: str) -> None:
    with served() as server:
        answer = httpx.put(server.url + path, content=b"x" * 200_000)
        assert (answer.status_code, answer.json()["title"]) == (413, "BodyTooLongError")
        assert "POST /api/v1/bundles" in answer.json()["detail"]


def test_a_body_in_chunks_is_refused_once_it_is_too_long() -> None:
    with served() as server, closing(connect(server)) as endless:
        piece = b"4000\r\n" + b"x" * 0x4000 + b"\r\n"
        num_pieces = BOUNDS.max_body_bytes // 0x4000 + 1
        endless.sendall(PIN + b"Transfer-Encoding: chunked\r\n\r\n" + piece * num_pieces)  # and no end
        answer = endless.recv(65536)
        assert answer.startswith(b"HTTP/1.1 413")
        assert_serves(server)


def test_one_connection_too_many_is_refused_and_the_others_serve() -> None:
    with served(replace(BOUNDS, header_timeout_s=5.0)) as server, ExitStack() as opened:
        kept = [opened.enter_context(closing(connect(server))) for _ in range(BOUNDS.max_connections)]
        refused = opened.enter_context(closing(connect(server)))
        assert answer_to(refused).startswith(b"HTTP/1.1 503")
        kept[0].sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert answer_to(kept[0]).startswith(b"HTTP/1.1 200")
        for each in kept[1:]:
            answer_to(each)  # their time for headers is up
        assert_serves(server)


def test_a_client_that_does_not_read_ends_its_connection(
    daemon: FakeCacheService, kvtier: Client, tmp_path: Path
) -> None:
    kvtier.pin("long", tokens=range(200_000, 500_000), warm=False)
    bounds = replace(BOUNDS, read_timeout_s=BRIEF_S)
    with served(bounds, socket=tmp_path / "s") as server, closing(connect(server)) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        request = b"GET /api/v1/prompts/long/tokens HTTP/1.1\r\nHost: localhost\r\n\r\n"
        deaf.sendall(request * 8)
        wait_for(lambda: server.num_connections == 1)  # there is none until the server has taken it
        wait_for(lambda: not server.num_connections, 30)
        assert_serves(server)


def test_calls_at_a_time_are_bounded_and_probes_are_answered_beside_them(
    daemon: FakeCacheService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    monkeypatch.setattr(Client, "status", lambda self: gate.wait(30) and {})
    with served(socket=tmp_path / "s") as server, httpx.Client(base_url=server.url, timeout=30) as client:
        statuses: list[int] = []
        asking = [
            threading.Thread(target=lambda: statuses.append(client.get("/api/v1/status").status_code)) for _ in range(9)
        ]
        for each in asking:
            each.start()
        wait_for(lambda: len(statuses) == 5)
        assert set(statuses) == {429}
        assert client.get("/metrics").status_code == 200
        gate.set()
        for each in asking:
            each.join()
        assert sorted(statuses) == [200] * 4 + [429] * 5


def test_a_caller_that_leaves_its_calls_takes_no_place_of_others(
    daemon: FakeCacheService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pin may wait an hour for vLLM: one tenant took the API from all."""
    gate, asked = threading.Event(), list[Client]()

    def status(client: Client) -> dict[str, object]:
        asked.append(client)
        gate.wait(30)
        return {}

    monkeypatch.setattr(Client, "status", status)
    gatekeeper = gatekeeper_in(tmp_path)
    tenant, other = (headers_of_viewer(gatekeeper, name) for name in ("tenant", "other"))
    with (
        served(replace(BOUNDS, max_calls=8), socket=tmp_path / "s", gatekeeper=gatekeeper) as server,
        httpx.Client(base_url=f"{server.url}/api/v1", timeout=30) as client,
    ):
        for num in (1, 2):
            with closing(connect(server)) as leaving:
                headers = "".join(f"{name}: {value}\r\n" for name, value in tenant.items())
                leaving.sendall(f"GET /api/v1/status HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n".encode())
                wait_for(lambda num=num: len(asked) == num)  # type: ignore[misc]
        refused = client.get("/namespaces", headers=tenant)
        assert (refused.status_code, refused.json()["title"]) == (429, "TooManyCallsError")
        assert "2 calls run over HTTP for this caller, and no more may" in refused.json()["detail"]
        assert client.get("/namespaces", headers=other).status_code == 200
        gate.set()
        wait_for(lambda: client.get("/namespaces", headers=tenant).status_code == 200)


def test_bodies_that_come_slowly_take_no_place_of_others(daemon: FakeCacheService, tmp_path: Path) -> None:
    """Each was kept in memory until it was whole, as many as there are connections, and a byte was enough to stay."""
    gatekeeper = gatekeeper_in(tmp_path)
    tenant, other = (headers_of_viewer(gatekeeper, name) for name in ("tenant", "other"))
    headers = "".join(f"{name}: {value}\r\n" for name, value in tenant.items()).encode()
    with (
        served(replace(BOUNDS, max_calls=8), socket=tmp_path / "s", gatekeeper=gatekeeper) as server,
        ExitStack() as slow,
        httpx.Client(base_url=f"{server.url}/api/v1", timeout=30) as client,
    ):

        def is_refused() -> bool:
            return client.post("/explain", headers=tenant, json={}).status_code == 429

        for _ in range(2):
            connection = slow.enter_context(closing(connect(server)))
            connection.sendall(PIN + headers + b"Content-Length: 90000\r\n\r\n{")
        wait_for(is_refused)
        refused = client.post("/explain", headers=tenant, json={})
        assert "2 bodies of requests come over HTTP for this caller, and no more may" in refused.json()["detail"]
        assert client.get("/namespaces", headers=tenant).status_code == 200, "it has no body"
        assert client.post("/explain", headers=other, json={}).status_code != 429
        slow.close()
        wait_for(lambda: not is_refused())


def test_what_is_no_http_is_refused_without_a_word_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with served() as server:
        for sent in (b"\x16\x03\x01\x02\x00\x01\x00", b"hello\r\n\r\n", b"GET /nothing HTTP/9.9\r\n\r\n", b"\0" * 100):
            with closing(connect(server)) as strange:
                strange.sendall(sent)
                strange.shutdown(socket.SHUT_WR)
                assert re.match(rb"HTTP/1.1 4\d\d|$", answer_to(strange))
        assert_serves(server)
    assert caplog.text == ""


@pytest.mark.parametrize(
    "rest",
    [
        b"Content-Length: 1000\r\n\r\n{",
        b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",
        b"Transfer-Encoding: chunked\r\n\r\nno chunk\r\n",
    ],
)
@pytest.mark.parametrize("what", [b"POST /healthz", b"HEAD /readyz", b"POST /api/v1/explain", b"POST /api/v1/bundles"])
def test_a_body_that_ends_too_early_is_no_defect(what: bytes, rest: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """Any client could write the log full of tracebacks: the body was missed, or a second answer could not be sent."""
    with served() as server:
        with closing(connect(server)) as leaving:
            leaving.sendall(b"%s HTTP/1.1\r\nHost: localhost\r\n%s" % (what, rest))
            leaving.shutdown(socket.SHUT_WR)
            assert re.match(rb"HTTP/1.1 [24]\d\d|$", answer_to(leaving))
        assert_serves(server)
    assert caplog.text == ""


def test_a_bad_chunk_behind_an_answer_ends_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    """asyncio logged a traceback: the request was to be answered a second time."""
    with served() as server, closing(connect(server)) as client:
        client.sendall(b"POST /healthz HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        answer = client.recv(65536)
        assert answer.startswith(b"HTTP/1.1 405")
        client.sendall(b"no chunk\r\n")
        assert b"HTTP/1.1" not in answer_to(client)
        assert_serves(server)
    assert caplog.text == ""


@pytest.mark.parametrize("path", [b"/healthz", b"/api/v1/prompts"])
def test_a_request_with_two_lengths_is_refused_and_ends_its_connection(path: bytes) -> None:
    """A proxy in front may go by the other length: what is the body's rest to one is the next request to the other."""
    lengths = b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    with served() as server, closing(connect(server)) as client:
        client.sendall(
            b"POST %s HTTP/1.1\r\nHost: localhost\r\n%s%s" % (path, lengths, b"GET /healthz HTTP/1.1\r\n\r\n")
        )
        answer = answer_to(client)
        assert answer.startswith(b"HTTP/1.1 400")
        assert b"Transfer-Encoding, which may disagree" in answer
        assert answer.count(b"HTTP/1.1 ") == 1
        assert_serves(server)


def test_a_call_whose_client_is_closed_by_the_end_is_no_defect(
    daemon: FakeCacheService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At the end of the daemon its log had a traceback: httpx raises RuntimeError, and the library ValueError."""
    gate, began = threading.Event(), threading.Event()

    def status(_: Client) -> None:
        began.set()
        gate.wait(30)
        raise RuntimeError("the client has been closed")

    monkeypatch.setattr(Client, "status", status)
    with served(socket=tmp_path / "s") as server, closing(connect(server)) as waiting:
        waiting.sendall(b"GET /api/v1/status HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert began.wait(30)
        threading.Timer(0.05, gate.set).start()
    wait_for(lambda: not [each for each in threading.enumerate() if each.name.startswith("kvtier-http")])
    assert caplog.text == ""


def test_a_server_ends_though_calls_run(
    daemon: FakeCacheService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    began = threading.Event()

    def waiting_status(_: Client) -> bool:
        began.set()
        return gate.wait(30)

    monkeypatch.setattr(Client, "status", waiting_status)
    with served(socket=tmp_path / "s") as server, closing(connect(server)) as waiting:
        waiting.sendall(b"GET /api/v1/status HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert began.wait(30)
    gate.set()
    wait_for(lambda: not [each for each in threading.enumerate() if each.name.startswith("kvtier-http")])
