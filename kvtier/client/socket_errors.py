"""Error texts: why a unix socket cannot be reached, and the remedy."""

import errno
import os
from pathlib import Path


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
        case errno.EMFILE | errno.ENFILE:
            return "this process may open no more files; raise its limit: ulimit -n"
        case _:
            return f"{exc.strerror or exc}; check the path"
