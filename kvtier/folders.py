"""May a folder be ours, and who else can change it? Asked by daemon, clients and doctor; changes nothing."""

import errno
import os
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

LOCK_NAME = "daemon.lock"
"""In each folder of a daemon: what it holds a lock on while it runs; its pid stands there."""

_ACL = "system.posix_acl_access"

_OVERFLOW_UID = Path("/proc/sys/kernel/overflowuid")
_UID_MAP = Path("/proc/self/uid_map")


@dataclass(frozen=True, kw_only=True)
class Exposure:
    """A folder of user `uid` through which another user could put a socket of its own in place of ours.

    The problem names the folder; the remedy is empty when the folder is simply another user's.
    """

    uid: int
    problem: str
    remedy: str = ""


def trusted_uids(other: int | None = None) -> frozenset[int]:
    """Return the uids that may own what we rely on: our own, root's, and `other`."""
    return frozenset({os.geteuid(), 0} if other is None else {os.geteuid(), 0, other})


def exposure(folder: Path, trusted: Collection[int]) -> Exposure | None:
    """Return the first folder on the way to `folder`, itself included, that is not safe; None: all are.

    Safe is what belongs to a trusted uid and is writable for no other user. A sticky folder may be: there only a
    file's owner may move it. What does not exist yet, or may not be looked at, is passed over.

    Args:
        folder: Absolute path. Symbolic links on the way are looked at as what they are and as where they lead.
        trusted: See `trusted_uids`.
    """
    owners, real = {*trusted, *_unmapped_uid()}, Path(os.path.realpath(folder))
    way = [*reversed(folder.parents), folder, *reversed(real.parents), real]
    for place in dict.fromkeys(way):
        try:
            facts = place.lstat()
        except OSError:
            continue
        if facts.st_uid not in owners:
            return Exposure(uid=facts.st_uid, problem=f"{place} belongs to uid {facts.st_uid}")
        if stat.S_ISDIR(facts.st_mode) and _others_may_replace(facts, owners):
            mode = f"uid {facts.st_uid}, mode {stat.S_IMODE(facts.st_mode):04o}"
            return Exposure(
                uid=facts.st_uid,
                problem=f"other users may write to {place} ({mode})",
                remedy=f"run chmod go-w {place} (or +t, if many share it like /tmp), or use a socket in another folder",
            )
    return None


def socket_folder_problem(folder: Path) -> str | None:
    """Return what keeps the daemon from binding its socket in a folder (absolute), with the remedy; None: nothing."""
    if found := exposure(folder, trusted_uids()):
        remedy = found.remedy or f"run as that user, or name a folder of uid {os.geteuid()} or root"
        return f"{found.problem}, who could replace the socket; {remedy}"
    return folder_problem(folder)


def group_problem(gid: int) -> str | None:
    """Return what keeps this process from giving files to a group, with the remedy; None: nothing."""
    if os.geteuid() == 0 or gid in (os.getegid(), *os.getgroups()):
        return None
    return (
        f"uid {os.geteuid()} is not in group {gid}, so the daemon cannot give it anything; run `usermod -aG {gid} "
        "USER` and start it from a new login (systemd: SupplementaryGroups=, Docker: group_add, Kubernetes: "
        "supplementalGroups)"
    )


def is_private_folder(folder: Path) -> bool:
    """Return whether a folder is ours and for us alone, as the daemon makes its own."""
    facts = folder.stat()
    return facts.st_uid == os.geteuid() and stat.S_IMODE(facts.st_mode) == stat.S_IRWXU


def passage_problem(folder: Path, gid: int, group: str, *, above_only: bool = False) -> str | None:
    """Return what keeps members of a group from reaching a file in a folder (absolute), or lets them replace it.

    The folder and each above it has to be passable for the group and writable for no member. One with an access control
    list is not judged: that may let them pass. With `above_only` the folder itself is not judged.
    """
    real = Path(os.path.realpath(folder))
    for place in (*reversed(real.parents), *([] if above_only else [real])):
        try:
            facts = place.stat()
        except OSError:
            continue
        mode = stat.S_IMODE(facts.st_mode)
        shown = f"{place} (uid {facts.st_uid}, gid {facts.st_gid}, mode {mode:04o})"
        by_group = facts.st_gid == gid
        if by_group and mode & stat.S_IWGRP and not mode & stat.S_ISVTX:
            return f"members of group {group} could replace files in {shown}; run `chmod g-w {place}`"
        if not mode & (stat.S_IXGRP if by_group else stat.S_IXOTH) and not _has_acl(place):
            remedy = "name a folder elsewhere, for example below /run or /dev/shm"
            if place == real:
                remedy = f"run `chgrp {gid} {place}` and `chmod 0710 {place}`, or name a folder of its own"
            return f"members of group {group} may not pass through {shown}; {remedy}"
    return None


def _has_acl(place: Path) -> bool:
    try:
        os.getxattr(place, _ACL)
    except OSError as exc:
        return exc.errno == errno.EACCES
    return True


def _others_may_replace(facts: os.stat_result, trusted: Collection[int]) -> bool:
    if facts.st_mode & stat.S_ISVTX:
        return False
    # A group with a user's own number is that user's alone, by the convention of user private groups (umask 002).
    by_group = facts.st_mode & stat.S_IWGRP and facts.st_gid not in trusted
    return bool(facts.st_mode & stat.S_IWOTH or by_group)


def _unmapped_uid() -> Iterator[int]:
    """Yield the uid as which root's folders show in a user namespace that does not know root; see user_namespaces(7).

    Others who are not known there show as the same. They cannot listen in our stead: that uid is no trusted listener.
    """
    try:
        overflow = int(_OVERFLOW_UID.read_text())
        known = [[int(number) for number in line.split()] for line in _UID_MAP.read_text().splitlines()]
    except (OSError, ValueError):
        return
    if not any(first <= overflow < first + count for first, _, count in known):
        yield overflow


def folder_problem(folder: Path) -> str | None:
    """Return what keeps the daemon from using a folder (absolute), with the remedy; None: nothing.

    A folder that does not exist is judged by the parent in which it would be made.
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
    """Say whether the daemon of this pid, as it knows it, uses this very folder, and not one of a container's own.

    Of another user's daemon (`server.group`) the file with the pid may only be looked at from outside.
    """
    try:
        if (folder / LOCK_NAME).stat().st_uid not in (os.geteuid(), 0) and not os.access(folder / LOCK_NAME, os.R_OK):
            return True
        return (folder / LOCK_NAME).read_text().strip() == str(pid)
    except (OSError, UnicodeDecodeError):
        return False


def existing_parent(path: Path) -> Path:
    """Return the path itself, or the nearest folder above it that exists."""
    return next(place for place in (path, *path.parents) if _exists(place))


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a folder above it may not be searched, or the name is too long
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
