"""Files that commands write for people: whole or not at all, and through no file that is there already."""

import os
import secrets
from contextlib import suppress
from functools import partial
from pathlib import Path

from kvtier.fsync import fsync_directory, make_folder


def write_whole(path: Path, data: bytes) -> None:
    """Create or replace a private file (0600), durably, by a file beside it; write into what is a device or a pipe.

    Its folder is created (0700) when it is missing.

    Raises:
        OSError: The operating system refused; the file is as before.
        ValueError: It is no path of a file.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    make_folder(path.parent)
    # Not `<path>.tmp`, which may be a file of the user's, or someone else's link.
    temp = path.with_name(f".kvtier-{secrets.token_hex(8)}.tmp")
    try:
        with open(temp, "xb", opener=partial(os.open, mode=0o600)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temp.rename(path)
    finally:
        with suppress(OSError):
            temp.unlink(missing_ok=True)
    fsync_directory(path.parent)
