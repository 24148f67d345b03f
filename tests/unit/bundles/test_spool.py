"""The scratch file in which a bundle is made, or kept while it is imported."""

from pathlib import Path

import pytest

from kvtier.bundles.spool import Spool


def test_a_file_that_cannot_be_removed_is_left_to_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk that turned read-only the error ended a fleet's uploads, in place of the one that it hid."""

    def refuse(path: Path, missing_ok: bool) -> None:
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(ZeroDivisionError), Spool(tmp_path):
        raise ZeroDivisionError
    assert len(list(tmp_path.iterdir())) == 1
