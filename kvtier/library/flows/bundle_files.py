"""Files of bundles: which may be written over, and how one is written so that it is whole or not there."""

import os
import stat
import threading
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

from kvtier.errors import InvalidArgumentError
from kvtier.fsync import fsync_directory
from kvtier.library.rendering.field_names import FieldNames

_KINDS = {
    stat.S_IFDIR: "a folder; name a file in it",
    stat.S_IFIFO: "a pipe; name a new file, and copy that",
    stat.S_IFSOCK: "a socket; name a new file",
    stat.S_IFCHR: "a device; name a new file",
    stat.S_IFBLK: "a device; name a new file, and copy that",
}


def check_target(file: Path, names: FieldNames, *, overwrite: bool) -> None:
    """Refuse targets that a rename would destroy: all but regular files, and those too without `overwrite`.

    Any link is refused too: to replace it and to write through it are both surprising.
    """
    try:
        mode = file.lstat().st_mode
        target = file.readlink() if stat.S_ISLNK(mode) else None
    except FileNotFoundError:
        return
    except OSError as exc:
        raise InvalidArgumentError(names["file"], str(file), f"cannot be written: {exc.strerror}") from exc
    if target is not None:
        raise InvalidArgumentError(names["file"], str(file), f"is a symbolic link to {target}; name the file itself")
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "no file; name a new one")
        raise InvalidArgumentError(names["file"], str(file), f"is {kind}")
    if not overwrite:
        raise InvalidArgumentError(names["file"], str(file), f"exists; pass {names['overwrite']} to overwrite it")


def write_bundle(pieces: Iterable[bytes], file: Path, names: FieldNames, *, overwrite: bool) -> int:
    """Write a temporary file beside the target, fsync it, and rename it to its final name."""
    temp = file.with_name(f".kvtier-export-{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        with open(temp, "xb", opener=partial(os.open, mode=0o600)) as target:
            for data in pieces:
                target.write(data)
            target.flush()
            os.fsync(target.fileno())
            num_bytes = target.tell()
        check_target(file, names, overwrite=overwrite)  # again, because an export takes long
        temp.rename(file)
        fsync_directory(file.absolute().parent)
    except OSError as exc:
        raise InvalidArgumentError(names["file"], str(file), f"cannot be written: {exc.strerror}") from exc
    finally:
        with suppress(OSError):
            temp.unlink(missing_ok=True)
    return num_bytes
