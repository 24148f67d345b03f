"""What clients and daemon agree on: where it listens, as whom, and the names in their protocol."""

import os
from pathlib import Path

from kvtier.errors import ConfigError

SOCKET_VARIABLE = "KVTIER_SOCKET"
DAEMON_UID_VARIABLE = "KVTIER_DAEMON_UID"
MAX_UID = 2**32 - 2
MAX_SOCKET_PATH_BYTES = 107
PROTOCOL_VERSION = 1
"""Of proto/kvtier/v1/engine.proto, in Hello."""
ERROR_NAME_KEY = "kvtier-error"
"""Trailing metadata of a call that failed: the class name of the error in `kvtier.errors`."""


def default_socket_path() -> Path:
    """Return the unix socket that daemon and clients use when no other is configured.

    `$KVTIER_SOCKET`, else `$XDG_RUNTIME_DIR/kvtier/daemon.sock`, else `/tmp/kvtier-<uid>/daemon.sock`.
    """
    if explicit := os.environ.get(SOCKET_VARIABLE):
        return Path(explicit)
    if runtime_dir := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime_dir) / "kvtier" / "daemon.sock"
    return Path("/tmp") / f"kvtier-{os.getuid()}" / "daemon.sock"


def usable_socket_path(path: Path | str) -> Path:
    """Return the path, absolute and with `~` as the home folder; ValueError says why no unix socket can be there."""
    try:
        usable = Path(path).expanduser().absolute()
        length = len(os.fsencode(usable))
    except RuntimeError as exc:
        raise ValueError("has no home folder for its ~; write the path in full") from exc
    except UnicodeEncodeError as exc:
        raise ValueError(f"is no path of this system: {exc.reason}; choose another") from exc
    if "\0" in str(usable):
        raise ValueError("has a NUL character, which no path can have; choose another")
    if length > MAX_SOCKET_PATH_BYTES:
        raise ValueError(
            f"the path has {length} bytes, a unix socket's at most {MAX_SOCKET_PATH_BYTES}; choose a shorter one, "
            f"for example /tmp/kvtier-{os.getuid()}/daemon.sock"
        )
    return usable


def default_daemon_uid() -> int | None:
    """Return `$KVTIER_DAEMON_UID`: as whom the daemon may run, besides us and root. None: as no one else."""
    if not (text := os.environ.get(DAEMON_UID_VARIABLE)):
        return None
    if not (text.isascii() and text.isdigit()) or len(text) > 10 or int(text) > MAX_UID:
        raise ConfigError(DAEMON_UID_VARIABLE, text[:80], "environment", "must be a uid, a whole number; `id -u NAME`")
    return int(text)


def channel_target(path: Path | str) -> str:
    """Return gRPC's name of a unix socket.

    The path is made absolute: gRPC resolves `unix:relative` against the working directory of the process that dials.
    """
    return f"unix:{Path(path).expanduser().absolute()}"
