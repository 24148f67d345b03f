"""May a folder be ours? What the daemon asks before it starts, and the doctor without changing anything."""

import os
import stat
from pathlib import Path

LOCK_NAME = "daemon.lock"
"""In each folder of a daemon: what it holds a lock on while it runs; its pid stands there."""


def folder_problem(folder: Path) -> str | None:
    """Return what keeps the daemon from using a folder, with the remedy; None when nothing does.

    Changes nothing. A folder that does not exist is judged by the parent in which it would be made.

    Args:
        folder: Absolute path.
    """
    try:
        mode = folder.stat().st_mode
    except FileNotFoundError:
        return _missing_problem(folder)
    except OSError as exc:
        return f"cannot be looked at: {exc.strerror}; name another folder"
    if not stat.S_ISDIR(mode):
        return "is not a folder; remove it, or name another"
    if mode & stat.S_IWOTH:
        return f"any user may write there; name a folder of its own, for example {folder / 'kvtier'}"
    return _writing_problem(folder)


def is_folder_of(folder: Path, pid: int) -> bool:
    """Return whether a running daemon uses this very folder, and not another of that name in its own container.

    Args:
        folder: Absolute path.
        pid: The daemon's, as it knows it itself.
    """
    try:
        return (folder / LOCK_NAME).read_text().strip() == str(pid)
    except (OSError, UnicodeDecodeError):
        return False


def existing_parent(path: Path) -> Path:
    """Return the path itself, or the nearest folder above it that exists."""
    return next(place for place in (path, *path.parents) if _exists(place))


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except PermissionError:  # a folder above it may not be searched
        return False


def _missing_problem(folder: Path) -> str | None:
    parent = existing_parent(folder)
    if not parent.is_dir():
        return f"cannot be created: {parent} is not a folder; name another folder"
    problem = _writing_problem(parent)
    return f"cannot be created: {parent} {problem}" if problem else None


def _writing_problem(folder: Path) -> str | None:
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        return "is on a read-only file system; mount it writable"
    if not os.access(folder, os.W_OK | os.X_OK):
        owner = folder.stat().st_uid
        return f"uid {os.getuid()} may not write there (it belongs to uid {owner}); name another folder"
    return None
