"""The order that makes a pack durable: data, fsync, close, rename, fsync of the directory, and only then the return."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvtier.tiers.file_ops import FileOps
from kvtier.tiers.packs import PackTier
from tests.fakes.chunks import noise, payload_of

RECORDED = ("open", "pwrite", "fsync", "close", "rename", "fsync_dir", "unlink")


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
    assert calls == ["open", "pwrite", "pwrite", "pwrite", "fsync", "close", "rename", "fsync_dir"]
