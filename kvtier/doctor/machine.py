"""Kernel, limits, clock and GPU driver of the machine."""

import platform
import re
import resource
import time
from contextlib import suppress
from pathlib import Path

from kvtier.doctor.report import CheckResult, fail, ok, skipped, warn

MIN_KERNEL = (4, 18)
"""Kernel of the oldest distributions whose C library (glibc 2.28) runs the wheels of grpcio and numpy."""
MIN_OPEN_FILES = 1024
MIN_NVIDIA_DRIVER = 570
"""The first of CUDA 12.8, below which the connector refuses to run; see `kvtier_connector.workers.cuda.cuda_device`."""
NVIDIA_DRIVER_FILE = Path("/proc/driver/nvidia/version")


def check_machine(disk_dir: Path | None, started_unix_s: float = 0.0) -> list[CheckResult]:
    """Check kernel, open files and clock, by the daemon's folder and start time as far as they are known."""
    return [
        check_kernel(platform.system(), platform.release()),
        check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        check_clock(time.time(), disk_dir, started_unix_s),
        check_nvidia_driver(NVIDIA_DRIVER_FILE),
    ]


def check_kernel(system: str, release: str) -> CheckResult:
    """Judge the kernel by the output of `uname`."""
    found = f"{system} {release}"
    version = re.match(r"(\d+)\.(\d+)", release)
    if system != "Linux" or version is None:
        return fail("machine.kernel", found, "run kvtier on Linux: arenas and session locks need tmpfs and flock")
    if (int(version[1]), int(version[2])) < MIN_KERNEL:
        oldest = ".".join(map(str, MIN_KERNEL))
        return warn("machine.kernel", found, f"use Linux {oldest} or later; kvtier is not tested on older")
    return ok("machine.kernel", found)


def check_open_files(soft_limit: int) -> CheckResult:
    """Judge RLIMIT_NOFILE, which the daemon inherits from the process that starts it."""
    shown = "unlimited" if soft_limit == resource.RLIM_INFINITY else str(soft_limit)
    if soft_limit != resource.RLIM_INFINITY and soft_limit < MIN_OPEN_FILES:
        remedy = f"raise it to {MIN_OPEN_FILES} or more: ulimit -n, LimitNOFILE= in a unit"
        return warn("machine.open_files", f"{shown} allowed for a process started here", remedy)
    return ok("machine.open_files", f"{shown} allowed for a process started here")


def check_nvidia_driver(file: Path) -> CheckResult:
    """Judge the kernel's driver by what it says of itself; CUDA's compatibility libraries may be newer."""
    try:
        text = file.read_text()
    except OSError:
        return skipped("machine.nvidia_driver", "no NVIDIA driver is loaded")
    version = re.search(r"Module\b.*?\b((\d+)\.\d[\d.]*)", text)
    if version is None:
        return skipped("machine.nvidia_driver", f"{file} names no version")
    if int(version[2]) < MIN_NVIDIA_DRIVER:
        remedy = f"install {MIN_NVIDIA_DRIVER} or later: with less than CUDA 12.8 vLLM does not start with kvtier"
        return warn("machine.nvidia_driver", version[1], remedy)
    return ok("machine.nvidia_driver", version[1])


def check_clock(now_unix_s: float, disk_dir: Path | None, started_unix_s: float) -> CheckResult:
    """Compare the wall clock with earlier times that it gave."""
    seen_unix_s = started_unix_s
    with suppress(OSError):
        seen_unix_s = max(seen_unix_s, (disk_dir / "ledger.sqlite").stat().st_mtime if disk_dir else 0.0)
    behind_s = seen_unix_s - now_unix_s
    if behind_s > 60:
        found = f"the clock is {behind_s:.0f} s behind the time of kvtier's last write"
        return warn("machine.clock", found, "set it (chronyc, timedatectl): pins with --ttl end by the wall clock")
    return ok("machine.clock", time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(now_unix_s)))
