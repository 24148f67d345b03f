"""Sizes and addresses as people write them, and what this machine has."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kvtier.core.loopback import is_loopback_host
from kvtier.folders import existing_parent

_UNITS = {
    "": 1, "B": 1,
    "KIB": 1024, "MIB": 1024**2, "GIB": 1024**3, "TIB": 1024**4,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip
_SIZE = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([A-Za-z]*)")
_PERCENT = re.compile(r"\s*([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*%\s*")
_ADDRESS = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:\s\[\]]+)):([0-9]{1,5})")
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def parse_size(text: str) -> int:
    """Return the bytes of "64GiB", "512 MiB", "1.5TB" or "1048576". ValueError: says how sizes are written."""
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise ValueError('not a size; write bytes, or a number with a unit like "64GiB" or "512MiB"')
    # Not through a float, which has no odd number beyond 2**53.
    return int(match[1]) * unit if match[1].isdigit() else int(float(match[1]) * unit)


def parse_percent(text: str) -> float | None:
    """Return 0.25 for "25%", None when the text is no percentage. ValueError: more than all."""
    match = _PERCENT.fullmatch(text)
    if match and float(match[1]) > 100:
        raise ValueError('must be at most "100%"')
    return float(match[1]) / 100 if match else None


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of "127.0.0.1:9464" or "[::1]:9464". ValueError: says how addresses are written."""
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match[3]) > 65535:
        raise ValueError(
            'must be host:port with a port up to 65535, like "127.0.0.1:9464" or "[::1]:9464" ("0.0.0.0:9464" '
            'for every interface), or "off"'
        )
    return match[1] or match[2], int(match[3])


def is_loopback(address: str) -> bool:
    """Return whether only this host reaches "127.0.0.1:9464". Names but `localhost` may lead anywhere."""
    return is_loopback_host(parse_address(address)[0])


def format_size(num_bytes: float) -> str:
    """Return the size for people, in binary units with three digits: "1.50 GiB"."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    if unit == "B":
        return f"{int(size)} B"
    digits = 2 if size < 10 else 1 if size < 100 else 0
    return f"{size:.{digits}f} {unit}"


def machine_memory_bytes() -> int:
    """Return the memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def physical_memory_bytes() -> int:
    """Return the memory that this process may have: the machine's, or that of its container or service if it is less.

    Each cgroup that the process is in has a limit, and those above it count too. Source: cgroups(7).
    """
    limit_bytes = machine_memory_bytes()
    for path in _cgroup_limits():
        with suppress(OSError, ValueError):  # not there, or "max"
            limit_bytes = min(limit_bytes, int(path.read_text()))
    return limit_bytes


def _cgroup_limits() -> Iterator[Path]:
    """Yield the files, of both versions, that may have a limit of this process, from its own cgroup to the root."""
    try:
        lines = _OWN_CGROUPS.read_text().splitlines()
    except OSError:
        lines = []
    for line in [*lines, "0::/", "0:memory:/"]:
        _, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if ".." in Path(name).parts:  # outside of the cgroups that are mounted here
            continue
        if controllers and "memory" not in controllers.split(","):
            continue
        root, file = (_CGROUPS / "memory", "memory.limit_in_bytes") if controllers else (_CGROUPS, "memory.max")
        own = root / name.lstrip("/")
        yield from (folder / file for folder in (own, *own.parents) if folder.is_relative_to(root))


def available_bytes(folder: Path) -> int:
    """Return the free bytes of the folder's file system plus what the folder's own files take.

    Without the second part an automatic limit would shrink at every restart by what kvtier already holds.
    """
    used = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                # Blocks, not st_size: arenas are sparse until touched.
                used += os.lstat(os.path.join(root, name)).st_blocks * 512  # noqa: PTH118 (a Path per pack is slow)
    return shutil.disk_usage(existing_parent(folder)).free + used


def filesystem_bytes(folder: Path) -> int:
    """Return the size of the file system on which the folder lies, or will lie."""
    return shutil.disk_usage(existing_parent(folder)).total
