"""The folders of the daemon, the lock on each, and a stale socket at its path."""

import errno
import fcntl
import logging
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

from kvtier.config import DaemonConfig, ServerConfig
from kvtier.daemon.private_files import check_owner, mend_modes, own_folders
from kvtier.errors import AlreadyRunningError, ConfigError, TierIOError
from kvtier.folders import LOCK_NAME, folder_problem, group_problem, passage_problem, socket_folder_problem
from kvtier.host.arena import ARENA_PREFIX
from kvtier.host.group_access import open_passage
from kvtier.host.session_locks import SESSION_LOCK_PREFIX
from kvtier.obs.log import log_event

logger = logging.getLogger(__name__)

_START = "start"
_PROBE_TIMEOUT_S = 1.0


@contextmanager
def claimed(config: DaemonConfig) -> Iterator[None]:
    """Prepare and lock the folders, then the path of the socket; unlink the socket at the end.

    Raises:
        AlreadyRunningError: Another daemon has the lock of disk.dir.
        ConfigError: A folder or the socket cannot be used, another daemon uses it, or a file is another user's.
        TierIOError: A lock file cannot be opened.
    """
    disk_dir, arena_dir, path = config.disk.disk_dir, config.host.arena_dir, config.server.socket
    prepare_folder("disk.dir", disk_dir)
    prepare_folder("host.arena_dir", arena_dir)
    prepare_socket_folder(path.parent)
    own = own_folders(config)
    with ExitStack() as stack:
        stack.enter_context(locked(disk_dir))
        if arena_dir == disk_dir:
            raise ConfigError("host.arena_dir", str(arena_dir), _START, "is disk.dir too; name two folders")
        # A start takes over or unlinks the arenas in the folder, which no running daemon may own.
        stack.enter_context(_locked_file(arena_dir / LOCK_NAME, ("host.arena_dir", arena_dir, "--arena-dir")))
        stack.enter_context(locked_socket(path))
        mend_modes(config, own)  # with the locks: the files of a running daemon are its own to judge
        share_folders(config.server, arena_dir)
        if remove_stale_socket(path):
            log_event(logger, "stale_socket_removed", socket=path)
        try:
            yield
        finally:
            with suppress(OSError):
                path.unlink()


def prepare_folder(key: str, folder: Path) -> None:
    """Create the folder of a setting with mode 0700, or check that an existing one is safe to use.

    The mode of an existing folder does not change here: it may be /tmp or /dev/shm, named by mistake. `mend_modes`
    changes it where only kvtier uses the folder.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(key, str(folder), _START, f"cannot be created: {exc.strerror}; name another folder") from exc
    if problem := folder_problem(folder):
        raise ConfigError(key, str(folder), _START, problem)


def prepare_socket_folder(folder: Path) -> None:
    """Do the same for the folder of the socket, into which only we and root may put another socket."""
    if problem := socket_folder_problem(folder):
        raise ConfigError("server.socket", str(folder), _START, problem)
    prepare_folder("server.socket", folder)


def share_folders(server: ServerConfig, arena_dir: Path) -> None:
    """Let members of `server.group` pass through the folders of socket and arenas; without it, no longer.

    Raises:
        ConfigError: We are not in the group, or its members could not reach, or could replace, what is there.
    """
    socket = server.socket
    own_names = {socket.name, _lock_of(socket).name, LOCK_NAME}

    def is_own_file(name: str) -> bool:
        return name in own_names or name.startswith((ARENA_PREFIX, SESSION_LOCK_PREFIX))

    if server.gid is not None and (problem := group_problem(server.gid)):
        raise ConfigError("server.group", server.group, _START, problem)
    folders = (("server.socket", socket.parent), ("host.arena_dir", arena_dir))
    for key, folder in folders:  # before any of them is changed
        if server.gid is not None and (problem := passage_problem(folder, server.gid, server.group, above_only=True)):
            raise ConfigError(key, str(folder), _START, problem)
    for key, folder in folders:
        try:
            open_passage(folder, server.gid, is_own_file)
        except OSError as exc:
            problem = f"cannot be given {folder}: {exc.strerror}; have the daemon run with the group, and not as root"
            raise ConfigError("server.group", server.group, _START, problem) from exc
        if server.gid is not None and (problem := passage_problem(folder, server.gid, server.group)):
            raise ConfigError(key, str(folder), _START, problem)


def locked(folder: Path) -> AbstractContextManager[Path]:
    """Lock the folder of the disk tier with a lock file that holds our pid (if the file system has space for it).

    The lock is flock's, so the kernel releases it when the process dies for any reason. The file stays: if it were
    unlinked, two daemons could lock two files of one name. Raises as `claimed`.
    """
    return _locked_file(folder / LOCK_NAME)


def locked_socket(path: Path) -> AbstractContextManager[Path]:
    """Lock the path of a socket: from before the check for another daemon until the socket is unlinked.

    Two daemons with different folders would otherwise both find that no daemon answers yet. gRPC unlinks an existing
    socket before it binds, so both would serve, and clients would reach the later one only. Raises as `claimed`.
    """
    return _locked_file(_lock_of(path), ("server.socket", path, "--socket"))


def _lock_of(socket: Path) -> Path:
    return socket.with_name(f".{socket.name}.lock")


@contextmanager
def _locked_file(path: Path, setting: tuple[str, Path, str] | None = None) -> Iterator[Path]:
    """Lock a file; `setting` has key, value and flag of what is locked, if another than disk.dir."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as exc:
        with suppress(OSError):
            check_owner(setting[0] if setting is not None else "disk.dir", path)  # names the remedy
        raise TierIOError(path, "open the lock", exc) from exc
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            text = os.pread(fd, 32, 0).decode(errors="replace").strip()
            pid = int(text) if text.isdigit() else None
            if setting is None:
                raise AlreadyRunningError(path, pid) from exc
            key, value, flag = setting
            who = f"the daemon with pid {pid}" if pid else "another daemon"
            problem = f"{who} uses it; stop that one, or give this one another with {flag}"
            raise ConfigError(key, str(value), _START, problem) from exc
        except OSError as exc:
            raise TierIOError(path, "lock", exc) from exc
        with suppress(OSError):  # a full file system; the pid only makes another daemon's error plainer
            os.truncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield path
    finally:
        os.close(fd)


def remove_stale_socket(path: Path) -> bool:
    """Unlink the socket of a previous daemon; True when there was one. The caller holds the lock of the socket.

    gRPC unlinks any existing socket before it binds, even that of a running daemon, so this checks first.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISSOCK(mode):
        problem = "exists and is not a socket; remove it, or choose another path with --socket"
        raise ConfigError("server.socket", str(path), _START, problem)
    if _answers(path):
        problem = "another daemon answers there; stop it, or give this one another path with --socket"
        raise ConfigError("server.socket", str(path), _START, problem)
    with suppress(FileNotFoundError):
        path.unlink()
    return True


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_TIMEOUT_S)
        try:
            probe.connect(str(path))
        except OSError as exc:
            # Only "refused" proves that no process listens; a full backlog (EAGAIN) or a lack of permission does not.
            return exc.errno not in (errno.ECONNREFUSED, errno.ENOENT)
        return True
