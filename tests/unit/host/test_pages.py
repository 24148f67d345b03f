"""Pages of arena files: what the system says of them."""

import ctypes
import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier import pages
from kvtier.pages import PageOps


@pytest.mark.parametrize("call", ["allocate", "punch"])
def test_a_call_that_a_signal_has_interrupted_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A debugger that attaches, or a suspended machine, failed a whole batch of reads."""
    real, interrupted = pages._libc.fallocate, list[int]()

    def fallocate(fd: int, *args: Any) -> int:
        if len(interrupted) < 2:
            interrupted.append(fd)
            ctypes.set_errno(errno.EINTR)
            return -1
        return int(real(fd, *args))

    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        os.ftruncate(fd, 1 << 20)
        monkeypatch.setattr(pages, "_libc", SimpleNamespace(fallocate=fallocate))
        getattr(PageOps(), call)(fd, 0, 1 << 20)
        assert os.fstat(fd).st_blocks == (2048 if call == "allocate" else 0)
        assert len(interrupted) == 2
    finally:
        os.close(fd)
