"""Small files in the cache folder of the user who runs vLLM: what was computed before, and can be computed again."""

import json
import logging
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

logger = logging.getLogger(__name__)


def read_cache(path: Path) -> dict[str, str]:
    """Return the entries of the file; none if it is missing or damaged, or if another user could have written it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            if not _is_our_own(os.fstat(fd)):
                logger.warning("kvtier: %s is not used: it must be a file that only vLLM's own user can write", path)
                return {}
            return {key: value for key, value in json.load(file).items() if isinstance(value, str)}
    except (OSError, ValueError, AttributeError, RecursionError) as exc:
        logger.debug("no cache at %s: %s", path, exc)
        return {}


def write_cache(path: Path, entries: Mapping[str, str]) -> None:
    """Write the file (0600) atomically; a failure costs the entries."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            temporary = Path(file.name)
            try:
                json.dump(entries, file)
                file.close()
                temporary.replace(path)
            except OSError:
                temporary.unlink()
                raise
    except OSError as exc:
        logger.debug("cache not written: %s", exc)


def _is_our_own(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022
