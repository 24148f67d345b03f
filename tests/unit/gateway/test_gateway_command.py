"""`kvtier-gateway`: settings, their errors, and a process that serves and stops."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from typer.testing import CliRunner

from benchmarks.harness.process import free_port, wait_until
from kvtier.gateway.proxy.gateway_command import app

MODULE = "kvtier.gateway.proxy.gateway_command"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--upstream", "ftp://x"], "--upstream = 'ftp://x': must be the base URL of a vLLM"),
        (["--upstream", "http://user:secret@x"], "must be the base URL"),
        (["--upstream", "http://x?a=1"], "must be the base URL"),
        (["--listen", "8100"], "--listen = '8100': must be host:port"),
        (["--listen", "256.0.0.1:1"], "cannot listen there"),
        (["--max-body", "lots"], "not a size"),
        (["--owner-header", "a b"], "must be the name of a header"),
        (["--log-level", "loud"], "--log-level = 'loud': must be one of debug, info, warning, error"),
    ],
)
def test_wrong_settings_are_named(arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert words in done.stderr
    assert "secret" not in done.stderr


@contextmanager
def started(*arguments: str, **variables: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run a gateway, with KVTIER_GATEWAY_ variables; yield its URL and its process, which ends with the block."""
    url = f"127.0.0.1:{free_port()}"
    environment = os.environ | {f"KVTIER_GATEWAY_{name}": value for name, value in {"LISTEN": url, **variables}.items()}
    argv = [sys.executable, "-m", MODULE, *arguments]

    def answers() -> bool:
        try:
            return httpx.get(f"http://{url}/health/live").is_success
        except httpx.TransportError:
            return False

    with subprocess.Popen(argv, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_until(answers, 60, "the gateway to answer")
            yield f"http://{url}", process
        finally:
            process.send_signal(signal.SIGTERM)


@contextmanager
def stopped_stream() -> Iterator[tuple[str, threading.Event]]:
    """Run a healthy vLLM that begins each answer, and ends it at an event or with the block; yield its URL and that."""
    is_over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            if self.path != "/health":
                self.wfile.write(b"data: {}\n\n")
                is_over.wait(60)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", is_over
        finally:
            is_over.set()
            server.shutdown()


def test_a_gateway_with_as_many_requests_as_may_run_says_that_vllm_is_healthy() -> None:
    with (
        stopped_stream() as (vllm, _),
        started("--upstream", vllm, "--max-requests", "1") as (url, _),
        httpx.stream("GET", f"{url}/v1/models") as running,
    ):
        parts = running.iter_raw()
        assert next(parts) == b"data: {}\n\n"
        assert httpx.get(f"{url}/v1/models").status_code == 503
        health = httpx.get(f"{url}/health", timeout=30)

    assert (health.status_code, health.json()["status"]) == (200, "ok")


def test_it_serves_says_that_vllm_is_away_and_stops() -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    with started("--upstream", f"{nowhere}/v1") as (url, process):
        assert httpx.get(f"{url}/health").status_code == 503
        turns = [{"role": "user", "content": "hi"}]
        marked = {"model": "m", "max_tokens": 1, "cache_control": {"type": "ephemeral"}, "messages": turns}
        answer = httpx.post(f"{url}/v1/messages", json=marked)
        assert answer.status_code == 502
        assert f"no vLLM answers at {nowhere}" in answer.json()["error"]["message"]
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 0, stderr
    assert "gateway_ready" in stderr
    assert "gateway_stopped" in stderr


def test_settings_come_from_the_environment() -> None:
    with (
        stopped_stream() as (vllm, _),
        started(UPSTREAM=f"{vllm} http://127.0.0.1:1", TIMEOUT="1", MAX_REQUESTS="1") as (url, _),
        httpx.stream("GET", f"{url}/v1/responses/x") as running,
    ):
        parts = running.iter_raw()
        assert next(parts) == b"data: {}\n\n"
        refused = httpx.get(f"{url}/v1/models")
        assert (refused.status_code, "1 requests run" in refused.text) == (503, True)
        with pytest.raises(httpx.RemoteProtocolError):
            next(parts)


def ended(process: subprocess.Popen[str]) -> str:
    """Wait for the end of a gateway that stops; return its log."""
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert "gateway_stopped" in stderr
    return stderr


def test_it_gives_running_requests_time_to_end() -> None:
    with (
        stopped_stream() as (vllm, is_over),
        started("--upstream", vllm) as (url, process),
        httpx.stream("GET", f"{url}/v1/models") as running,
    ):
        parts = running.iter_raw()
        assert next(parts) == b"data: {}\n\n"
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: not accepts(url), 60, "the gateway to accept nothing new")
        is_over.set()
        assert list(parts) == []
        ended(process)


def test_it_ends_requests_that_run_for_longer() -> None:
    with (
        stopped_stream() as (vllm, _),
        started("--upstream", vllm, STOP_TIMEOUT="1") as (url, process),
        httpx.stream("GET", f"{url}/v1/models") as running,
    ):
        parts = running.iter_raw()
        assert next(parts) == b"data: {}\n\n"
        process.send_signal(signal.SIGTERM)
        with pytest.raises(httpx.RemoteProtocolError):
            next(parts)
        ended(process)


def accepts(url: str) -> bool:
    try:
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))).close()
    except ConnectionError:
        return False
    return True


def test_a_signal_before_it_serves_stops_it() -> None:
    """It was lost, and who had sent it waited until it sent SIGKILL."""
    early = (
        "import signal, uvicorn\n"
        f"from {MODULE} import main\n"
        "run = uvicorn.Server.run\n"
        "uvicorn.Server.run = lambda *args, **kwargs: (signal.raise_signal(signal.SIGTERM), run(*args, **kwargs))\n"
        "main()\n"
    )
    argv = [sys.executable, "-c", early, "--listen", "127.0.0.1:0"]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert "gateway_ready" not in ended(process)
        finally:
            process.kill()


def test_what_is_no_http_behind_an_answered_request_ends_the_connection_and_is_no_defect() -> None:
    """Each was a traceback in the log."""
    with started("--upstream", f"http://127.0.0.1:{free_port()}") as (url, process):
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=60) as client:
            client.sendall(b"PUT /nowhere HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
            assert client.recv(65536).startswith(b"HTTP/1.1 404 ")
            client.sendall(b"no chunk\r\n")
            while client.recv(65536):
                pass
        process.send_signal(signal.SIGTERM)
        assert "Traceback" not in ended(process)
