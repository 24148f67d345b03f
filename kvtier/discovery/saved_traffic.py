"""What was counted, on disk: two small files for each namespace, which a restart goes on from.

    <disk.dir>/traffic/<namespace_id>.sketch    the counts (`saved_sketch.py`)
    <disk.dir>/traffic/<namespace_id>.json      what automatic pins were good for, and places that change

They hold no promise: a file that is missing or damaged costs the counts and nothing else. A damaged one is removed.
"""

import base64
import dataclasses
import json
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.core import limits
from kvtier.discovery.choices import PinnedPrefix
from kvtier.discovery.namespace_traffic import HALF_LIFE_S, MAX_PLACES, ChangingPlace, NamespaceTraffic, PinUse
from kvtier.discovery.prefix_sketch import PrefixSketch
from kvtier.discovery.saved_sketch import MAX_SKETCH_BYTES, decode, encode
from kvtier.errors import InvalidArgumentError, KvtierError
from kvtier.fsync import TEMP_SUFFIX, write_file_durably
from kvtier.obs.log import log_event
from kvtier.sealing import KeyRing
from kvtier.sealing.sealed_file import ADDED_BYTES, is_sealed, open_file, seal_file

logger = logging.getLogger(__name__)

FOLDER_NAME = "traffic"
MAX_FILES = 64
"""Of namespaces; those that were written longest ago are removed."""
MAX_USES_BYTES = 16 * 1024**2
"""Of a file of uses and places: more is not read. One of 4,096 pins and all places has 2 MiB."""
_SKETCH, _USES = ".sketch", ".json"
_COUNT, _MOST_SECONDS = limits.Whole(0, 2**63 - 1), 1e12


class EncodedTraffic(NamedTuple):
    """The content of both files."""

    sketch: bytes
    uses: bytes


class SavedTraffic:
    """The folder. Its methods block; any thread.

    Args:
        disk_dir: `disk.dir`.
        ring: Both files are sealed with it: places have words of prompts.
    """

    def __init__(self, disk_dir: Path, ring: KeyRing | None = None) -> None:
        self._folder, self._ring = disk_dir / FOLDER_NAME, ring

    def encode(self, traffic: NamespaceTraffic) -> EncodedTraffic:
        """Return the files of what was counted so far, some milliseconds' work that does not block."""
        uses = [dataclasses.asdict(use) | {"prefix": _encoded(use.prefix)} for use in traffic.uses.values()]
        places = [
            dataclasses.asdict(place) | {"digest": base64.b64encode(place.digest).decode()}
            for place in traffic.places.values()
        ]
        return EncodedTraffic(encode(traffic.sketch.state()), json.dumps({"uses": uses, "places": places}).encode())

    def write(self, namespace_id: str, files: EncodedTraffic) -> None:
        """Write them, and remove those of namespaces that are no longer used.

        Raises:
            OSError: The operating system refused.
        """
        for suffix, content in ((_SKETCH, files.sketch), (_USES, files.uses)):
            path = self._folder / (namespace_id + suffix)
            write_file_durably(path, seal_file(self._ring, content, _associated(path)))
        written = sorted(self._folder.glob(f"*{_SKETCH}"), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in written[MAX_FILES:]:
            path.unlink(missing_ok=True)
            path.with_suffix(_USES).unlink(missing_ok=True)

    def seal(self) -> None:
        """Write plain files again, sealed: most of them only once their engines report again, which may be never.

        What a crash has left of a file that was being written is removed. For a start, before anything is written.

        Raises:
            OSError: The operating system refused.
        """
        if self._ring is None:
            return
        for path in sorted(self._folder.glob("*")):
            if path.suffix == TEMP_SUFFIX:
                path.unlink(missing_ok=True)
            if path.suffix in (_SKETCH, _USES) and not _is_sealed(path):
                write_file_durably(path, seal_file(self._ring, path.read_bytes(), _associated(path)))

    def load(self, namespace_id: str) -> NamespaceTraffic:
        """Return what was saved of a namespace, as far as it can be read."""
        traffic = NamespaceTraffic()
        sketch = self._folder / (namespace_id + _SKETCH)
        for path, read in ((sketch, _read_sketch), (sketch.with_suffix(_USES), _read_uses)):
            try:
                read(traffic, path, self._ring)
            except FileNotFoundError:
                pass
            except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, KvtierError) as error:
                log_event(logger, "saved_traffic_unreadable", level=logging.WARNING, path=path, problem=str(error))
                with suppress(OSError):
                    path.unlink(missing_ok=True)
        traffic.is_saved, traffic.is_changed = True, True
        return traffic


def _read_sketch(traffic: NamespaceTraffic, path: Path, ring: KeyRing | None) -> None:
    traffic.sketch = PrefixSketch.restored(decode(_bytes_of(path, MAX_SKETCH_BYTES, ring)), HALF_LIFE_S)


def _read_uses(traffic: NamespaceTraffic, path: Path, ring: KeyRing | None) -> None:
    saved = json.loads(_bytes_of(path, MAX_USES_BYTES, ring))
    uses, places = [*map(_use, saved["uses"])], [*map(_place, saved["places"][-MAX_PLACES:])]
    traffic.uses = {use.prefix.digest: use for use in uses}
    for place in places:
        traffic.put_place(place)


def _bytes_of(path: Path, most: int, ring: KeyRing | None) -> bytes:
    """Return a file's content, opened; ValueError when it is too long to be what was written."""
    with path.open("rb") as file:
        data = file.read(most + ADDED_BYTES + 1)
    data = open_file(ring, data, _associated(path), path.name)
    if len(data) > most:
        raise ValueError(f"it has more than {most} bytes")
    return data


def _is_sealed(path: Path) -> bool:
    with path.open("rb") as file:
        return is_sealed(file.read(ADDED_BYTES))


def _associated(path: Path) -> bytes:
    return b"kvtier traffic 1\0" + path.name.encode()


def _encoded(prefix: PinnedPrefix) -> list[Any]:
    parent = "" if prefix.parent is None else prefix.parent.hex()
    return [prefix.digest.hex(), prefix.num_tokens, prefix.is_system_prompt, parent]


def _use(saved: dict[str, Any]) -> PinUse:
    digest, num_tokens, is_system_prompt, parent = saved["prefix"]
    prefix = PinnedPrefix(
        limits.check_digest("digest", bytes.fromhex(digest)),
        limits.PREFIX_TOKENS.check("num_tokens", num_tokens),
        bool(is_system_prompt),
        limits.check_digest("parent", bytes.fromhex(parent)) if parent else None,
    )
    return PinUse(
        name=limits.check_name(saved["name"]),
        prefix=prefix,
        num_requests=_COUNT.check("num_requests", saved["num_requests"]),
        saved_tokens=_COUNT.check("saved_tokens", saved["saved_tokens"]),
        saved_s=_seconds("saved_s", saved["saved_s"]),
        last_used_unix_s=_seconds("last_used_unix_s", saved["last_used_unix_s"]),
    )


def _place(saved: dict[str, Any]) -> ChangingPlace:
    return ChangingPlace.checked(
        digest=base64.b64decode(saved["digest"], validate=True),
        num_stable_tokens=saved["num_stable_tokens"],
        num_tokens=saved["num_tokens"],
        num_prompts=saved["num_prompts"],
        before=saved["before"],
        examples=saved["examples"],
        seen_unix_s=_seconds("seen_unix_s", saved["seen_unix_s"]),
    )


def _seconds(field: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < _MOST_SECONDS:
        raise InvalidArgumentError(field, value, "must be seconds")
    return float(value)
