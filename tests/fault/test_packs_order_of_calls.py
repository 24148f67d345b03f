"""The order that makes a pack durable: data, fsync, close, rename, fsync of the directory, and only then the return."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier.disk.files.file_ops import FileOps
from kvtier.disk.packs.pack_tier import PackTier
from kvtier.errors import TierIOError
from tests.fakes.chunks import noise, payload_of

RECORDED = ("open", "pwritev", "begin_writeback", "fsync", "close", "rename", "fsync_dir", "unlink")


def recorded(calls: list[str]) -> FileOps:
    """Return ops that note the name of each call."""
    ops = FileOps()

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            calls.append(name)
            return call(*arguments)

        return run

    for name in RECORDED:
        setattr(ops, name, noted(name, getattr(ops, name)))
    return ops


def test_a_pack_is_synced_before_it_has_its_name_and_its_name_before_the_return(tmp_path: Path) -> None:
    calls: list[str] = []
    PackTier(tmp_path, ops=recorded(calls)).write_pack("ns", [payload_of(1, noise(100)), payload_of(2, noise(100))])
    assert calls == ["open", "pwritev", "begin_writeback", "pwritev", "fsync", "close", "rename", "fsync_dir"]


def test_a_pack_takes_one_fsync_and_few_writes_however_many_chunks_it_has(tmp_path: Path) -> None:
    calls: list[str] = []
    PackTier(tmp_path, ops=recorded(calls)).write_pack("ns", [payload_of(n, noise(9000, n)) for n in range(500)])
    assert calls.count("fsync") == calls.count("fsync_dir") == 1
    assert calls.count("pwritev") <= 7


def test_a_failed_fsync_is_never_tried_again(tmp_path: Path) -> None:
    """The kernel may have dropped the dirty pages: the second fsync would succeed and mean nothing."""
    calls: list[str] = []
    ops = recorded(calls)
    synced = ops.fsync

    def failing(fd: int) -> None:
        synced(fd)
        raise OSError(5, "Input/output error")

    ops.fsync = failing  # type: ignore[method-assign]
    with pytest.raises(TierIOError):
        PackTier(tmp_path, ops=ops).write_pack("ns", [payload_of(1, noise(100))])
    assert calls == ["open", "pwritev", "begin_writeback", "pwritev", "fsync", "close", "unlink", "unlink"]
