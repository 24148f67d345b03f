"""Daemon and engine in mount and network namespaces of their own, as in two containers, with only what they must share.

Containers without docker: `unshare`, and bind mounts of one folder of the "node" each for the socket and the arenas.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier._pb.cache_pb2 import PinRequest, PromptStatus
from kvtier.client.admin import AdminClient
from kvtier.config import DaemonConfig
from tests.fakes.daemon_process import START_DEADLINE_S, daemon_command, daemon_process
from tests.fakes.scripted_engine import config_in
from tests.fakes.waiting import wait_for
from tests.unit.deployment.contained_engine import KEYS

_ROOT = Path(__file__).parents[3]
_UNSHARE = ["unshare", "--mount", "--net", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
_FOLDERS = ("socket", "arena", "disk")


def can_unshare() -> bool:
    """Return whether namespaces may be made here."""
    try:
        done = subprocess.run([*_UNSHARE, "true"], capture_output=True, timeout=START_DEADLINE_S, check=False)
    except OSError:
        return False
    return done.returncode == 0


pytestmark = pytest.mark.skipif(not can_unshare(), reason="this machine lets us make no namespaces")


class Node:
    """A machine whose containers see `pod`, where the node's folders are mounted."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.pod = folder / "node", folder / "pod"
        for name in _FOLDERS:
            for parent in (self.folder, self.pod):
                (parent / name).mkdir(parents=True, mode=0o700)
        self.config = self._config(folder)

    def _config(self, folder: Path) -> DaemonConfig:
        config = config_in(folder)
        return replace(
            config,
            server=replace(config.server, socket=self.pod / "socket" / "d.sock"),
            host=replace(config.host, arena_dir=self.pod / "arena"),
            disk=replace(config.disk, disk_dir=self.pod / "disk"),
        )

    def in_container(self, mounts: Sequence[str], *command: str) -> list[str]:
        """Return a command that runs another in a container with these folders mounted, and nothing else writable."""
        binds = [f"mount --bind '{self.folder / name}' '{self.pod / name}'" for name in mounts]
        steps = [*binds, "mount -o remount,bind,ro /", 'exec "$@"']
        return [*_UNSHARE, "sh", "-c", " && ".join(steps), "sh", *command]

    def run(self, mounts: Sequence[str], *command: str) -> "subprocess.CompletedProcess[str]":
        """Run a command in a container to its end."""
        return subprocess.run(
            self.in_container(mounts, *command),
            cwd=_ROOT, capture_output=True, text=True, timeout=START_DEADLINE_S, check=False,
        )  # fmt: skip

    def engine(self, mounts: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        """Run the scripted engine."""
        module = "tests.unit.deployment.contained_engine"
        return self.run(mounts, sys.executable, "-m", module, str(self.config.server.socket))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    with daemon_process(node.in_container(_FOLDERS, *daemon_command(node.config)), tmp_path / "log"):
        yield node


def test_an_engine_in_another_container_stores_and_loads(node: Node) -> None:
    with AdminClient(node.folder / "socket" / "d.sock") as client:
        client.pin(PinRequest(name="p", tokens=range(80)))
        done = node.engine(["socket", "arena"])
        assert (done.returncode, done.stdout) == (0, f"{len(KEYS)}\n"), done.stderr
        wait_for(lambda: client.get("p").state == PromptStatus.DURABLE, START_DEADLINE_S)
        wait_for(lambda: not client.status().sessions, START_DEADLINE_S)
    assert not any((node.pod / "socket").iterdir()), "the test sees what its own namespace has"
    assert any((node.folder / "disk" / "packs").iterdir())


def test_a_container_cannot_write_elsewhere(node: Node, tmp_path: Path) -> None:
    """Else the tests above would not show that daemon and engine get along with a read-only image."""
    assert "Read-only file system" in node.run(["socket"], "touch", str(tmp_path / "x")).stderr


def test_without_the_arenas_mount_the_engine_cannot_and_the_doctor_says_why(node: Node) -> None:
    with AdminClient(node.folder / "socket" / "d.sock") as client:
        client.pin(PinRequest(name="p", tokens=range(80)))
    done = node.engine(["socket"])
    assert done.returncode != 0
    assert f"{node.pod / 'arena'}" in done.stderr
    doctor = "from kvtier.cli.app import main; main()"
    arguments = ["--socket", str(node.config.server.socket), "doctor", "--json", "--python", "/bin/false"]
    done = node.run(["socket"], sys.executable, "-c", doctor, *arguments)
    found = {finding["id"]: finding for finding in json.loads(done.stdout)}
    assert found["daemon.answers"]["status"] == "ok"
    assert found["host.arena_dir"]["status"] == "fail"
    assert "under the same path" in found["host.arena_dir"]["remedy"]
    assert found["disk.dir"]["status"] == "skipped"
