"""Folder, file system and memory of the host tier."""

import os
import resource
from pathlib import Path

from kvtier.config import HostConfig
from kvtier.config.units import available_bytes, filesystem_bytes, format_size, physical_memory_bytes
from kvtier.doctor.mounts import Mount, mount_of
from kvtier.doctor.report import CheckResult, fail, ok, skipped, warn
from kvtier.folders import folder_problem, is_folder_of

MEMORY_KINDS = ("tmpfs", "ramfs", "hugetlbfs")
COMFORTABLE_RATIO = 0.75
_GPU_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
_LARGER_TMPFS = (
    "name a larger tmpfs with host.arena_dir (mount -o remount,size=; docker: --shm-size; Kubernetes: sizeLimit)"
)


def check_host_memory(host: HostConfig) -> list[CheckResult]:
    """Check the host tier; needs no daemon."""
    has_gpu = any(device.exists() for device in _GPU_DEVICES)
    return [
        check_arena_dir(host.arena_dir),
        check_arena_file_system(mount_of(host.arena_dir)),
        check_arena_space(host),
        check_memory(host.host_bytes, physical_memory_bytes()),
        check_memlock(host.host_bytes, resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], has_gpu=has_gpu),
    ]


def check_arena_dir(folder: Path) -> CheckResult:
    """Check that the daemon can use the folder."""
    problem = folder_problem(folder)
    if problem:
        return fail("host.arena_dir", f"{folder}: {problem}", "set host.arena_dir, or --arena-dir, to such a folder")
    return ok("host.arena_dir", str(folder))


def check_shared_arena_dir(folder: Path, daemon_pid: int) -> CheckResult:
    """Check that the folder of a daemon in another container is mounted here, because an engine here needs it."""
    if not is_folder_of(folder, daemon_pid):
        remedy = "mount it where vLLM runs, under the same path: all KV bytes pass through it"
        return fail("host.arena_dir", f"the daemon's {folder} is not here, or another folder is", remedy)
    return ok("host.arena_dir", f"the daemon's {folder} is here too")


def check_arena_file_system(mount: Mount | None) -> CheckResult:
    """Judge the file system of the arenas."""
    if mount is None:
        return skipped("host.file_system", "the kernel does not list the file systems here")
    found = f"{mount.kind} at {mount.point}"
    if mount.kind not in MEMORY_KINDS:
        remedy = (
            "set host.arena_dir to a folder on a tmpfs like /dev/shm; other file systems write host memory to a disk"
        )
        return warn("host.file_system", found, remedy)
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


def check_memory(host_bytes: int, memory_bytes: int) -> CheckResult:
    """Compare `host.bytes` with the memory that processes here may use."""
    found = f"host.bytes = {format_size(host_bytes)} of {format_size(memory_bytes)} of memory"
    if host_bytes > memory_bytes:
        return fail(
            "host.memory", found, "lower host.bytes, or raise the container's limit: the OOM killer would end processes"
        )
    if host_bytes > COMFORTABLE_RATIO * memory_bytes:
        return warn("host.memory", found, "leave a quarter to vLLM, the page cache and the daemon: lower host.bytes")
    return ok("host.memory", found)


def check_memlock(host_bytes: int, soft_limit: int, *, has_gpu: bool) -> CheckResult:
    """Compare `host.bytes` with RLIMIT_MEMLOCK: an engine on a GPU locks the arena's pages for its copies."""
    if not has_gpu:
        return skipped("host.memlock", "no GPU here, so no process locks memory")
    if soft_limit == resource.RLIM_INFINITY:
        return ok("host.memlock", "unlimited")
    found = f"{format_size(soft_limit)} may be locked by a process started here"
    if soft_limit < host_bytes and os.geteuid() != 0:
        remedy = (
            "raise it where vLLM starts: LimitMEMLOCK=infinity in its unit, docker: --ulimit memlock=-1, or ulimit -l"
        )
        return warn("host.memlock", f"{found}, host.bytes = {format_size(host_bytes)}", remedy)
    return ok("host.memlock", found)
