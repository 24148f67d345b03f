"""What requests had of each pin, on disk: one small file, which a restart goes on from.

    <disk.dir>/usage.json    {"pins": {PIN_ID: {...}}}

It holds no promise: a file that is missing or damaged costs the counts and nothing else. A damaged one is removed.
"""

import json
import logging
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvtier.core import limits
from kvtier.core.requests.request_outcomes import RequestOutcome
from kvtier.errors import InvalidArgumentError, KvtierError
from kvtier.fsync import write_file_durably
from kvtier.obs.log import log_event
from kvtier.outcomes.pin_usage import PinUsage

logger = logging.getLogger(__name__)

FILE_NAME = "usage.json"
MAX_BYTES = 64 * 1024**2
"""More is not read: 100,000 pins have 40 MB."""
_COUNT, _MOST_SECONDS = limits.Whole(0, 2**63 - 1), 1e12
_COUNTS = ("num_hits", "device_tokens", "host_tokens", "disk_tokens")
_SECONDS = ("last_hit_unix_s", "last_used_unix_s", "saved_prefill_s")


class SavedUsage:
    """The file. Its methods block; any thread.

    Args:
        disk_dir: `disk.dir`.
    """

    def __init__(self, disk_dir: Path) -> None:
        self._path = disk_dir / FILE_NAME

    def write(self, pins: Mapping[str, Mapping[str, Any]]) -> None:
        """Write what `encoded` returned, by pin id.

        Raises:
            OSError: The operating system refused.
        """
        write_file_durably(self._path, json.dumps({"pins": pins}).encode())

    def load(self) -> dict[str, PinUsage]:
        """Return what was saved, by pin id; nothing if it cannot be read."""
        try:
            saved = json.loads(self._read())
            return {limits.PIN_ID.check("pin_id", pin_id): _usage(each) for pin_id, each in saved["pins"].items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, KvtierError) as error:
            log_event(logger, "saved_usage_unreadable", level=logging.WARNING, path=self._path, problem=str(error))
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
            return {}

    def _read(self) -> bytes:
        """Return the file's content; ValueError when it is too long to be what was written."""
        with self._path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES} bytes")
        return data


def encoded(usage: PinUsage) -> dict[str, Any]:
    """Return what is written of a pin."""
    fields = {name: getattr(usage, name) for name in (*_COUNTS, *_SECONDS)}
    return fields | {"others": {outcome.value: num for outcome, num in usage.others.items()}}


def _usage(saved: Mapping[str, Any]) -> PinUsage:
    numbers: dict[str, Any] = {name: _COUNT.check(name, saved[name]) for name in _COUNTS}
    numbers |= {name: _seconds(name, saved[name]) for name in _SECONDS}
    others = Counter({RequestOutcome(value): _COUNT.check(value, num) for value, num in saved["others"].items()})
    return PinUsage(**numbers, others=others)


def _seconds(field: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < _MOST_SECONDS:
        raise InvalidArgumentError(field, value, "must be seconds")
    return float(value)
