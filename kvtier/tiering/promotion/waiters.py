"""Which requests wait for which chunk, and what each of them is notified of."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from kvtier.core.layout import ChunkKey
from kvtier.core.slots import SlotRef


class PromotionListener(Protocol):
    """Leases the slots of promotions and is notified of their progress: a session."""

    def promotion_advanced(self, acquire_id: int, ready: Sequence[tuple[int, SlotRef]], failed: Sequence[int]) -> None:
        """Chunks (by index) became readable, or will not; the leases of the latter have ended already."""


class Waiter(NamedTuple):
    """One acquire of a session."""

    listener: PromotionListener
    acquire_id: int


class Waiters:
    """Who waits for which chunk, each with the chunk's index in its acquire. Loop thread only."""

    def __init__(self) -> None:
        self._indexes: dict[ChunkKey, dict[Waiter, int]] = {}

    def __len__(self) -> int:
        return len(self._indexes)

    def add(self, waiter: Waiter, index: int, key: ChunkKey) -> None:
        """The waiter is to be notified of this chunk."""
        self._indexes.setdefault(key, {})[waiter] = index

    def remove(self, waiter: Waiter, key: ChunkKey) -> None:
        """The waiter does not wait for this chunk any longer; nothing happens if it did not."""
        self._indexes.get(key, {}).pop(waiter, None)

    def of(self, key: ChunkKey) -> Collection[Waiter]:
        """Return those that wait for the chunk."""
        return self._indexes.get(key, {}).keys()

    def pop(self, key: ChunkKey) -> Mapping[Waiter, int]:
        """Return those that wait for the chunk with its index in their acquires, and forget them."""
        return self._indexes.pop(key, {})


class Notifications:
    """What waiters are notified of together: one message for each, however many chunks."""

    def __init__(self) -> None:
        self._ready: dict[Waiter, list[tuple[int, SlotRef]]] = {}
        self._failed: dict[Waiter, list[int]] = {}

    def __bool__(self) -> bool:
        return bool(self._ready or self._failed)

    def ready(self, waiters: Mapping[Waiter, int], ref: SlotRef) -> None:
        """A chunk can be read from this slot."""
        for waiter, index in waiters.items():
            self._ready.setdefault(waiter, []).append((index, ref))

    def failed(self, waiters: Mapping[Waiter, int]) -> None:
        """A chunk is a miss."""
        for waiter, index in waiters.items():
            self._failed.setdefault(waiter, []).append(index)

    def send(self) -> None:
        """Notify every waiter once."""
        for waiter in {**self._ready, **self._failed}:
            ready, failed = self._ready.get(waiter, []), self._failed.get(waiter, [])
            waiter.listener.promotion_advanced(waiter.acquire_id, ready, failed)
