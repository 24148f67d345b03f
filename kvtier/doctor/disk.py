"""Folder, file system and space of the disk tier."""

import errno
import os
from pathlib import Path

from kvtier.config import DiskConfig
from kvtier.config.units import available_bytes, format_size
from kvtier.doctor.mounts import Mount, mount_of
from kvtier.doctor.report import CheckResult, fail, ok, skipped, warn
from kvtier.folders import existing_parent, folder_problem

_VOLATILE = ("tmpfs", "ramfs")
_LAYERED = ("overlay", "aufs")
_NETWORKED = ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "virtiofs", "afs", "gfs2", "glusterfs")
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)


def check_disk(disk: DiskConfig) -> list[CheckResult]:
    """Check the disk tier; needs no daemon."""
    return [
        check_disk_dir(disk.disk_dir),
        check_disk_file_system(mount_of(disk.disk_dir)),
        check_disk_space(disk),
        check_direct_reads(disk.disk_dir),
    ]


def check_disk_dir(folder: Path) -> CheckResult:
    """Check that the daemon can use the folder."""
    if problem := folder_problem(folder):
        return fail(
            "disk.dir", f"{folder}: {problem}", "set disk.dir, or --state-dir, to a folder that the daemon may write"
        )
    return ok("disk.dir", str(folder))


def check_disk_file_system(mount: Mount | None) -> CheckResult:
    """Judge the file system of packs and ledger."""
    if mount is None:
        return skipped("disk.file_system", "the kernel does not list the file systems here")
    found = f"{mount.kind} at {mount.point}"
    if mount.kind in _VOLATILE:
        return warn("disk.file_system", f"{found}: emptied by a reboot", "set disk.dir to a folder on a disk")
    if mount.kind in _LAYERED:
        remedy = "mount a volume there: a container's own layer is removed with the container, and is slow"
        return warn("disk.file_system", found, remedy)
    if mount.kind in _NETWORKED or mount.kind.startswith("fuse"):
        remedy = "set disk.dir to a local disk: ledger (SQLite, WAL) and lock need its fsync and file locks"
        return warn("disk.file_system", found, remedy)
    return ok("disk.file_system", found)


def check_disk_space(disk: DiskConfig) -> CheckResult:
    """Compare `disk.bytes` and the reserve with the file system; kvtier's own files count as free space."""
    free_bytes = available_bytes(disk.disk_dir)
    found = (
        f"{format_size(free_bytes)} for disk.bytes = {format_size(disk.disk_bytes)} and "
        f"a reserve of {format_size(disk.reserve_bytes)}"
    )
    if free_bytes <= disk.reserve_bytes:
        return fail("disk.space", found, "free some space: nothing can be stored on disk")
    if free_bytes < disk.disk_bytes + disk.reserve_bytes:
        remedy = "lower disk.bytes, or free some space: an accepted pin may not become durable"
        return warn("disk.space", found, remedy)
    return ok("disk.space", found)


def check_direct_reads(folder: Path) -> CheckResult:
    """Open an unnamed temporary file with O_DIRECT; it is removed on return."""
    try:
        fd = os.open(existing_parent(folder), os.O_TMPFILE | os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        if exc.errno not in _NO_DIRECT:
            return skipped("disk.direct_reads", f"cannot be tested: {exc.strerror}")
        found = "the file system does not support O_DIRECT, so reads fill the page cache"
        return warn("disk.direct_reads", found, "use ext4 or xfs on a local disk if you read from disk often")
    os.close(fd)
    return ok("disk.direct_reads", "O_DIRECT is supported")
