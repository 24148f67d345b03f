"""The disk folder's folder for files that live as long as one call; a start removes what a crash left there."""

import shutil
from pathlib import Path

from kvtier.errors import TierIOError

FOLDER_NAME = "tmp"


def scratch_folder(state_dir: Path) -> Path:
    """Return the folder, made (0700) when it is missing. Blocks.

    Raises:
        TierIOError: It cannot be made.
    """
    folder = state_dir / FOLDER_NAME
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as exc:
        raise TierIOError(folder, "create", exc) from exc
    return folder


def sweep_scratch(state_dir: Path) -> None:
    """Remove what an earlier daemon left there. Only by the holder of the directory's lock."""
    shutil.rmtree(state_dir / FOLDER_NAME, ignore_errors=True)
