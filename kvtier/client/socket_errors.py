"""Why no daemon can be reached at a unix socket."""

import errno
import os
from pathlib import Path


def explain(path: Path, exc: OSError) -> str:
    """Turn what `open_trusted` raised for a path into a reason."""
    match exc.errno:
        case errno.EACCES | errno.EPERM:
            return f"permission denied: {_owner(path)}, you are uid {os.geteuid()}; run as that user"
        case errno.ENOENT | errno.ENOTDIR:
            return "there is no such socket"
        case errno.ECONNREFUSED if not path.is_socket():
            return "that is not a socket"
        case errno.ECONNREFUSED:
            return "no process listens on that socket; the daemon has died or is starting"
        case errno.EMFILE | errno.ENFILE:
            return "this process may open no more files; raise its limit: ulimit -n"
        case _:
            return exc.strerror or str(exc)


def _owner(path: Path) -> str:
    for place in (path, *path.parents):
        try:
            return f"{place} belongs to uid {place.stat().st_uid}"
        except OSError:
            continue
    return f"{path} belongs to another user"
