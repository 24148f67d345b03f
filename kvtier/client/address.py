"""Where the daemon listens, as every client and the daemon itself see it."""

import os
from pathlib import Path

SOCKET_VARIABLE = "KVTIER_SOCKET"


def default_socket_path() -> Path:
    """Return the unix socket that daemon and clients use when nothing else is said.

    `$KVTIER_SOCKET`, else `$XDG_RUNTIME_DIR/kvtier/daemon.sock`, else `/tmp/kvtier-<uid>/daemon.sock`.
    """
    if explicit := os.environ.get(SOCKET_VARIABLE):
        return Path(explicit)
    if runtime_dir := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime_dir) / "kvtier" / "daemon.sock"
    return Path("/tmp") / f"kvtier-{os.getuid()}" / "daemon.sock"


def channel_target(path: Path | str) -> str:
    """Return gRPC's name of a unix socket.

    The path is made absolute: gRPC resolves `unix:relative` against the working directory of whoever dials.
    """
    return f"unix:{Path(path).expanduser().absolute()}"
