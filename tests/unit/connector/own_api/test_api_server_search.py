"""An engine's process finds the API server that started it, and no other program's."""

import http.server
import json
import multiprocessing
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import psutil
import pytest

from kvtier_connector.own_api import api_server_search
from kvtier_connector.own_api.api_server_search import find_api_server

VERSION = "0.32.0+test"


@contextmanager
def listening(answer: object) -> Iterator[int]:
    """Answer everything in this process, as an API server does; yields the port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *args: object) -> None:
            pass

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def found_by_a_child() -> str | None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(find_api_server, (VERSION,))


def test_the_server_of_the_process_above_is_found() -> None:
    with listening({"version": "another"}), listening([]), listening({"version": VERSION}) as port:
        assert found_by_a_child() == f"http://127.0.0.1:{port}"


@pytest.mark.parametrize("answer", [{"version": "another"}, {}, "no object"])
def test_another_programs_server_is_not_taken(answer: object) -> None:
    with listening(answer):
        assert found_by_a_child() is None


def test_one_that_listens_everywhere_is_reached_over_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    def connection(host: str, status: str = psutil.CONN_LISTEN) -> SimpleNamespace:
        return SimpleNamespace(laddr=SimpleNamespace(ip=host, port=8000), status=status)

    def ended(kind: str) -> list[SimpleNamespace]:
        raise psutil.NoSuchProcess(2)

    sockets = [connection("0.0.0.0"), connection("::"), connection("127.0.0.9", psutil.CONN_ESTABLISHED)]
    child = SimpleNamespace(net_connections=ended)
    starter = SimpleNamespace(net_connections=lambda kind: sockets, children=lambda: [child])
    monkeypatch.setattr(psutil, "Process", lambda pid: starter)
    assert list(api_server_search._listening(1)) == [("127.0.0.1", 8000), ("::1", 8000)]


def test_an_engine_in_its_users_own_process_has_none() -> None:
    with listening({"version": VERSION}):
        assert find_api_server(VERSION) is None
