"""Kernel, limits and clock of the machine."""

import platform
import re
import resource
import time
from contextlib import suppress
from pathlib import Path

from kvtier.doctor.report import CheckResult, fail, ok, warn

MIN_KERNEL = (4, 18)
"""Kernel of the oldest distributions whose C library (glibc 2.28) runs the wheels of grpcio and numpy."""
MIN_OPEN_FILES = 1024


def check_machine(disk_dir: Path | None, started_unix_s: float = 0.0) -> list[CheckResult]:
    """Check kernel, open files and clock, by the daemon's folder and start time as far as they are known."""
    return [
        check_kernel(platform.system(), platform.release()),
        check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        check_clock(time.time(), disk_dir, started_unix_s),
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
