"""Session locks: slots come back when no process holds the lock, never by time."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.errors import TierIOError
from kvtier.host.session_locks import SessionLock

HOLDER = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
fcntl.flock(fd, fcntl.LOCK_SH)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_lock_no_process_took_is_released_and_its_path_is_gone(tmp_path: Path) -> None:
    lock = SessionLock.create(tmp_path / "locks", "s1")
    assert lock.path == tmp_path / "locks" / "session-s1.lock"
    assert lock.path.stat().st_mode & 0o777 == 0o600
    assert lock.released()
    assert not lock.path.exists()
    assert lock.released()


def test_each_holder_counts_and_asking_disturbs_none(tmp_path: Path) -> None:
    lock = SessionLock.create(tmp_path, "s1")
    fds = [os.open(lock.path, os.O_RDWR) for _ in range(2)]
    for fd in fds:
        fcntl.flock(fd, fcntl.LOCK_SH)
    assert not lock.released()
    os.close(fds[0])
    assert not lock.released()
    assert lock.path.exists()
    os.close(fds[1])
    assert lock.released()


def test_a_killed_holder_releases_it_and_a_living_one_does_not(tmp_path: Path) -> None:
    lock = SessionLock.create(tmp_path, "s1")
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(lock.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert not lock.released()
        holder.kill()
        holder.wait()
        assert lock.released()


def test_an_opener_that_comes_late_sees_a_file_without_a_name(tmp_path: Path) -> None:
    """It opened the path before the daemon unlinked it, and locks it after: then the inode has no links."""
    lock = SessionLock.create(tmp_path, "s1")
    fd = os.open(lock.path, os.O_RDWR)
    assert lock.released()
    fcntl.flock(fd, fcntl.LOCK_SH)
    assert os.fstat(fd).st_nlink == 0
    os.close(fd)


def test_a_session_id_is_used_once(tmp_path: Path) -> None:
    SessionLock.create(tmp_path, "s1")
    with pytest.raises(TierIOError, match="cannot create"):
        SessionLock.create(tmp_path, "s1")


def test_close_takes_the_path_from_a_held_lock(tmp_path: Path) -> None:
    lock = SessionLock.create(tmp_path, "s1")
    fd = os.open(lock.path, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_SH)
    lock.close()
    lock.close()
    assert not lock.path.exists()
    os.close(fd)
