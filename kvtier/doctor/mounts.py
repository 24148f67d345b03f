"""The file system that a path is on."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvtier.folders import existing_parent

MOUNT_TABLE = Path("/proc/self/mountinfo")
_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, kw_only=True)
class Mount:
    """One mounted file system.

    Attributes:
        point: Where it is mounted.
        kind: The kernel's name of it: `ext4`, `tmpfs`, `fuse.sshfs`.
    """

    point: Path
    kind: str


def mount_of(path: Path, table: Path = MOUNT_TABLE) -> Mount | None:
    """Return the file system of a path that exists or is to be created; None when the kernel does not list it.

    Source: proc_pid_mountinfo(5). Of several mounts at one point the last one hides the others.
    """
    place = existing_parent(path).resolve()
    try:
        mounts = list(_read(table))
    except OSError:
        return None
    above = [mount for mount in mounts if place.is_relative_to(mount.point)]
    deepest = max((len(mount.point.parts) for mount in above), default=0)
    return next((mount for mount in reversed(above) if len(mount.point.parts) == deepest), None)


def _read(table: Path) -> Iterator[Mount]:
    for line in table.read_text().splitlines():
        before, _, after = line.partition(" - ")
        # Blanks and the like in a path are written as \040.
        point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), before.split()[4])
        yield Mount(point=Path(point), kind=after.split()[0])
