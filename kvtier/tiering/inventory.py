"""What the engines of a namespace are notified of: which chunks are held, and which are not held any longer."""

from collections.abc import Sequence
from typing import Protocol

from kvtier.core.layout import ChunkKey

MAX_HELD_BATCH = 4096
"""Chunks in one notification: 160 KB of keys."""


class HeldListener(Protocol):
    """One engine's end; never blocks."""

    def chunks_held(self, keys: Sequence[ChunkKey], held: bool) -> None:
        """These chunks are held, or are not held any longer."""


class Inventory:
    """Notifies every engine that is attached to a namespace. Loop thread only."""

    def __init__(self) -> None:
        self._listeners: dict[int, HeldListener] = {}  # by identity

    def add(self, listener: HeldListener) -> None:
        """Notify this engine from now on."""
        self._listeners[id(listener)] = listener

    def remove(self, listener: HeldListener) -> None:
        """Stop that; an unknown one is fine."""
        self._listeners.pop(id(listener), None)

    def announce(self, keys: Sequence[ChunkKey], *, held: bool) -> None:
        """Notify all engines, in bounded messages."""
        for start in range(0, len(keys), MAX_HELD_BATCH):
            batch = keys[start : start + MAX_HELD_BATCH]
            for listener in list(self._listeners.values()):
                listener.chunks_held(batch, held)
