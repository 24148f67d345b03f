"""What a process holds, in numbers, as /proc says it."""

from pathlib import Path
from typing import NamedTuple


class Held(NamedTuple):
    """What a process holds.

    Attributes:
        num_maps: Mappings of arenas.
        num_files: Files that engines share with it: arenas and session locks.
        private_bytes: Resident memory that is its own: pages of the arenas do not count.
    """

    num_fds: int
    num_threads: int
    num_maps: int
    num_files: int
    private_bytes: int


def held(pid: int, arena_dir: Path) -> Held:
    """Look into /proc, and at the files of the arena folder."""
    process = Path(f"/proc/{pid}")
    return Held(
        num_fds=len(list(process.joinpath("fd").iterdir())),
        num_threads=len(list(process.joinpath("task").iterdir())),
        num_maps=process.joinpath("maps").read_text().count(str(arena_dir)),
        num_files=len(list(arena_dir.iterdir())),
        private_bytes=_private_bytes(process.joinpath("status").read_text()),
    )


def _private_bytes(status: str) -> int:
    (kib,) = (line.split()[1] for line in status.splitlines() if line.startswith("RssAnon:"))
    return int(kib) * 1024
