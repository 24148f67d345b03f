"""What was counted, on disk: two small files for each namespace, which a restart goes on from.

    <disk.dir>/traffic/<namespace_id>.sketch    the counts (`saved_sketch.py`)
    <disk.dir>/traffic/<namespace_id>.json      what automatic pins were good for, and places that change

They hold no promise: a file that is missing or damaged costs the counts and nothing else.
"""

import base64
import dataclasses
import json
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.discovery.choices import PinnedPrefix
from kvtier.discovery.namespace_traffic import HALF_LIFE_S, MAX_PLACES, ChangingPlace, NamespaceTraffic, PinUse
from kvtier.discovery.prefix_sketch import PrefixSketch
from kvtier.discovery.saved_sketch import SketchDamagedError, decode, encode
from kvtier.fsync import write_file_durably
from kvtier.obs.log import log_event

logger = logging.getLogger(__name__)

FOLDER_NAME = "traffic"
MAX_FILES = 64
"""Of namespaces; those that were written longest ago are removed."""
_SKETCH, _USES = ".sketch", ".json"


class EncodedTraffic(NamedTuple):
    """The content of both files."""

    sketch: bytes
    uses: bytes


class SavedTraffic:
    """The folder. Its methods block; any thread.

    Args:
        disk_dir: `disk.dir`.
    """

    def __init__(self, disk_dir: Path) -> None:
        self._folder = disk_dir / FOLDER_NAME

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
        write_file_durably(self._folder / (namespace_id + _SKETCH), files.sketch)
        write_file_durably(self._folder / (namespace_id + _USES), files.uses)
        written = sorted(self._folder.glob(f"*{_SKETCH}"), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in written[MAX_FILES:]:
            path.unlink(missing_ok=True)
            path.with_suffix(_USES).unlink(missing_ok=True)

    def load(self, namespace_id: str) -> NamespaceTraffic:
        """Return what was saved of a namespace, as far as it can be read."""
        traffic = NamespaceTraffic()
        path = self._folder / (namespace_id + _SKETCH)
        try:
            traffic.sketch = PrefixSketch.restored(decode(path.read_bytes()), HALF_LIFE_S)
            saved = json.loads(path.with_suffix(_USES).read_bytes())
            for use in map(_use, saved["uses"]):
                traffic.uses[use.prefix.digest] = use
            for place in map(_place, saved["places"][-MAX_PLACES:]):
                traffic.put_place(place)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SketchDamagedError) as error:
            log_event(logger, "saved_traffic_unreadable", level=logging.WARNING, path=path, problem=str(error))
            with suppress(OSError):
                path.unlink(missing_ok=True)
        traffic.is_saved, traffic.is_changed = True, True
        return traffic


def _encoded(prefix: PinnedPrefix) -> list[Any]:
    parent = "" if prefix.parent is None else prefix.parent.hex()
    return [prefix.digest.hex(), prefix.num_tokens, prefix.is_system_prompt, parent]


def _use(saved: dict[str, Any]) -> PinUse:
    digest, num_tokens, is_system_prompt, parent = saved.pop("prefix")
    prefix = PinnedPrefix(bytes.fromhex(digest), int(num_tokens), bool(is_system_prompt), bytes.fromhex(parent) or None)
    return PinUse(prefix=prefix, **saved)


def _place(saved: dict[str, Any]) -> ChangingPlace:
    digest, examples = base64.b64decode(saved.pop("digest")), tuple(saved.pop("examples"))
    return ChangingPlace(digest=digest, examples=examples, **saved)
