"""Why a unix socket cannot be reached, in words that name the remedy."""

import errno
import os
import socket
from pathlib import Path

_PROBE_TIMEOUT_S = 1.0


def socket_problem(path: Path) -> str | None:
    """Try to connect; return None when something listens, else what is wrong and what to do about it."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(_PROBE_TIMEOUT_S)
            probe.connect(str(path))
    except OSError as exc:
        return explain(path, exc)
    return None


def explain(path: Path, exc: OSError) -> str:
    """Turn what `connect` said about `path` into reason and remedy."""
    match exc.errno:
        case errno.ENOENT:
            return (
                f"no such file; start `kvtier-daemon`, or name its socket with $KVTIER_SOCKET or "
                f'"socket" in kv_connector_extra_config (containers: mount the folder {path.parent})'
            )
        case errno.EACCES | errno.EPERM:
            return (
                f"permission denied for uid {os.getuid()}; run vLLM and kvtier-daemon as one user, or let that uid "
                f"into {path.parent} and write to the socket"
            )
        case errno.ECONNREFUSED:
            return "connection refused, nothing listens there; start `kvtier-daemon`"
        case _:
            return f"{exc.strerror or exc}; check the path"
