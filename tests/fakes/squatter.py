"""`python -m tests.fakes.squatter PATH UID`: another user's process at the daemon's socket; prints what it is sent.

It answers like the beginning of an HTTP/2 server, so that a client that trusts it goes on. Root only: it is another
user's by setuid after its start, for that user may not read this interpreter's files.
"""

import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

OTHER_UID = 65534
_SETTINGS_FRAME = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_ROOT = Path(__file__).parents[2]


class Squatter:
    """What the process was sent, once it has ended."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self._received: bytes | None = None

    def received(self) -> bytes:
        """End the process; return every byte that any client has sent it."""
        if self._received is None:
            self._received, _ = self._process.communicate(b"", timeout=30)
        return self._received


@contextmanager
def squatting(path: Path, uid: int = OTHER_UID) -> Iterator[Squatter]:
    """Listen at `path` as `uid`; the folder, if there is none, belongs to that user."""
    command = [sys.executable, "-m", "tests.fakes.squatter", str(path), str(uid)]
    process = subprocess.Popen(command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    squatter = Squatter(process)
    assert process.stdout is not None
    try:
        assert process.stdout.read(1) == b"+", "it does not listen"
        yield squatter
    finally:
        squatter.received()


def _serve(path: Path) -> None:
    """Take in what comes until stdin ends, then what has been sent until then."""
    path.parent.mkdir(mode=0o755, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0o777)
        listener.listen()
        os.write(1, b"+")
        clients: dict[int, socket.socket] = {}
        while True:
            ready, _, _ = select.select([listener.fileno(), *clients, 0], [], [])
            for number in set(ready) & set(clients):
                if not _take_in(clients[number]):
                    clients.pop(number).close()
            if listener.fileno() in ready:
                client, _ = listener.accept()
                clients[client.fileno()] = client
                with suppress(OSError):
                    client.send(_SETTINGS_FRAME)
            elif ready == [0]:
                return


def _take_in(client: socket.socket) -> bool:
    """Pass on what a client has sent; False when it has gone."""
    received = b""
    with suppress(OSError):
        received = client.recv(1 << 16)
    os.write(1, received)
    return bool(received)


if __name__ == "__main__":
    os.setgroups([])
    os.setgid(int(sys.argv[2]))
    os.setuid(int(sys.argv[2]))
    os.umask(0o022)
    _serve(Path(sys.argv[1]))
