"""Shell completion, asked as the shells ask: by environment variables."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvtier._pb.cache_pb2 import PromptStatus
from kvtier.cli.app import app
from tests.fakes.fake_cache_service import FakeCacheService


@pytest.fixture(autouse=True)
def no_socket_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVTIER_SOCKET", raising=False)


def completed(line: str) -> list[str]:
    """Return what bash would offer for the last word."""
    words = line.split(" ")
    environment = {"_KVTIER_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    result = CliRunner().invoke(app, [], prog_name="kvtier", env=environment)
    assert result.exit_code == 0, result.output
    return result.output.split()


def test_commands_and_options() -> None:
    assert {"pin", "list", "fsck", "status"} <= set(completed("kvtier "))
    assert completed("kvtier unp") == ["unpin"]
    assert completed("kvtier evict --tier ") == ["host", "disk"]
    assert completed("kvtier unpin --js") == ["--json"]


def test_names_come_from_the_daemon(daemon: FakeCacheService, tmp_path: Path) -> None:
    for name in ("support", "sales", "house-rules"):
        daemon.prompts[name] = PromptStatus(name=name)
    command = f"kvtier --socket {tmp_path / 's'}"
    assert completed(f"{command} show s") == ["support", "sales"]
    for named in ("evict", "export", "pin", "verify", "ready"):
        assert completed(f"{command} {named} h") == ["house-rules"]


def test_the_named_socket_counts_before_the_server_of_the_environment(
    daemon: FakeCacheService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for commands. And credentials in the environment, without a server, left nothing to complete."""
    daemon.prompts["support"] = PromptStatus(name="support")
    monkeypatch.setenv("KVTIER_CA_FILE", str(tmp_path / "ca.pem"))
    assert completed(f"kvtier --socket {tmp_path / 's'} show s") == ["support"]
    monkeypatch.setenv("KVTIER_SERVER", "127.0.0.1:1")
    assert completed(f"kvtier --socket {tmp_path / 's'} show s") == ["support"]


def test_namespaces_come_from_the_daemon(daemon: FakeCacheService, tmp_path: Path) -> None:
    assert completed(f"kvtier --socket {tmp_path / 's'} quarantine ") == ["n1"]
    assert completed(f"kvtier --socket {tmp_path / 'none'} quarantine ") == []


def test_without_a_daemon_there_are_no_names_and_no_error(tmp_path: Path) -> None:
    assert completed(f"kvtier --socket {tmp_path / 'none'} show ") == []


def test_each_shell_gets_a_script() -> None:
    for shell in ("bash", "zsh", "fish"):
        result = CliRunner().invoke(app, [], prog_name="kvtier", env={"_KVTIER_COMPLETE": f"source_{shell}"})
        assert result.exit_code == 0
        assert "_KVTIER_COMPLETE" in result.output
