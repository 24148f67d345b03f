"""Files of bundles: which may be written over, how one is written so that it is whole or not there, or sealed."""

import os
import stat
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from kvtier.core.limits import PIECE_BYTES
from kvtier.errors import BundleDamagedError, InvalidArgumentError
from kvtier.fsync import fsync_directory
from kvtier.library.rendering.field_names import FieldNames
from kvtier.sealing import KeyRing, load_key_ring
from kvtier.sealing.aead import SealBrokenError
from kvtier.sealing.sealed_stream import StreamSealer, is_sealed, opened_pieces

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


def sealed_pieces(pieces: Iterable[bytes], ring: KeyRing) -> Iterator[bytes]:
    """Yield a bundle as it comes, sealed with the first key of a ring."""
    sealer = StreamSealer(ring.writing)
    yield sealer.head
    for piece in pieces:
        if ready := sealer.add(piece):
            yield ready
    yield sealer.end()


def bundle_pieces(file: BinaryIO, key_file: Path | None, names: FieldNames) -> Iterator[bytes]:
    """Yield the bytes of a bundle's file, opened if a file of keys is given, in pieces that the daemon takes.

    Raises:
        InvalidArgumentError: It is sealed, and no keys are given; or the other way round.
        KeyMissingError: Its key is not in the file.
        BundleDamagedError: It is sealed, and not what was written.
    """
    ring = load_key_ring(key_file, names["key_file"], "argument") if key_file is not None else None
    first = file.read(PIECE_BYTES)
    name = str(getattr(file, "name", "-"))
    if is_sealed(first) and ring is None:
        raise InvalidArgumentError(names["file"], name, f"is sealed; pass {names['key_file']} with its key")
    if ring is None:
        yield first
        while piece := file.read(PIECE_BYTES):
            yield piece
        return
    if not is_sealed(first):
        raise InvalidArgumentError(names["file"], name, f"is not sealed; leave out {names['key_file']}")
    stream = chain([first], iter(partial(file.read, PIECE_BYTES), b""))
    try:
        yield from opened_pieces(stream, ring, "the bundle")
    except SealBrokenError as error:
        raise BundleDamagedError(f"{error}; copy it again") from error


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
