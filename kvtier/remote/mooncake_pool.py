"""A pool in Mooncake Store, `mooncake://MASTER:PORT/prefix`. Its client runs in a process of its own.

Why not in the daemon: it is a C++ library with some 30 threads that writes to stderr and may abort; its calls have no
time limit (a master that is stopped holds `get` for ever), and one that hangs ends with its process only (ADR 34). See
`mooncake_process`.
"""

import asyncio
import contextlib
import importlib.util
import os
import socket
import struct
import sys
from urllib.parse import urlsplit

from kvtier.errors import RemoteRefusedError, RemoteUnavailableError

PACKAGE = "mooncake-transfer-engine-non-cuda"
REQUEST = struct.Struct("<IBHI")
"""Number of the call, operation, bytes of the key, bytes of the data."""
ANSWER = struct.Struct("<IiI")
"""Number of the call (0: the start), Mooncake's code, bytes of the data."""
GET, PUT, DELETE = 1, 2, 3
NO_OBJECT = -704
_CALL_S, _START_S, _END_S = 5.0, 20.0, 2.0
_MAX_CALLS = 8
Bytes = bytes | bytearray
_CODES = {
    -200: "it is full: what it holds is pinned or in use; give it more memory",
    -600: "it refuses the key or the length",
    -800: "no host that holds its memory answers",
    -900: "its master does not answer",
}


class MooncakePool:
    """See RemotePool. Objects are pinned softly, for a day: they are evicted last, and evicted if they must."""

    def __init__(self, url: str) -> None:
        """Prepare; nothing is asked yet. RemoteRefusedError: the client is not installed."""
        if importlib.util.find_spec("mooncake") is None:
            raise RemoteRefusedError(url, "be used", f"install {PACKAGE} into the daemon's environment")
        parts = urlsplit(url)
        self._url, self._master = url, parts.netloc
        self._prefix = f"{parts.path.strip('/') or 'kvtier'}/"
        self._client: _Client | None = None
        self._starting, self._turns = asyncio.Lock(), asyncio.Semaphore(_MAX_CALLS)
        self._num_failures = 0  # of the client: what waited meanwhile fails too, and not one after the other

    @property
    def url(self) -> str:
        """See RemotePool."""
        return self._url

    async def get(self, key: str) -> Bytes | None:
        """See RemotePool."""
        code, data = await self._call(GET, f"read {key}", key)
        return None if code == NO_OBJECT else data

    async def put(self, key: str, data: bytes) -> None:
        """See RemotePool."""
        await self._call(PUT, f"write {key}", key, data)

    async def delete(self, prefix: str) -> None:
        """See RemotePool."""
        await self._call(DELETE, f"delete {prefix}", prefix)

    async def close(self) -> None:
        """See RemotePool."""
        async with self._starting:
            await self._end_client()

    async def _call(self, operation: int, action: str, key: str, data: bytes = b"") -> tuple[int, Bytes]:
        num_failures = self._num_failures
        async with self._turns:
            client = await self._running(action, num_failures)
            try:
                async with asyncio.timeout(_CALL_S):
                    code, answer = await client.call(operation, (self._prefix + key).encode(), data)
            except (TimeoutError, OSError, EOFError) as exc:
                self._num_failures += 1
                if self._client is client:  # a call that hangs ends with its process only
                    await self._end_client()
                raise RemoteUnavailableError(self._url, action, str(exc) or f"no answer in {_CALL_S:.0f} s") from exc
        if code < 0 and code != NO_OBJECT:
            raise RemoteUnavailableError(self._url, action, _CODES.get(code, f"Mooncake's error {code}"))
        return code, answer

    async def _running(self, action: str, num_failures: int) -> "_Client":
        """Return the client, which is started if need be.

        Args:
            num_failures: When the call began to wait.

        Raises:
            RemoteUnavailableError: It does not start, or has failed since.
        """
        async with self._starting:
            if self._num_failures != num_failures:
                raise RemoteUnavailableError(self._url, action, "its client has failed meanwhile")
            if self._client is not None and not self._client.has_ended:
                return self._client
            await self._end_client()
            client = self._client = _Client()
            try:
                async with asyncio.timeout(_START_S):
                    code = await client.start(self._master)
            except (TimeoutError, OSError, EOFError) as exc:
                self._num_failures += 1
                await self._end_client()
                raise RemoteUnavailableError(self._url, action, f"its client does not start ({exc})") from exc
            except BaseException:
                await self._end_client()
                raise
            if code != 0:
                self._num_failures += 1
                await self._end_client()
                raise RemoteUnavailableError(self._url, action, _CODES.get(code, f"Mooncake's error {code}"))
            return client

    async def _end_client(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.end()


class _Client:
    """The process, and calls that wait for its answers."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._socket: socket.socket | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[tuple[int, Bytes]]] = {}
        self._last_number = 0
        self._writing = asyncio.Lock()
        self._is_cut = False

    @property
    def has_ended(self) -> bool:
        """It answers no call any longer."""
        return (self._is_cut and not self._writing.locked()) or self._reading is None or self._reading.done()

    async def start(self, master: str) -> int:
        """Start it; return Mooncake's code. Raises OSError or EOFError."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = (sys.executable, "-m", "kvtier.remote.mooncake_process", str(theirs.fileno()), master)
            quiet = {"GLOG_minloglevel": "3", "MC_LOG_LEVEL": "ERROR"} | os.environ
            self._process = await asyncio.create_subprocess_exec(
                *command, pass_fds=(theirs.fileno(),), env=quiet, stdin=asyncio.subprocess.DEVNULL
            )
        ours.setblocking(False)
        self._socket = ours
        started: asyncio.Future[tuple[int, Bytes]] = asyncio.get_running_loop().create_future()
        self._waiting[0] = started
        self._reading = asyncio.create_task(self._read(ours), name="mooncake-answers")
        return (await started)[0]

    async def call(self, operation: int, key: bytes, data: bytes) -> tuple[int, Bytes]:
        """Return Mooncake's code, and what it gave. Raises OSError or EOFError: the process has ended."""
        if self.has_ended or self._socket is None:
            raise EOFError("its client has ended")
        self._last_number += 1
        number = self._last_number
        answer: asyncio.Future[tuple[int, Bytes]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            async with self._writing:
                if self._is_cut:
                    raise EOFError("its client has ended")
                self._is_cut = True  # if this is cancelled, what was sent is half a call
                loop = asyncio.get_running_loop()
                await loop.sock_sendall(self._socket, REQUEST.pack(number, operation, len(key), len(data)) + key)
                await loop.sock_sendall(self._socket, data)
                self._is_cut = False
            return await answer
        finally:
            self._waiting.pop(number, None)

    async def _read(self, connection: socket.socket) -> None:
        try:
            while True:
                number, code, num_bytes = ANSWER.unpack(await _received(connection, ANSWER.size))
                data = await _received(connection, num_bytes)
                waiting = self._waiting.get(number)
                if waiting is not None and not waiting.done():
                    waiting.set_result((code, data))
        except (OSError, EOFError):
            pass
        finally:
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(EOFError("its client has ended"))

    async def end(self) -> None:
        """End the process; calls that wait fail."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            try:
                async with asyncio.timeout(_END_S):  # it ends when its connection does
                    await self._process.wait()
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()


async def _received(connection: socket.socket, num_bytes: int) -> bytearray:
    """Receive this number of bytes; a stream of asyncio copies them three times. Raises OSError or EOFError."""
    data, loop = bytearray(num_bytes), asyncio.get_running_loop()
    rest = memoryview(data)
    while rest:
        num_received = await loop.sock_recv_into(connection, rest)
        if not num_received:
            raise EOFError("its client has ended")
        rest = rest[num_received:]
    return data
