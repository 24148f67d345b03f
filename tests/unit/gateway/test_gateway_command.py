"""`kvtier-gateway`: settings, their errors, and a process that serves and stops."""

import signal
import subprocess
import sys

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


def test_it_serves_says_that_vllm_is_away_and_stops() -> None:
    port, nowhere = free_port(), free_port()
    argv = [
        sys.executable,
        "-m",
        MODULE,
        "--listen",
        f"127.0.0.1:{port}",
        "--upstream",
        f"http://127.0.0.1:{nowhere}/v1",
    ]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as process:
        try:
            url = f"http://127.0.0.1:{port}"

            def answers() -> bool:
                try:
                    return httpx.get(f"{url}/health/live").is_success
                except httpx.TransportError:
                    return False

            wait_until(answers, 60, "the gateway to answer")
            assert httpx.get(f"{url}/health").status_code == 503
            turns = [{"role": "user", "content": "hi"}]
            marked = {"model": "m", "max_tokens": 1, "cache_control": {"type": "ephemeral"}, "messages": turns}
            answer = httpx.post(f"{url}/v1/messages", json=marked)
            assert answer.status_code == 502
            assert f"no vLLM answers at http://127.0.0.1:{nowhere}" in answer.json()["error"]["message"]
        finally:
            process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 0, stderr
    assert "gateway_ready" in stderr
    assert "gateway_stopped" in stderr
