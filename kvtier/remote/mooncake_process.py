"""Mooncake's client, in a process of its own: `python -m kvtier.remote.mooncake_process FD MASTER`.

It reads calls from a socket and answers each when it is done, in any order. It ends when the socket does. The settings
of the client are those that Mooncake's own tools take from the environment.
"""

import importlib
import os
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvtier.remote.mooncake_pool import ANSWER, DELETE, GET, NO_OBJECT, PUT, REQUEST

_BUFFER_BYTES = 128 * 1024**2
_NUM_THREADS = 8
_PINNED_MS = 86_400_000
"""The longest that a master allows unless it is set."""
_ERROR = -1


class Calls:
    """Carries out what is asked, in threads."""

    def __init__(self, connection: socket.socket, module: Any, store: Any) -> None:
        self._connection, self._store = connection, store
        self._config = module.ReplicateConfig()
        self._config.soft_pin_action = module.SoftPinAction.ENABLE
        self._config.soft_pin_ttl_ms = _PINNED_MS
        self._answering = threading.Lock()

    def carry_out(self, number: int, operation: int, key: str, data: bytes) -> None:
        """Do it, and answer."""
        try:
            code, found = self._do(operation, key, data)
        except Exception:
            code, found = _ERROR, b""
        self.answer(number, code, found)

    def answer(self, number: int, code: int, data: bytes = b"") -> None:
        """Send an answer; the process ends if no one takes it."""
        try:
            with self._answering:
                self._connection.sendall(ANSWER.pack(number, code, len(data)))
                self._connection.sendall(data)
        except OSError:
            os._exit(1)

    def _do(self, operation: int, key: str, data: bytes) -> tuple[int, bytes]:
        if operation == PUT:
            return self._store.put(key, data, self._config), b""  # 0 also if there is one of this key, which stays
        if operation == DELETE:
            pattern = "^" + key.replace(".", "[.]")
            return min(0, self._store.remove_by_regex(pattern, True)), b""  # by force: readers hold it for seconds
        assert operation == GET
        found = self._store.get(key)
        if found:
            return 0, found
        exists = self._store.is_exist(key)  # `get` says the same when the master is gone
        return (exists if exists < 0 else NO_OBJECT), b""


def main() -> None:
    """Serve until the socket ends."""
    connection, master = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    module = importlib.import_module("mooncake.store")
    store = module.MooncakeDistributedStore()
    code = store.setup(
        os.environ.get("MOONCAKE_LOCAL_HOSTNAME") or _own_address(master),
        os.environ.get("MOONCAKE_TE_META_DATA_SERVER", "P2PHANDSHAKE"),
        0,  # a daemon lends the pool no memory: what it would hold would go with it
        _BUFFER_BYTES,
        os.environ.get("MOONCAKE_PROTOCOL", "tcp"),
        os.environ.get("MOONCAKE_DEVICE", ""),
        master,
    )
    calls = Calls(connection, module, store)
    calls.answer(0, code)
    stream = connection.makefile("rb")
    threads = ThreadPoolExecutor(_NUM_THREADS)
    while len(head := stream.read(REQUEST.size)) == REQUEST.size:
        number, operation, key_bytes, data_bytes = REQUEST.unpack(head)
        key, data = stream.read(key_bytes), stream.read(data_bytes)
        threads.submit(calls.carry_out, number, operation, key.decode(), data)
    os._exit(0)  # calls that hang do not hold it up


def _own_address(master: str) -> str:
    """Return this host's address, as the master's network sees it."""
    host, _, port = master.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))
        return str(probe.getsockname()[0])


if __name__ == "__main__":
    main()
