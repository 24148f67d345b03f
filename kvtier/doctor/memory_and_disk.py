"""Folders, file systems and space of the host tier and of the disk tier."""

import errno
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvtier._pb.cache_pb2 import KeyUsage
from kvtier.config import DiskConfig, HostConfig
from kvtier.config.units import (
    available_bytes,
    filesystem_bytes,
    format_size,
    machine_memory_bytes,
    physical_memory_bytes,
)
from kvtier.doctor.report import CheckResult, fail, ok, skipped, warn
from kvtier.errors import ConfigError
from kvtier.folders import existing_parent, folder_problem, is_folder_of
from kvtier.sealing import load_key_ring

MOUNT_TABLE = Path("/proc/self/mountinfo")
_OCTAL = re.compile(r"\\([0-7]{3})")
_MEMORY_KINDS = ("tmpfs",)  # not hugetlbfs, which has no write(2), nor ramfs, which has no size
_VOLATILE = ("tmpfs", "ramfs")
_LAYERED = ("overlay", "aufs")
_NETWORKED = ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "virtiofs", "afs", "gfs2", "glusterfs")
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)
_LARGER_TMPFS = (
    "name a larger tmpfs with host.arena_dir (mount -o remount,size=; docker: --shm-size; Kubernetes: sizeLimit)"
)


class Mount(NamedTuple):
    """Where a file system is mounted, and the kernel's name of it: `ext4`, `tmpfs`, `fuse.sshfs`."""

    point: Path
    kind: str


def mount_of(path: Path, table: Path = MOUNT_TABLE) -> Mount | None:
    """Return the file system of a path that exists or is to be created; None when the kernel does not list it.

    Source: proc_pid_mountinfo(5). Of several mounts at one point the last one hides the others.
    """
    place, found = existing_parent(path).resolve(), None
    try:
        lines = table.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        before, _, after = line.partition(" - ")
        # Blanks and the like in a path are written as \040.
        point = Path(_OCTAL.sub(lambda match: chr(int(match[1], 8)), before.split()[4]))
        if place.is_relative_to(point) and (found is None or len(point.parts) >= len(found.point.parts)):
            found = Mount(point, after.split()[0])
    return found


def check_host_memory(host: HostConfig) -> list[CheckResult]:
    """Check the host tier; needs no daemon."""
    return [
        check_arena_dir(host.arena_dir),
        check_arena_file_system(mount_of(host.arena_dir)),
        check_arena_space(host),
        check_memory(host.host_bytes, physical_memory_bytes(), machine_memory_bytes()),
    ]


def check_arena_dir(folder: Path) -> CheckResult:
    if problem := folder_problem(folder):
        return fail("host.arena_dir", f"{folder}: {problem}", "set host.arena_dir, or --arena-dir, to such a folder")
    return ok("host.arena_dir", str(folder))


def check_shared_arena_dir(folder: Path, daemon_pid: int) -> CheckResult:
    """Check that the folder of a daemon in another container is mounted here, because an engine here needs it."""
    if not is_folder_of(folder, daemon_pid):
        remedy = "mount it where vLLM runs, under the same path: all KV bytes pass through it"
        return fail("host.arena_dir", f"the daemon's {folder} is not here, or another folder is", remedy)
    return ok("host.arena_dir", f"the daemon's {folder} is here too")


def check_arena_file_system(mount: Mount | None) -> CheckResult:
    if mount is None:
        return skipped("host.file_system", "the kernel does not list the file systems here")
    found = f"{mount.kind} at {mount.point}"
    if mount.kind not in _MEMORY_KINDS:
        why = "other file systems write host memory to a disk"
        return warn("host.file_system", found, f"set host.arena_dir to a folder on a tmpfs like /dev/shm; {why}")
    return ok("host.file_system", found)


def check_arena_space(host: HostConfig) -> CheckResult:
    """Compare `host.bytes` with its file system; kvtier's own files count as free space."""
    size_bytes, free_bytes = filesystem_bytes(host.arena_dir), available_bytes(host.arena_dir)
    found = f"{format_size(free_bytes)} of {format_size(size_bytes)} for host.bytes = {format_size(host.host_bytes)}"
    if host.host_bytes > size_bytes:
        return fail("host.space", found, f"lower host.bytes, or {_LARGER_TMPFS}")
    if host.host_bytes > free_bytes:
        return warn("host.space", found, f"free other files there, lower host.bytes, or {_LARGER_TMPFS}")
    return ok("host.space", found)


def check_memory(host_bytes: int, memory_bytes: int, machine_bytes: int) -> CheckResult:
    """Compare `host.bytes` with the memory that processes here may use; less than the machine's: the container's."""
    found = f"host.bytes = {format_size(host_bytes)} of {format_size(memory_bytes)} of memory"
    if host_bytes > memory_bytes:
        remedy = "lower host.bytes, or raise the container's limit: the OOM killer would end processes"
        return fail("host.memory", found, remedy)
    if memory_bytes < machine_bytes:
        if host_bytes > 0.85 * memory_bytes:
            return warn("host.memory", found, "leave a seventh to the daemon and its page cache: lower host.bytes")
    elif host_bytes > 0.75 * memory_bytes:
        return warn("host.memory", found, "leave a quarter to vLLM, the page cache and the daemon: lower host.bytes")
    return ok("host.memory", found)


def check_disk(disk: DiskConfig, keys_in_use: Sequence[KeyUsage] = ()) -> list[CheckResult]:
    """Check the disk tier; needs no daemon. `keys_in_use`: those of a daemon that runs."""
    return [
        check_disk_dir(disk.disk_dir),
        check_disk_file_system(mount_of(disk.disk_dir)),
        check_disk_space(disk),
        check_direct_reads(disk.disk_dir),
        check_key_file(disk.key_file, keys_in_use),
    ]


def check_key_file(path: Path | None, in_use: Sequence[KeyUsage] = ()) -> CheckResult:
    """Check that the file can be used, and has every key that a running daemon needs again after a restart."""
    needed = {key.name: key.num_bytes for key in in_use if key.name and (key.num_bytes or key.writes)}
    if path is None:
        if needed:
            found = f"off in the settings that are read here, and the daemon has keys: {', '.join(needed)}"
            return warn("disk.key_file", found, "run this with the daemon's settings, and restart it with these only")
        return ok("disk.key_file", "off: nothing is encrypted")
    try:
        ring = load_key_ring(path)
    except ConfigError as error:
        return fail("disk.key_file", str(error), "see docs/encryption.md")
    already = {key.name for key in in_use if key.is_missing}  # of these the daemon's own check says it
    if lacking := [name for name in needed if name not in ring.by_name and name not in already]:
        sizes = ", ".join(f"{name} ({format_size(needed[name])} of packs)" for name in lacking)
        remedy = "put its line back before the daemon restarts: those packs would be misses, and a pin refuse the start"
        return fail("disk.key_file", f"{path} lacks what the daemon has and uses: {sizes}", remedy)
    return ok("disk.key_file", f"{path}: {', '.join(ring.by_name)}; the first writes")


def check_disk_dir(folder: Path) -> CheckResult:
    if problem := folder_problem(folder):
        remedy = "set disk.dir, or --disk-dir, to a folder that the daemon may write"
        return fail("disk.dir", f"{folder}: {problem}", remedy)
    return ok("disk.dir", str(folder))


def check_disk_file_system(mount: Mount | None) -> CheckResult:
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
        if exc.errno not in _NO_DIRECT or not _has_unnamed_files(existing_parent(folder)):
            return skipped("disk.direct_reads", f"cannot be tested: {exc.strerror}")
        found = "the file system does not support O_DIRECT, so reads fill the page cache"
        return warn("disk.direct_reads", found, "use ext4 or xfs on a local disk if you read from disk often")
    os.close(fd)
    return ok("disk.direct_reads", "O_DIRECT is supported")


def _has_unnamed_files(folder: Path) -> bool:
    """Return whether its file system knows O_TMPFILE, which some network file systems do not."""
    try:
        os.close(os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600))
    except OSError:
        return False
    return True
