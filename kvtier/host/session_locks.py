"""When may slots of a lost session be used again? When no process holds the session's lock file any longer.

Every process of an engine holds a shared flock on the file while it may touch slots of the session. The kernel drops it
when the process is gone, and not before: a stopped (SIGSTOP) engine keeps it. Time never decides.
"""

import fcntl
import os
from pathlib import Path

from kvtier.errors import TierIOError
from kvtier.host.group_access import GROUP_MAY_READ, set_group_access

LOCK_SUFFIX = ".lock"
SESSION_LOCK_PREFIX = "session-"


class SessionLock:
    """The daemon's side of one session's lock file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, directory: Path, session_id: str, gid: int | None = None) -> "SessionLock":
        """Create `session-<session_id>.lock` (0600) in a directory, which is created (0700) when it is missing.

        The engine's processes have to reach the directory. A session id is never used again. With `gid` members of that
        group may read the file too (0640), which is enough to lock it.

        Raises:
            TierIOError: The file cannot be created, or exists.
        """
        path = directory / (SESSION_LOCK_PREFIX + session_id + LOCK_SUFFIX)
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                set_group_access(fd, gid, GROUP_MAY_READ)
            except OSError:
                path.unlink(missing_ok=True)
                raise
            finally:
                os.close(fd)
        except OSError as exc:
            raise TierIOError(path, "create", exc) from exc
        return cls(path)

    @classmethod
    def left_in(cls, directory: Path) -> "list[SessionLock]":
        """Return the locks that a previous daemon left; processes of its engines may hold them still."""
        return [cls(path) for path in sorted(directory.glob(SESSION_LOCK_PREFIX + "*" + LOCK_SUFFIX))]

    def released(self) -> bool:
        """Say whether no process holds the lock; then its path is gone too, and stays gone.

        The path is unlinked while the exclusive lock is held: a process that opens it later finds nothing, and one that
        had opened it before and locks it now sees, comparing inodes, that it has locked a file without a name.

        Raises:
            TierIOError: The operating system refused.
        """
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
        except OSError as exc:
            raise TierIOError(self.path, "open", exc) from exc
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.path.unlink(missing_ok=True)
        except BlockingIOError:
            return False
        except OSError as exc:
            raise TierIOError(self.path, "lock", exc) from exc
        finally:
            os.close(fd)
        return True

    def close(self) -> None:
        """Unlink the path, even if a process holds the lock: none joins this session any longer.

        Raises:
            TierIOError: The operating system refused.
        """
        try:
            self.path.unlink(missing_ok=True)
        except OSError as exc:
            raise TierIOError(self.path, "unlink", exc) from exc
