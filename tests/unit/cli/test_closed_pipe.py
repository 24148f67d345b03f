"""Commands whose reader ends before them, as `| head -1` does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier import Client
from tests.fakes.fake_cache_service import FakeCacheService

_KVTIER = "import sys; from kvtier.cli.app import main; main()"


def kvtier(folder: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Run a command whose stdout no one reads."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        environment = os.environ | {"KVTIER_SOCKET": str(folder / "s")}
        command = [sys.executable, "-c", _KVTIER, *arguments]
        return subprocess.run(
            command, stdout=writer, stderr=subprocess.PIPE, env=environment, cwd=folder, timeout=60, check=False
        )
    finally:
        os.close(writer)


@pytest.fixture
def pinned(daemon: FakeCacheService, tmp_path: Path) -> FakeCacheService:
    with Client(tmp_path / "s") as client:
        for number in range(4):
            client.pin(f"p{number}", tokens=range(100 + number), warm=False)
    return daemon


@pytest.mark.parametrize("option", [[], ["--json"]])
def test_an_action_is_done_to_its_end(pinned: FakeCacheService, tmp_path: Path, option: list[str]) -> None:
    """The first line that was not read ended it: some were unpinned, and nothing said so."""
    done = kvtier(tmp_path, "unpin", "--all", *option)
    assert [each.pinned for each in pinned.prompts.values()] == [False] * 4
    assert (done.returncode, b"Exception" in done.stderr) == (0, False), done.stderr


def test_an_apply_is_sent(daemon: FakeCacheService, tmp_path: Path) -> None:
    """It ended before anything was sent."""
    (tmp_path / "prompts.yaml").write_text("prompts: [{name: a, system: x}, {name: b, text: y}]")
    done = kvtier(tmp_path, "apply", "-f", "prompts.yaml", "--url", "http://127.0.0.1:9")
    assert sorted(daemon.prompts) == ["a", "b"]
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_failure_stays_one(daemon: FakeCacheService, tmp_path: Path) -> None:
    assert kvtier(tmp_path, "ready", "-l", "no=such").returncode == 1
    assert kvtier(tmp_path, "show", "typo").returncode == 1


@pytest.mark.parametrize(
    "command",
    ["list", "list --json", "show p0", "status", "export-config", "top", "top --json", "watch", "watch --json"],
)
def test_what_only_reads_ends_well(pinned: FakeCacheService, tmp_path: Path, command: str) -> None:
    """`top` and `watch`, which have no end, end with their reader."""
    done = kvtier(tmp_path, *command.split())
    assert (done.returncode, done.stderr) == (0, b"")
