"""Checks which user listens at the daemon's socket before the first byte is sent, and keeps the check valid later.

gRPC dials a path, and dials it again by itself whenever the connection breaks. So a check of the path would say nothing
about the socket that is dialed after it. Here the socket's inode is opened, checked, and dialed as /proc/self/fd/N: one
inode belongs to one listening socket. A daemon that restarts binds another inode, which is checked as the first was.
"""

import errno
import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

import grpc

from kvtier.client.address import DAEMON_UID_VARIABLE, SOCKET_VARIABLE
from kvtier.errors import START_DAEMON, DaemonUnreachableError, UntrustedSocketError
from kvtier.folders import exposure, trusted_uids

_CONNECT_TIMEOUT_S = 1.0
_MAX_MESSAGE_BYTES = 256 * 1024**2
"""A prompt of a million tokens is 5 MB, its recipe as much again; the daemon has a bound of its own for requests."""
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
    # A target is the number of a descriptor: what another client used under that number is another socket. And global
    # subchannels keep their back-off across channels.
    ("grpc.use_local_subchannel_pool", 1),
)
_UCRED = struct.Struct("3i")  # struct ucred: pid, uid, gid

PeerUid = Callable[[socket.socket], int]


def peer_uid(connection: socket.socket) -> int:
    """Return the uid of the process that listens, as the kernel noted it at listen(): SO_PEERCRED of unix(7)."""
    return _credentials(connection)[1] & 0xFFFFFFFF


def listener_pid(path: Path) -> int | None:
    """Return the process that listens; None when that cannot be found out, as in another pid namespace."""
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_TIMEOUT_S)
        probe.connect(str(path))
        return _credentials(probe)[0] or None
    return None


def _credentials(connection: socket.socket) -> tuple[int, ...]:
    return _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))


def is_stopped(pid: int | None) -> bool:
    """Return whether a signal or a debugger has stopped the process; False when that cannot be seen."""
    with suppress(OSError, IndexError):
        # proc_pid_stat(5): the state follows the name, which may have any characters.
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] in ("T", "t")
    return False


class TrustedSocket:
    """The inode of a socket whose folders and listener are trusted; owns a descriptor until `close`.

    Attributes:
        inode_path: Leads to this inode and to no other.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self._path, self._fd = path, fd
        self.inode_path = f"/proc/self/fd/{fd}"

    def channel(self) -> grpc.Channel:
        """Return a channel to the listener, which the caller closes first."""
        return grpc.insecure_channel(f"unix:{self.inode_path}", options=_CHANNEL_OPTIONS)

    def is_current(self) -> bool:
        """Return whether the path still leads to this inode. A daemon that has restarted made another."""
        with suppress(OSError):
            return os.path.samestat(self._path.stat(), os.fstat(self._fd))
        return False

    def close(self) -> None:
        """Close the descriptor; `inode_path` leads nowhere then."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_trusted(path: Path, daemon_uid: int | None, peer_uid: PeerUid = peer_uid) -> TrustedSocket:
    """Connect once, without sending anything, and return the socket when it may be talked to.

    Trusted are our own uid, root's and `daemon_uid`: each folder above the socket has to belong to one of them and be
    writable for no one else (or sticky, as /tmp is), and one of them has to listen.

    Raises:
        OSError: Nothing can be reached there.
        UntrustedSocketError: Another user owns, or may write to, a folder above the socket, or listens there.
    """
    trusted = trusted_uids(daemon_uid)
    for folder in dict.fromkeys((path.parent, Path(os.path.realpath(path)).parent)):
        if found := exposure(folder, trusted):
            raise UntrustedSocketError(path, found.problem, found.uid, trusted, found.remedy or _remedy(found.uid))
    opened = TrustedSocket(path, os.open(path, os.O_PATH | os.O_CLOEXEC))
    try:
        uid = _listener(opened, peer_uid)
    except BaseException:
        opened.close()
        raise
    if uid not in trusted:
        opened.close()
        raise UntrustedSocketError(path, f"uid {uid} listens there", uid, trusted, _remedy(uid))
    return opened


def _listener(opened: TrustedSocket, peer_uid: PeerUid) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_TIMEOUT_S)
        try:
            probe.connect(opened.inode_path)
        except FileNotFoundError as exc:  # the inode is open, so it is the way to it that is missing
            raise OSError(errno.ENOSYS, "/proc is not mounted, and sockets are checked by way of it") from exc
        return peer_uid(probe)


def _remedy(uid: int) -> str:
    return (
        f"when your daemon runs as uid {uid}, set {DAEMON_UID_VARIABLE}={uid} (--daemon-uid, in vLLM daemon_uid); else "
        f"look into who that is, and name your daemon's socket with {SOCKET_VARIABLE}"
    )


def unreachable(path: Path, exc: OSError, how_to_start: str = START_DAEMON) -> DaemonUnreachableError:
    """Return the error for what `open_trusted` raised for a path: why no daemon answers there, and what to do."""
    remedy = how_to_start
    match exc.errno:
        case errno.EACCES | errno.EPERM:
            problem = f"permission denied: {_owner(path)}, you are uid {os.geteuid()}"
            remedy = "run as that user, or join the group that its daemon has as server.group (docs/two-users.md)"
        case errno.EMFILE | errno.ENFILE:
            problem = "this process may open no more files"
            remedy = "raise its limit: ulimit -n"
        case errno.ENOENT | errno.ENOTDIR:
            problem = "there is no such socket"
        case errno.ECONNREFUSED if not path.is_socket():
            problem = "that is not a socket"
        case errno.ECONNREFUSED:
            problem = "no process listens on that socket; the daemon has died or is starting"
        case _:
            problem = exc.strerror or str(exc)
    return DaemonUnreachableError(str(path), problem, remedy)


def _owner(path: Path) -> str:
    for place in (path, *path.parents):
        try:
            return f"{place} belongs to uid {place.stat().st_uid}"
        except OSError:
            continue
    return f"{path} belongs to another user"
