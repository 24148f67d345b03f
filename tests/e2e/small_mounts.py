"""Small file systems that only a daemon and its engines see, to be filled up without harm to the machine."""

import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks.harness.process import Process, wait_until

UNSHARE = ("unshare", "--mount", "--propagation=private", "sh", "-c")
_BLOCK_BYTES = 4096


def may_mount() -> bool:
    """Say whether this process may mount in a namespace of its own."""
    if shutil.which("unshare") is None or shutil.which("nsenter") is None:
        return False
    return subprocess.run([*UNSHARE, "mount -t tmpfs none /mnt"], capture_output=True, check=False).returncode == 0


class SmallMounts:
    """A mount namespace with a tmpfs on each of some folders; it lives as long as the process that holds it."""

    def __init__(self, holder: Process) -> None:
        """Of a running process in the namespace; see `small_mounts`."""
        self._holder = holder

    def move_in(self, process: Process) -> None:
        """Have a process run in the namespace from its next start on."""
        process.argv[:0] = [str(shutil.which("nsenter")), f"--mount=/proc/{self._holder.pid}/ns/mnt"]

    def seen(self, path: Path) -> Path:
        """Return the path by which we, outside, see what the processes inside have at `path`."""
        return Path(f"/proc/{self._holder.pid}/root{path}")

    @contextmanager
    def filled(self, folder: Path) -> Iterator[None]:
        """Take all that a file system has left, and give it back at the end."""
        ballast = self.seen(folder) / "ballast"
        try:
            with suppress(OSError), ballast.open("ab", buffering=0) as file:
                while True:
                    file.write(bytes(_BLOCK_BYTES))
            yield
        finally:
            ballast.unlink(missing_ok=True)


@contextmanager
def small_mounts(sizes: Mapping[Path, str], log_path: Path) -> Iterator[SmallMounts]:
    """Mount a tmpfs of the given size (as mount(8) takes it) on each folder, which must exist."""
    mounts = [f"mount -t tmpfs -o size={size},mode=700 none {folder}" for folder, size in sizes.items()]
    script = " && ".join([*mounts, "echo mounted", "exec sleep infinity"])
    argv: Sequence[str] = [str(shutil.which(UNSHARE[0])), *UNSHARE[1:], script]
    with Process("mounts", argv, {}, log_path) as holder:
        wait_until(lambda: "mounted" in holder.log_text() or not holder.is_running, 60, "small file systems")
        assert holder.is_running, holder.log_text()
        yield SmallMounts(holder)
