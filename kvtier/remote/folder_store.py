"""A store in a folder that hosts share, such as a network file system. One lock file orders conditional writes."""

import asyncio
import errno
import fcntl
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from kvtier.concurrency.pauses import POLL_S
from kvtier.concurrency.tasks import Tasks
from kvtier.disk.files.file_ops import FileOps
from kvtier.errors import RemoteMissingError, RemoteRefusedError, RemoteStoreError, RemoteUnavailableError
from kvtier.fsync import fsync_directory
from kvtier.remote.base import ObjectInfo, SmallObject, Version, check_small
from kvtier.remote.daemon_threads import DaemonThreads

T = TypeVar("T")

_TEMPORARY = ".tmp"
_TEMPORARY_S = 7 * 86400.0
"""Age of one that no host writes any longer, even if clocks are wrong by days."""
_LOCK = ".lock"
_CALL_S, _LOCK_S = 30.0, 20.0
"""Of a call, and of it the wait for the lock: a server that is gone, and a host that hangs, are noticed."""
_NAME_S = 600.0
"""Of the call that has a bundle's last bytes written."""
_CLOSE_S = 2.0
"""How long the end waits for files of broken writes to be removed; a later write removes what is left of them."""
_MAX_CALLS = 32
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK)


class FolderStore:
    """See RemoteStore. A file that is not an object has a name that begins with a dot.

    The folder itself is never made: a missing one is on a file system that is not mounted, and one made in its place
    would be an empty store that no other host sees.

    Every write goes to a file of its own, is fsynced, and gets its name then; so an object is whole or not there.
    """

    def __init__(self, url: str) -> None:
        self._url, self._folder = url, Path("/" + url.removeprefix("file://").lstrip("/"))
        self._threads, self._removing = DaemonThreads("kvtier-folder", _MAX_CALLS), Tasks()

    @property
    def url(self) -> str:
        """See RemoteStore."""
        return self._url

    async def get(self, key: str) -> SmallObject | None:
        """See RemoteStore."""

        def read() -> SmallObject | None:
            try:
                with self._path(key).open("rb") as file:
                    found = os.fstat(file.fileno())
                    check_small(key, found.st_size)
                    return SmallObject(data=file.read(found.st_size), version=_version(found))
            except FileNotFoundError:
                return None

        return await self._call(f"read {key}", read)

    async def get_range(self, key: str, start: int, end: int) -> bytes:
        """See RemoteStore."""

        def read() -> bytes:
            buffer = memoryview(bytearray(end - start))
            try:
                with self._path(key).open("rb", buffering=0) as file:
                    return bytes(buffer[: FileOps().read_all(file.fileno(), [buffer], start)])
            except FileNotFoundError as exc:
                raise RemoteMissingError(self._url, key) from exc

        return await self._call(f"read {key}", read)

    async def head(self, key: str) -> ObjectInfo | None:
        """See RemoteStore."""

        def look() -> ObjectInfo | None:
            found = self._look(key)
            return _info(key, found) if found is not None else None

        return await self._call(f"look at {key}", look)

    async def put_new(self, key: str, data: bytes) -> Version | None:
        """See RemoteStore."""
        return await self._call(f"write {key}", lambda: self._write_if(key, data, None))

    async def swap(self, key: str, data: bytes, replaces: Version) -> Version | None:
        """See RemoteStore."""
        return await self._call(f"write {key}", lambda: self._write_if(key, data, replaces))

    async def put_stream(self, key: str, pieces: AsyncIterator[bytes]) -> None:
        """See RemoteStore."""
        path = await self._call(f"write {key}", self._temporary)
        try:
            async for piece in pieces:
                await self._call(f"write {key}", lambda data=piece: _append(path, data))  # type: ignore[misc]
            await self._call(f"write {key}", lambda: self._name(path, key), limit_s=_NAME_S)
        except (Exception, asyncio.CancelledError):
            # Not waited for: the server may be gone, and the stop of the daemon cancels.
            self._removing.start("folder-remove", self._remove(path))
            raise

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """See RemoteStore."""
        for info in await self._call(f"list {prefix}", lambda: list(self._objects(self._folder / prefix, prefix))):
            yield info

    async def delete(self, key: str) -> None:
        """See RemoteStore."""
        await self._call(f"delete {key}", lambda: self._path(key).unlink(missing_ok=True))

    async def close(self) -> None:
        """See RemoteStore."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await self._removing.join()
        await self._removing.close()

    async def _remove(self, path: Path) -> None:
        """Remove the file of a write that broke; where that fails too, `_temporary` does it later."""
        with suppress(RemoteStoreError):
            await self._call(f"delete {path.name}", lambda: path.unlink(missing_ok=True))

    def _path(self, key: str) -> Path:
        return self._folder / key

    def _objects(self, folder: Path, prefix: str) -> Iterator[ObjectInfo]:
        try:
            entries = list(os.scandir(folder))
        except FileNotFoundError:
            return
        for entry in entries:
            if entry.name.startswith("."):
                continue
            with suppress(FileNotFoundError):  # deleted meanwhile
                if entry.is_dir():
                    yield from self._objects(Path(entry.path), f"{prefix}{entry.name}/")
                else:
                    yield _info(prefix + entry.name, entry.stat())

    def _write_if(self, key: str, data: bytes, replaces: Version | None) -> Version | None:
        """Write if the object is this version, or not there; under the lock, which no other writer ignores."""
        with self._locked():
            if self._version_of(key) != replaces:
                return None
            path = self._temporary()
            try:
                _append(path, data)
                is_written = self._name(path, key, is_new=replaces is None)
            finally:
                path.unlink(missing_ok=True)
            return self._version_of(key) if is_written else None

    def _version_of(self, key: str) -> Version | None:
        found = self._look(key)
        return _version(found) if found is not None else None

    def _look(self, key: str) -> os.stat_result | None:
        """Open and look: on NFS a `stat` of a path is answered from what this host saw of it up to a minute ago."""
        try:
            with self._path(key).open("rb", buffering=0) as file:
                return os.fstat(file.fileno())
        except FileNotFoundError:
            return None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fd = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._wait_for_lock(fd)
            yield
        finally:
            os.close(fd)

    def _wait_for_lock(self, fd: int) -> None:
        """Lock; TimeoutError if another host keeps the lock, which it does for a moment only unless it hangs."""
        end_s = time.monotonic() + _LOCK_S
        while not _try_lock(fd):
            if time.monotonic() >= end_s:
                problem = f"a host holds {self._folder / _LOCK} for more than {_LOCK_S:.0f} s; end its daemon"
                raise TimeoutError(errno.ETIMEDOUT, problem)
            time.sleep(POLL_S / 20)

    def _temporary(self) -> Path:
        """Make a file of its own, and remove those that hosts left when they were killed."""
        folder = self._folder / _TEMPORARY
        folder.mkdir(exist_ok=True, mode=0o700)
        for left in folder.iterdir():
            with suppress(FileNotFoundError):  # another host was faster
                if left.stat().st_mtime < time.time() - _TEMPORARY_S:
                    left.unlink()
        path = folder / secrets.token_hex(16)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        return path

    def _name(self, path: Path, key: str, *, is_new: bool = False) -> bool:
        """Give a written file its name, durably; False: it is to be a new one, and there is one."""
        with path.open("rb") as file:
            os.fsync(file.fileno())
        target = self._path(key)
        made = [parent for parent in target.parents if not parent.exists()]
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not is_new:
            path.rename(target)
        elif not _link(path, target):
            return False
        for folder in {target.parent, *(each.parent for each in made)}:
            fsync_directory(folder)
        return True

    async def _call(self, action: str, call: Callable[[], T], *, limit_s: float = _CALL_S) -> T:
        def call_if_there() -> T:
            if not self._folder.is_dir():
                problem = f"there is no folder {self._folder}; mount its file system, or make it once with mkdir"
                raise FileNotFoundError(errno.ENOENT, problem)
            return call()

        try:
            return await self._threads.run(call_if_there, limit_s)
        except PermissionError as exc:
            raise RemoteRefusedError(self._url, action, str(exc.strerror)) from exc
        except OSError as exc:
            raise RemoteUnavailableError(self._url, action, str(exc.strerror or exc)) from exc


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _link(path: Path, target: Path) -> bool:
    """Give a file another name too; False: another file has it, as the file server says, whatever this host has seen.

    Without links, as on some network file systems, what the caller has seen counts.
    """
    try:
        os.link(path, target)
    except FileExistsError:
        return False
    except OSError as exc:
        if exc.errno not in _NO_LINKS:
            raise
        path.rename(target)
    return True


def _append(path: Path, data: bytes) -> None:
    with path.open("r+b") as file:  # it is there, unless its writer has removed it meanwhile
        file.seek(0, os.SEEK_END)
        file.write(data)


def _version(found: os.stat_result) -> Version:
    """Every write makes another file, so what names a file names a version."""
    return Version(f"{found.st_ino}-{found.st_mtime_ns}-{found.st_size}")


def _info(key: str, found: os.stat_result) -> ObjectInfo:
    return ObjectInfo(
        key=key, num_bytes=found.st_size, version=_version(found), modified_unix_s=found.st_mtime_ns / 1e9
    )
