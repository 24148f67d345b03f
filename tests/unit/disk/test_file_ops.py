"""The pack tier's system calls, where a system lacks one."""

import ctypes
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtier.disk.files import file_ops


def test_a_system_without_sync_file_range_begins_no_writeback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    lacking = SimpleNamespace(mmap=libc.mmap, munmap=libc.munmap, mincore=libc.mincore)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: lacking)
    spec = importlib.util.spec_from_file_location("file_ops_elsewhere", file_ops.__file__)
    assert spec is not None
    assert spec.loader is not None
    elsewhere = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, elsewhere)  # its dataclasses look there
    spec.loader.exec_module(elsewhere)
    with (tmp_path / "pack").open("wb") as file:
        file.write(b"x")
        elsewhere.FileOps().begin_writeback(file.fileno(), 0, 1)
    assert (tmp_path / "pack").read_bytes() == b"x"
