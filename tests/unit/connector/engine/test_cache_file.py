"""Small files of the connector: what cannot be written costs the entries, and leaves nothing behind."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from kvtier_connector.engine.cache_file import read_cache, write_cache


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "cache.json"
    write_cache(path, {"a": "1"})
    assert read_cache(path) == {"a": "1"}
    assert [each.name for each in path.parent.iterdir()] == ["cache.json"]


def test_a_write_that_fails_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each start of vLLM on a full disk, and each LoRA adapter that was read, left one."""
    folder = tmp_path / "cache.json"  # in the way of the file
    folder.mkdir()
    write_cache(folder, {"a": "1"})
    assert [*tmp_path.iterdir()] == [folder]

    def fill(entries: Any, file: Any) -> None:
        file.write("{")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(json, "dump", fill)
    write_cache(tmp_path / "other.json", {"a": "1"})
    assert [*tmp_path.iterdir()] == [folder]
