"""The scheduler's mirror of the pins: which chunks are pinned, and which of those the daemon holds."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvtier.core.layout import ChunkKey


@dataclass(frozen=True, kw_only=True)
class BoundPin:
    """A pin whose chunk keys are known.

    Attributes:
        pin_id: The daemon's name for it.
        keys: Its reachable chunks.
        pinned: False when it was unpinned: it may be loaded, nothing of it is stored.
    """

    pin_id: str
    keys: tuple[ChunkKey, ...]
    pinned: bool


class PinMirror:
    """What the scheduler may look up and what it shall store. Scheduler thread only; dict lookups.

    Several pins share the chunks of a common prefix, so chunks are counted.
    """

    def __init__(self) -> None:
        self._pins: dict[str, BoundPin] = {}
        self._known: Counter[ChunkKey] = Counter()
        self._wanted: Counter[ChunkKey] = Counter()
        self._held: set[ChunkKey] = set()
        self._untold: set[ChunkKey] = set()  # of pins just bound: the daemon has not said yet whether it holds them

    def __len__(self) -> int:
        return len(self._pins)

    def knows(self, key: ChunkKey) -> bool:
        """Return whether the chunk belongs to a pin."""
        return key in self._known

    def may_be_held(self, key: ChunkKey) -> bool:
        """Return whether asking for this pinned chunk is worth it: the daemon holds it, or has yet to say."""
        return key in self._held or key in self._untold

    def wants(self, key: ChunkKey) -> bool:
        """Return whether the chunk shall be stored when vLLM offers it."""
        return key in self._wanted and key not in self._held

    def add(self, pin: BoundPin) -> None:
        """Take a pin in, in place of an earlier one of the same id."""
        self.remove(pin.pin_id)
        self._pins[pin.pin_id] = pin
        self._untold.update(key for key in pin.keys if key not in self._known)
        self._known.update(pin.keys)
        if pin.pinned:
            self._wanted.update(pin.keys)

    def remove(self, pin_id: str) -> None:
        """Forget a pin and the chunks that only it had."""
        pin = self._pins.pop(pin_id, None)
        if pin is None:
            return
        _discount(self._known, pin.keys)
        if pin.pinned:
            _discount(self._wanted, pin.keys)
        gone = [key for key in pin.keys if key not in self._known]
        self._held.difference_update(gone)
        self._untold.difference_update(gone)

    def set_held(self, keys: Sequence[ChunkKey], held: bool) -> None:
        """Note what the daemon holds; chunks of no pin are ignored."""
        self._untold.difference_update(keys)
        if held:
            self._held.update(key for key in keys if key in self._known)
        else:
            self._held.difference_update(keys)

    def clear(self) -> None:
        """Forget everything: the session is over."""
        self._pins.clear()
        self._known.clear()
        self._wanted.clear()
        self._held.clear()
        self._untold.clear()


def _discount(counts: Counter[ChunkKey], keys: Iterable[ChunkKey]) -> None:
    for key in keys:
        counts[key] -= 1
        if counts[key] <= 0:
            del counts[key]
