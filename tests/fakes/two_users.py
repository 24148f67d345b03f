"""A daemon of one user and its group, as `server.group` has it, for tests with real users of this machine."""

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from kvtier.config import DaemonConfig
from tests.fakes.daemon_process import daemon_command, daemon_process
from tests.fakes.other_users import User, as_user, run_as
from tests.fakes.scripted_engine import config_in

CLI = "from kvtier.cli.app import main; main()"


@dataclass
class World:
    """Three users, a group with the first two, and a daemon's folders of the first."""

    daemon: User
    engine: User
    outsider: User
    group: str
    gid: int
    config: DaemonConfig

    @contextmanager
    def serving(self, log: str, **settings: str) -> Iterator[None]:
        """Run the daemon as its user."""
        settings = {"KVTIER_HTTP_LISTEN": "off", "KVTIER_SERVER_GROUP": self.group} | settings
        command = as_user(self.daemon, daemon_command(self.config), settings)
        with daemon_process(command, self.folder / log):
            yield

    @property
    def folder(self) -> Path:
        """Of all files of the test."""
        return self.config.server.socket.parent.parent

    def cli(self, user: User, *arguments: str, uid: int | None = None) -> tuple[int, str]:
        """Run the real command as a user; return its exit code, and all that it printed."""
        named = {"KVTIER_DAEMON_UID": str(self.daemon.uid if uid is None else uid)}
        command = (sys.executable, "-c", CLI, "--socket", str(self.config.server.socket), *arguments)
        done = run_as(user, *command, environment=named)
        return done.returncode, done.stdout + done.stderr

    def attempts(self, user: User) -> dict[str, str]:
        """Return what each attempt of a user on the daemon's files came to."""
        (arena,) = self.config.host.arena_dir.glob("arena-*")
        (lock,) = self.config.host.arena_dir.glob("session-*")
        paths = [str(path) for path in (self.config.server.socket, arena, lock, self.config.disk.disk_dir)]
        done = run_as(user, sys.executable, "-m", "tests.fakes.intruder", *paths)
        assert done.returncode == 0, done.stderr
        outcomes: dict[str, str] = json.loads(done.stdout)
        return outcomes


@contextmanager
def world_of(users: tuple[User, User, User, str, int], host_bytes: int = 4 << 20) -> Iterator[World]:
    """Folders as the daemon's user would have made them for itself: 0700."""
    folder = Path(tempfile.mkdtemp(prefix="kvtier-test-", dir="/tmp"))
    memory = Path(tempfile.mkdtemp(prefix="kvtier-test-", dir="/dev/shm"))
    config = config_in(folder)
    config = replace(
        config,
        server=replace(config.server, socket=folder / "run" / "d.sock"),
        host=replace(config.host, arena_dir=memory / "arena", host_bytes=host_bytes),
    )
    (folder / "arena").rmdir()
    for place in (config.server.socket.parent, config.host.arena_dir, config.disk.disk_dir):
        place.mkdir(mode=0o700, exist_ok=True)
        shutil.chown(place, users[0].uid, users[0].gid)
    for place in (folder, memory):
        place.chmod(0o755)
    try:
        yield World(*users, config)
    finally:
        for place in (folder, memory):
            shutil.rmtree(place)
