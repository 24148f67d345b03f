"""`python -m tests.fakes.intruder SOCKET ARENA LOCK DISK`: what this user can do to a daemon's files, as JSON.

Each attempt is named, with "done" or the errno that refused it. None of them leaves anything changed that was there.
"""

import errno
import fcntl
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path


def attempts(address: Path, arena: Path, lock: Path, disk: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield what is tried, in order."""
    folder = address.parent
    yield "connect", lambda: _connected(address)
    yield "list socket folder", lambda: list(folder.iterdir())
    yield "list arena folder", lambda: list(arena.parent.iterdir())
    yield "list disk folder", lambda: list(disk.iterdir())
    yield "read ledger", lambda: os.open(disk / "ledger.sqlite", os.O_RDONLY)
    yield "map arena", lambda: os.open(arena, os.O_RDWR)
    yield "hold session", lambda: fcntl.flock(os.open(lock, os.O_RDONLY), fcntl.LOCK_SH | fcntl.LOCK_NB)
    yield "write session lock", lambda: os.open(lock, os.O_WRONLY)
    yield "hold daemon's lock", lambda: os.open(arena.parent / "daemon.lock", os.O_RDONLY)
    yield "hold socket's lock", lambda: os.open(folder / f".{address.name}.lock", os.O_RDONLY)
    yield "rename socket", lambda: address.rename(folder / "moved")
    yield "remove socket", address.unlink
    yield "put another socket", lambda: socket.socket(socket.AF_UNIX).bind(str(folder / "another"))
    yield "move the folder", lambda: folder.rename(folder.with_name("moved"))
    yield "remove arena", arena.unlink
    yield "put another arena", lambda: os.open(arena.parent / "arena-another", os.O_RDWR | os.O_CREAT)
    yield "change modes", lambda: arena.chmod(0o666)


def _connected(address: Path) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(address))


def main() -> None:
    """Try everything."""
    outcomes: dict[str, str] = {}
    for name, attempt in attempts(*map(Path, sys.argv[1:])):
        try:
            attempt()
            outcomes[name] = "done"
        except OSError as exc:
            outcomes[name] = errno.errorcode[exc.errno or 0]
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
