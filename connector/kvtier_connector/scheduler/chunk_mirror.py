"""The scheduler's mirror of the daemon: which chunks are pinned, and which the daemon holds.

Two modes (StoreMode of the proto). STORE_PINNED: the mirror is about pinned chunks, others are ignored. STORE_ALL: it
knows every chunk that the daemon holds, about 110 bytes each (22 MB for 200,000), and at most MAX_HELD_CHUNKS of them:
a chunk beyond that is a miss, and then no unpinned chunk is stored, or it would be stored again at every repeat.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Sequence

from kvtier.core.layout import ChunkKey
from kvtier_connector.engine.chunk_keys import GroupShape
from kvtier_connector.engine.public_prompts import PublicPrompts
from kvtier_connector.outcomes.pin_index import PinIndex, discount
from kvtier_connector.session.daemon_events import MAX_HELD_CHUNKS
from kvtier_connector.session.pin_binder import BoundPin

logger = logging.getLogger(__name__)


class ChunkMirror:
    """Knows which chunks may be looked up, and which to store. Scheduler thread only; dict lookups.

    Several pins share the chunks of a common prefix: the index counts how many have each.

    Args:
        groups: The engine's KV cache groups.
    """

    def __init__(self, groups: Sequence[GroupShape]) -> None:
        self.public = PublicPrompts()  # of these pins
        self._pins: dict[str, BoundPin] = {}
        self.index = PinIndex(groups)  # by their chunks, to say which pin a request begins with
        self._known = self.index.owners  # chunks of pins
        self._unpinned: Counter[ChunkKey] = Counter()  # how many of their pins were unpinned; mostly none
        self._held: set[ChunkKey] = set()
        self._missing: set[ChunkKey] = set()  # of the known: the daemon has reported that it does not hold them
        self.stores_all = False  # the session's mode is STORE_ALL
        self.num_arrivals = 0  # times that the daemon reported chunks as held that were not, of all sessions
        self.is_complete = False  # the daemon has reported everything that it holds
        self._is_full = False

    def __len__(self) -> int:
        return len(self._pins)

    def knows(self, key: ChunkKey) -> bool:
        """Return whether the chunk belongs to a pin or, storing all, is held."""
        return key in self._known or key in self._held

    def may_be_held(self, key: ChunkKey) -> bool:
        """Return whether to ask for this chunk: the daemon holds it, or may hold a pinned one."""
        return key in self._held or (key in self._known and key not in self._missing)

    def is_pinned(self, key: ChunkKey) -> bool:
        """Return whether the chunk belongs to a prompt that is pinned now."""
        return key in self._known and (key not in self._unpinned or self._unpinned[key] < self.index.num_pins(key))

    def wants(self, key: ChunkKey) -> bool:
        """Return whether to store the chunk when vLLM offers it.

        An unpinned one only once the daemon has reported all that it holds: before, everything would seem missing.
        """
        return (self.is_pinned(key) or self._wants_unpinned) and key not in self._held

    @property
    def _wants_unpinned(self) -> bool:
        return self.stores_all and self.is_complete and not self._is_full

    def add(self, pin: BoundPin) -> None:
        """Add a pin; it replaces an earlier one of the same id."""
        self.remove(pin.pin_id)
        self._pins[pin.pin_id] = pin
        self.index.add(pin.pin_id, pin.keys, pinned=pin.pinned)
        if not pin.pinned:
            self._unpinned.update(pin.keys)
        if pin.public is not None:
            self.public.add(pin.pin_id, pin.public)

    def remove(self, pin_id: str) -> None:
        """Forget a pin and the chunks that only it had."""
        pin = self._pins.pop(pin_id, None)
        if pin is None:
            return
        self.public.remove(pin_id)
        gone = self.index.remove(pin_id)
        if not pin.pinned:
            discount(self._unpinned, pin.keys)
        self._missing.difference_update(gone)
        if not self.stores_all:
            self._held.difference_update(gone)

    def set_held(self, keys: Sequence[ChunkKey], held: bool) -> None:
        """Note what the daemon holds; chunks of no pin are ignored unless all are stored."""
        keys = list(keys)  # a message's list makes new objects, with new hashes, at each walk
        if not held:
            self._missing.update(filter(self._known.__contains__, keys))
            self._held.difference_update(keys)
            self._is_full = self._is_full and len(self._held) >= MAX_HELD_CHUNKS
            return
        self._missing.difference_update(keys)
        if self.stores_all:
            self.num_arrivals += self.is_complete and bool(keys)
            self._hold(keys)
        else:
            self._held.update(filter(self._known.__contains__, keys))

    def hold_pin(self, pin_id: str) -> Sequence[ChunkKey]:
        """Note that the daemon holds every chunk of a pin, and return them; none if the pin has ended."""
        pin = self._pins.get(pin_id)
        if pin is None:
            return ()
        if self._missing:
            self._missing.difference_update(pin.keys)
        self._held.update(pin.keys)
        return pin.keys

    def _hold(self, keys: Iterable[ChunkKey]) -> None:
        for key in keys:
            if len(self._held) < MAX_HELD_CHUNKS or key in self._known:
                self._held.add(key)
            elif not self._is_full:
                self._is_full = True
                logger.warning(
                    "kvtier: the daemon holds more than %d chunks; the rest is not looked up, and nothing but pinned "
                    "prompts is stored until some are evicted; use larger chunks (blocks_per_chunk)",
                    MAX_HELD_CHUNKS,
                )

    def clear(self) -> None:
        """Forget everything: the session is over."""
        self._pins.clear()
        self.public.clear()
        self.index.clear()
        self._unpinned.clear()
        self._held.clear()
        self._missing.clear()
        self.is_complete = self._is_full = False
