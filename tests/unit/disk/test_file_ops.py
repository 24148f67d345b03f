"""The pack tier's system calls: where a system lacks one, and what the page cache has of a file."""

import ctypes
import importlib.util
import mmap
import os
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


@pytest.mark.parametrize(
    ("offset", "length", "num_pages"),
    [(0, 3 * mmap.PAGESIZE, 3), (0, 1, 1), (mmap.PAGESIZE - 1, 2, 2), (mmap.PAGESIZE, mmap.PAGESIZE, 1)],
)
def test_what_was_just_written_is_in_the_page_cache_in_whole_pages(
    tmp_path: Path, offset: int, length: int, num_pages: int
) -> None:
    path = tmp_path / "pack"
    path.write_bytes(bytes(3 * mmap.PAGESIZE))
    with path.open("rb") as file:
        resident_bytes = file_ops.FileOps().resident_bytes(file.fileno(), offset, length)
    assert resident_bytes == num_pages * mmap.PAGESIZE


def test_of_what_cannot_be_mapped_nothing_is_known_to_be_there(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    try:
        assert file_ops.FileOps().resident_bytes(read_end, 0, 100) == 0
    finally:
        os.close(read_end)
        os.close(write_end)
