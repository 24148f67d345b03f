"""The scripts of configs/kubernetes: run by sh, beside a real daemon and the real CLI."""

import http.server
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtier import Client
from kvtier.config import DaemonConfig
from tests.fakes.daemon_process import START_DEADLINE_S, daemon_command, daemon_process
from tests.fakes.scripted_engine import config_in
from tests.fakes.waiting import wait_for
from tests.unit.deployment.manifests import KUBERNETES
from tests.unit.deployment.mounted_files import MountedFiles

APPLY = KUBERNETES / "components" / "prompts" / "apply.sh"
READY = KUBERNETES / "base" / "ready.sh"
DEADLINE_S = 60.0
ONE = {"prompts.yaml": "set: k\nprompts:\n  - {name: a, system_file: a.txt}\n", "a.txt": "You sell apples."}
TWO = {
    "prompts.yaml": "set: k\nprompts:\n  - {name: b, system_file: b.txt}\n",
    "b.txt": "You sell pears.",
}
WRONG = {"prompts.yaml": "set: k\nprompts:\n  - {name: c, system_file: missing.txt}\n"}


class Script:
    """A script that runs; what it wrote is in `log`."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self._log = process, log

    @property
    def log(self) -> str:
        return self._log.read_text()

    def wrote(self, text: str) -> None:
        """Wait until it has written this."""
        wait_for(lambda: text in self.log or self.process.poll() is not None, DEADLINE_S)
        assert text in self.log

    def end(self) -> int:
        """End it as the kubelet does; return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE_S)


@contextmanager
def running(script: Path, *arguments: Path, log: Path, environment: Mapping[str, str]) -> Iterator[Script]:
    """Run a script with the commands of this Python's environment."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}
    own["PATH"] = f"{Path(sys.executable).parent}:{own['PATH']}"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["sh", str(script), *map(str, arguments)], env={**own, **environment}, stdout=output, stderr=output
        )
    try:
        yield Script(process, log)
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def config(tmp_path: Path) -> DaemonConfig:
    return config_in(tmp_path)


@pytest.fixture
def environment(config: DaemonConfig) -> dict[str, str]:
    return {
        "KVTIER_SOCKET": str(config.server.socket),
        "KVTIER_VLLM_URL": "http://127.0.0.1:9",  # no vLLM runs
        "POLL_S": "0.05",
        "RETRY_S": "0.2",
    }


def pinned(config: DaemonConfig) -> set[str]:
    with Client(socket=config.server.socket) as client:
        return {prompt.name for prompt in client.list() if prompt.pinned}


def test_apply_follows_the_files_and_waits_for_the_daemon(
    config: DaemonConfig, environment: dict[str, str], tmp_path: Path
) -> None:
    files = MountedFiles(tmp_path / "prompts", ONE)
    with running(APPLY, files.path, log=tmp_path / "apply.log", environment=environment) as script:
        script.wrote("no kvtier-daemon answers")
        with daemon_process(daemon_command(config), tmp_path / "log"):
            wait_for(lambda: pinned(config) == {"a"}, DEADLINE_S)
            script.wrote("applied: 1 new")
            files.write(TWO)
            wait_for(lambda: pinned(config) == {"b"}, DEADLINE_S)
            assert script.end() == 0


@pytest.fixture
def applied(config: DaemonConfig, environment: dict[str, str], tmp_path: Path) -> Iterator[tuple[Script, MountedFiles]]:
    """The script beside a daemon, when it has applied the first files; and these files."""
    files = MountedFiles(tmp_path / "prompts", ONE)
    with (
        daemon_process(daemon_command(config), tmp_path / "log"),
        running(APPLY, files.path, log=tmp_path / "apply.log", environment=environment) as script,
    ):
        script.wrote("applied: 1 new")
        yield script, files


def test_apply_tries_again_what_failed_and_leaves_pins_alone_meanwhile(
    config: DaemonConfig, applied: tuple[Script, MountedFiles]
) -> None:
    script, files = applied
    files.write(WRONG)
    wait_for(lambda: script.log.count("nothing was applied") > 1, DEADLINE_S)
    assert "'missing.txt': cannot be read" in script.log
    assert pinned(config) == {"a"}
    files.write(TWO)
    wait_for(lambda: pinned(config) == {"b"}, DEADLINE_S)


def test_apply_asks_nothing_while_nothing_changes(
    applied: tuple[Script, MountedFiles],
) -> None:
    script, files = applied
    files.write(ONE)  # the kubelet writes no such version; but the same prompts are another change
    script.wrote("applied: 1 unchanged")
    files.write(TWO)
    wait_for(lambda: script.log.count("applied: ") > 2, DEADLINE_S)
    assert script.log.count("applied: ") == 3


class _Health(http.server.BaseHTTPRequestHandler):
    """vLLM's API server, as far as the script asks it."""

    is_up = threading.Event()

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" and self.is_up.is_set() else 503)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@pytest.fixture
def vllm_url() -> Iterator[str]:
    _Health.is_up.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Health) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_traffic_comes_when_vllm_answers_and_ready_said_so(
    config: DaemonConfig, environment: dict[str, str], vllm_url: str, tmp_path: Path
) -> None:
    made = tmp_path / "traffic"
    environment |= {"KVTIER_VLLM_URL": vllm_url, "READY_TIMEOUT_S": str(int(START_DEADLINE_S))}
    with (
        daemon_process(daemon_command(config), tmp_path / "log"),
        running(READY, made, log=tmp_path / "ready.log", environment=environment) as script,
    ):
        assert not made.exists()
        _Health.is_up.set()
        wait_for(made.exists, DEADLINE_S)
        assert "ready: no prompts are pinned" in script.log
        assert script.end() == 0


@pytest.mark.parametrize("has_daemon", [True, False])
def test_traffic_comes_in_the_end_whatever_is_not_ready(
    has_daemon: bool, config: DaemonConfig, environment: dict[str, str], vllm_url: str, tmp_path: Path
) -> None:
    """A prompt that is not stored, or a daemon that is away, keeps no vLLM from its users."""
    made = tmp_path / "traffic"
    environment |= {"KVTIER_VLLM_URL": vllm_url, "READY_TIMEOUT_S": "1"}
    _Health.is_up.set()
    with daemon_process(daemon_command(config), tmp_path / "log"):
        with Client(socket=config.server.socket) as client:
            client.pin("a", tokens=range(1000), warm=False)
        if has_daemon:
            assert_traffic(made, environment, tmp_path, "not ready: 0 of 1 prompts")
    if not has_daemon:
        assert_traffic(made, environment, tmp_path, "no kvtier-daemon answers")


def assert_traffic(made: Path, environment: Mapping[str, str], folder: Path, why: str) -> None:
    with running(READY, made, log=folder / "ready.log", environment=environment) as script:
        wait_for(made.exists, DEADLINE_S)
        assert why in script.log
        assert "traffic comes all the same" in script.log
