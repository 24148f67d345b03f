"""Files that commands write: through no file that is there already, whole or not at all."""

import json
from pathlib import Path

import pytest

from kvtier.cli.commands.whole_files import write_whole
from tests.fakes.fake_cache_service import FakeCacheService
from tests.unit.cli.conftest import Kvtier


@pytest.fixture
def pinned(daemon: FakeCacheService, kvtier: Kvtier) -> FakeCacheService:
    daemon.num_engines = 1
    kvtier("pin", "bot", "--tokens", "-", stdin=json.dumps(list(range(40))))
    return daemon


@pytest.mark.parametrize(
    "command", [("export-config", "-o", "out"), ("verify", "bot", "--no-live", "--report", "out")], ids=" ".join
)
@pytest.mark.parametrize("is_link", [False, True])
def test_a_file_beside_the_one_that_is_written_stays(
    pinned: FakeCacheService, kvtier: Kvtier, tmp_path: Path, command: tuple[str, ...], is_link: bool
) -> None:
    """`out.tmp` was written over, followed where it led, and its mode was that of the answer then."""
    mine = tmp_path / ("elsewhere" if is_link else "out.tmp")
    mine.write_text("mine")
    mine.chmod(0o644)
    if is_link:
        (tmp_path / "out.tmp").symlink_to(mine)
    kvtier(*command)
    assert (tmp_path / "out.tmp").read_text() == "mine"
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o600
    assert "bot" in (tmp_path / "out").read_text()
    assert not list(tmp_path.glob(".kvtier-*"))


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "folder", tmp_path / ("x" * 300)):
        with pytest.raises(OSError, match=r"directory|too long"):
            write_whole(path, b"data")
    write_whole(tmp_path / "made" / "file", b"data")
    write_whole(tmp_path / "made" / "file", b"other")
    assert (tmp_path / "made" / "file").read_bytes() == b"other"
    assert [path.name for path in sorted(tmp_path.rglob("*"))] == ["folder", "made", "file"]
