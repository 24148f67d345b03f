"""What is counted of the pack tier's system calls."""

import os
from pathlib import Path

import pytest

from kvtier.disk.files.observed_ops import ObservedFileOps
from kvtier.obs.counters import Counters
from kvtier.obs.histogram import Histogram


def errors(counters: Counters) -> dict[str, int]:
    """Return the I/O errors that were counted, by operation."""
    prefix = "io_errors_disk_"
    return {name.removeprefix(prefix): n for name, n in counters.as_dict().items() if name.startswith(prefix) and n}


def test_refusals_are_counted_by_operation_and_raised(tmp_path: Path) -> None:
    counters, fsync_s = Counters(), Histogram((1.0,))
    ops = ObservedFileOps(counters, fsync_s)
    with ops.opened(Path("/dev/full"), os.O_WRONLY) as full, pytest.raises(OSError, match="No space left"):
        ops.write_all(full, [memoryview(b"x")], 0)
    with ops.opened(tmp_path / "file", os.O_WRONLY | os.O_CREAT) as fd, pytest.raises(OSError, match="descriptor"):
        ops.read_all(fd, [memoryview(bytearray(1))], 0)
    for call in (lambda: ops.unlink(tmp_path), lambda: ops.rename(tmp_path / "file", tmp_path / "file" / "below")):
        with pytest.raises(OSError):
            call()
    with pytest.raises(OSError, match="descriptor"):
        ops.fsync(1 << 20)
    with pytest.raises(OSError, match="directory"):
        ops.open(tmp_path, os.O_WRONLY)
    assert errors(counters) == {"write": 1, "read": 1, "unlink": 1, "rename": 1, "fsync": 1, "open": 1}
    assert fsync_s.count == 0, "a refusal says nothing of the device's speed"


def test_a_file_that_is_gone_is_no_refusal(tmp_path: Path) -> None:
    counters = Counters()
    ops = ObservedFileOps(counters, Histogram((1.0,)))
    for call in (lambda: ops.unlink(tmp_path / "none"), lambda: ops.open(tmp_path / "none", os.O_RDONLY)):
        with pytest.raises(FileNotFoundError):
            call()
    assert errors(counters) == {}


def test_fsyncs_are_timed(tmp_path: Path) -> None:
    fsync_s = Histogram((60.0,))
    ops = ObservedFileOps(Counters(), fsync_s)
    with ops.opened(tmp_path / "file", os.O_WRONLY | os.O_CREAT) as fd:
        ops.fsync(fd)
    ops.fsync_dir(tmp_path)
    assert fsync_s.count == 2
