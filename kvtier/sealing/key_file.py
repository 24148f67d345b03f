"""The file of keys: one a line, `ID BASE64-of-32-bytes`; the first is for writing, the others are read with.

Empty lines and lines that begin with `#` are skipped. No message shows a key, or a line that may hold one.
"""

import base64
import binascii
import importlib.util
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.sealing.aead import KEY_BYTES
from kvtier.sealing.key_ring import Key, KeyRing

_ID = re.compile(r"[A-Za-z0-9_-]{1,16}")
_MAX_BYTES = 64 * 1024


def load_key_ring(path: Path, setting: str = "disk.key_file", source: str = "start") -> KeyRing:
    """Return the keys of a file.

    Args:
        path: The file.
        setting: What messages call the setting, or option, that names it.
        source: Where that came from.

    Raises:
        ConfigError: It cannot be used; says why, and what to do.
    """

    def refused(problem: str) -> ConfigError:
        return ConfigError(setting, str(path), source, problem)

    if importlib.util.find_spec("cryptography") is None:
        raise refused("needs the Python package cryptography; run pip install 'cryptography>=46'")
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait for a writer
    except OSError as exc:
        remedy = f'make one: (umask 077; echo "k1 $(openssl rand -base64 32)" > {path})'
        raise refused(f"cannot be read ({exc.strerror}); name a file of keys, or {remedy}") from exc
    with _closing(fd):
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            raise refused("is no file; name a file of keys")
        if facts.st_uid not in (os.geteuid(), 0):
            raise refused(f"belongs to uid {facts.st_uid}; run chown {os.geteuid()} {path}")
        if facts.st_mode & _not_ours(facts, path):
            mode = f"{stat.S_IMODE(facts.st_mode):04o}"
            raise refused(f"other users may reach it (mode {mode}); run chmod 600 {path}, and think about new keys")
        data = os.read(fd, _MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise refused(f"has more than {_MAX_BYTES} bytes; name a file of keys")
    keys: list[Key] = []
    for number, line in enumerate(data.decode(errors="replace").splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        key = _key(line)
        if key is None:
            raise refused(
                f"line {number} is not ID, space, {KEY_BYTES} bytes in base64; an ID has 1 to 16 of A-Za-z0-9_-"
            )
        if key.key_id in {other.key_id for other in keys}:
            raise refused(f"line {number} has the ID of a line before it; give each key an ID of its own")
        if key.secret in {other.secret for other in keys}:
            raise refused(f"line {number} has the key of a line before it; remove one of them")
        keys.append(key)
    if not keys:
        raise refused('has no key; add one: echo "k1 $(openssl rand -base64 32)"')
    return KeyRing(keys, str(path))


def _not_ours(facts: os.stat_result, path: Path) -> int:
    """Return the permissions that others must not have.

    A file of root's may be read by a group that we are in: so Kubernetes hands out secrets (`fsGroup`). Or it is a
    credential of our unit: systemd lets us read it by an ACL, whose mask `stat` shows as the group's permissions.
    """
    has_group = facts.st_gid in (os.getegid(), *os.getgroups()) or _is_credential(path)
    is_handed_out = facts.st_uid == 0 != os.geteuid() and has_group
    return stat.S_IRWXO | (stat.S_IWGRP | stat.S_IXGRP if is_handed_out else stat.S_IRWXG)


def _is_credential(path: Path) -> bool:
    folder = Path(os.environ.get("CREDENTIALS_DIRECTORY", ""))
    return folder.is_absolute() and path.parent == folder


@contextmanager
def _closing(fd: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(fd)


def _key(line: str) -> Key | None:
    parts = line.split()
    if len(parts) != 2 or not _ID.fullmatch(parts[0]):
        return None
    try:
        secret = base64.b64decode(parts[1], validate=True)
    except (binascii.Error, ValueError):
        return None
    return Key(parts[0], secret) if len(secret) == KEY_BYTES else None
