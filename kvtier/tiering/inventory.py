"""What the engines of a namespace are notified of: which chunks are held, and which are not held any longer."""

from collections.abc import Callable, Sequence

from kvtier.core.layout import ChunkKey

MAX_HELD_BATCH = 4096
"""Chunks in one notification: 160 KB of keys."""


Notify = Callable[[Sequence[ChunkKey], bool], None]
"""One engine's end; never blocks: these chunks are held (True), or are not held any longer (False)."""


class Inventory:
    """Notifies every engine that is attached to a namespace. Loop thread only."""

    def __init__(self) -> None:
        self._engines: dict[Notify, None] = {}  # in order

    def add(self, notify: Notify) -> None:
        """Notify this engine from now on."""
        self._engines[notify] = None

    def remove(self, notify: Notify) -> None:
        """Stop that; an unknown one is fine."""
        self._engines.pop(notify, None)

    def announce(self, keys: Sequence[ChunkKey], *, held: bool) -> None:
        """Notify all engines, in bounded messages."""
        for start in range(0, len(keys), MAX_HELD_BATCH):
            batch = keys[start : start + MAX_HELD_BATCH]
            for notify in list(self._engines):
                notify(batch, held)
