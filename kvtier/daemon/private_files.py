"""What the daemon keeps is for its user only: modes of files that are there at a start are mended, or it refuses.

Files are made 0600 in folders of 0700 (umask 077). Other modes come from a backup that was put back, a volume whose
group Kubernetes sets (`fsGroup`), a `chmod -R`. Only what kvtier has named itself is looked at: a folder of a setting
may hold others' files, such as `lost+found`.
"""

import fnmatch
import logging
import os
import stat
import threading
from collections.abc import Collection, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from kvtier.config import DaemonConfig
from kvtier.errors import ConfigError
from kvtier.folders import LOCK_NAME
from kvtier.obs.log import log_event

logger = logging.getLogger(__name__)

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_FOLDERS_ON_DISK = ("packs", "unclaimed", "promises", "namespaces", "quarantined", "traffic", "tmp")
_FILES_ON_DISK = (LOCK_NAME, "ledger.sqlite*", "access.json*", "usage.json*", "scrub.*")
_FILES_OF_ARENAS = (LOCK_NAME, "arena-*", "session-*.lock")
_FOLDERS_IN_STORE = ("pins", "prompts", "kv", "hosts", "checks", ".tmp")
_FILES_IN_STORE = ("collected.json", ".lock")
_STORE_S = 10.0
"""How long a start waits for the folder that hosts share, whose file server may be gone. kvtier serves without it."""


class _Place(NamedTuple):
    """A folder of a setting, and what of it is kvtier's: names of files, and of folders with all that they hold."""

    key: str
    folder: Path
    files: tuple[str, ...]
    folders: tuple[str, ...] = ()
    denied: int = _OTHERS
    """Bits of modes that none of them may have: with `server.group` its members reach arenas."""
    is_own: bool = False
    """kvtier alone uses the folder itself."""


def own_folders(config: DaemonConfig) -> list[Path]:
    """Return the folders of settings that kvtier alone uses; asked before a start makes its lock files in them."""
    return [folder for folder in (config.disk.disk_dir, config.host.arena_dir) if _is_ours_alone(folder)]


def mend_modes(config: DaemonConfig, own: Collection[Path]) -> int:
    """Take away what other users may do with files of kvtier; return how many modes were wrong. Blocks.

    Args:
        own: See `own_folders`: their own modes are mended, too.

    Raises:
        ConfigError: A file belongs to another user, or its mode cannot be changed.
    """
    num_mended = sum(_mend_place(place) for place in _places(config, own))
    if config.remote.url.startswith("file://"):
        store = Path(config.remote.url.removeprefix("file://"))
        num_mended += _mend_in_time(_Place("remote.url", store, _FILES_IN_STORE, _FOLDERS_IN_STORE))
    if num_mended:
        log_event(
            logger,
            "modes_mended",
            level=logging.WARNING,
            files=num_mended,
            why="other users could have read or written them",
            remedy="see who changed the modes, and whether what the files hold became known",
        )
    return num_mended


def _mend_in_time(place: _Place) -> int:
    """Mend in a thread, which goes on by itself when it has taken too long, or never returns."""
    mended: Future[int] = Future()

    def run() -> None:
        try:
            mended.set_result(_mend_place(place._replace(is_own=_is_ours_alone(place.folder))))
        except BaseException as exc:  # the caller's, if it still waits
            mended.set_exception(exc)

    threading.Thread(target=run, name="kvtier-modes", daemon=True).start()
    try:
        return mended.result(_STORE_S)
    except TimeoutError:
        log_event(
            logger,
            "modes_unknown",
            level=logging.WARNING,
            folder=place.folder,
            why=f"it did not answer within {_STORE_S:.0f} s",
            remedy=f"see that the file server of {place.key} answers; meanwhile kvtier serves without it",
        )
        return 0


def _mend_place(place: _Place) -> int:
    return sum(_mend(place.key, path, place.denied) for path in _paths(place))


def _places(config: DaemonConfig, own: Collection[Path]) -> Iterator[_Place]:
    disk_dir, arena_dir = config.disk.disk_dir, config.host.arena_dir
    yield _Place("disk.dir", disk_dir, _FILES_ON_DISK, _FOLDERS_ON_DISK, is_own=disk_dir in own)
    denied = _OTHERS if config.server.gid is None else stat.S_IRWXO
    yield _Place("host.arena_dir", arena_dir, _FILES_OF_ARENAS, denied=denied, is_own=arena_dir in own)
    socket = config.server.socket
    yield _Place("server.socket", socket.parent, (f".{socket.name}.lock",))


def _paths(place: _Place) -> Iterator[Path]:
    try:
        names = sorted(path.name for path in place.folder.iterdir())
    except OSError:
        return  # it is not there yet, or other checks say what is wrong with it
    if place.is_own:
        yield place.folder
    for name in names:
        path = place.folder / name
        if name in place.folders:
            yield path
            for parent, folders, files in os.walk(path):
                yield from (Path(parent, each) for each in (*folders, *files))
        elif any(fnmatch.fnmatch(name, pattern) for pattern in place.files):
            yield path


def _is_ours_alone(folder: Path) -> bool:
    """Say whether a folder of ours, not one for all like /tmp, has our lock file in it, or nothing."""
    try:
        names, facts = {path.name for path in folder.iterdir()}, folder.stat()
    except OSError:  # other checks say what is wrong with it
        return False
    is_ours = facts.st_uid == os.geteuid() and not facts.st_mode & stat.S_ISVTX
    return is_ours and (not names or LOCK_NAME in names)


def check_owner(key: str, path: Path) -> os.stat_result:
    """Return what is known of a file of ours.

    Raises:
        ConfigError: It belongs to another user.
        OSError: It cannot be looked at.
    """
    facts = path.lstat()
    if stat.S_ISLNK(facts.st_mode):
        facts = path.stat()
    if facts.st_uid != os.geteuid():
        problem = f"belongs to uid {facts.st_uid}; run chown {os.geteuid()} {path}, or name another folder"
        raise ConfigError(key, str(path), "start", problem)
    return facts


def _mend(key: str, path: Path, denied: int) -> bool:
    try:
        facts = check_owner(key, path)
        if not facts.st_mode & denied:
            return False
        path.chmod(stat.S_IMODE(facts.st_mode) & ~denied)
        still = path.stat().st_mode
    except FileNotFoundError:  # a link that leads nowhere, or gone since it was listed
        return False
    except OSError as exc:
        problem = f"other users may reach it, and its mode cannot be changed ({exc.strerror}); run chmod go-rwx {path}"
        raise ConfigError(key, str(path), "start", problem) from exc
    if still & denied:  # some file systems take a chmod and ignore it
        mode = f"{stat.S_IMODE(still):04o}"
        problem = f"has mode {mode} whatever chmod says; name a folder on a file system that keeps modes"
        raise ConfigError(key, str(path), "start", problem)
    return True
