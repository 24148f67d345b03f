"""`kvtier-gateway`: settings, their errors, and a process that serves and stops."""

import signal
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
def started(*arguments: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run a gateway; yield its URL and its process, which ends with the block."""
    url = f"127.0.0.1:{free_port()}"
    argv = [sys.executable, "-m", MODULE, "--listen", url, *arguments]

    def answers() -> bool:
        try:
            return httpx.get(f"http://{url}/health/live").is_success
        except httpx.TransportError:
            return False

    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_until(answers, 60, "the gateway to answer")
            yield f"http://{url}", process
        finally:
            process.send_signal(signal.SIGTERM)


@contextmanager
def stopped_stream() -> Iterator[str]:
    """Run a healthy vLLM that begins each answer and does not end it during the block; yield its URL."""
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
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            is_over.set()
            server.shutdown()


def test_a_gateway_with_as_many_requests_as_may_run_says_that_vllm_is_healthy() -> None:
    with (
        stopped_stream() as vllm,
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
