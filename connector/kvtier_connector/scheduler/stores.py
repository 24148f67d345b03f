"""Stores: which offered chunks are written, into which arena slots, and what the daemon is told."""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from kvtier._pb import engine_pb2 as pb
from kvtier.client.engine_session import Attachment
from kvtier.core.layout import ChunkKey
from kvtier_connector.scheduler.chunk_mirror import PinMirror

_WAIT_FOR_SLOTS_S = 1.0
_PINNED_SHARE = 4
_COMMIT_GRACE_S = 2.0


class Grant(NamedTuple):
    """An arena slot to write a chunk into."""

    slot: int
    generation: int


class StoreBook:
    """Standing credits and stores in flight of the current session. Scheduler thread only; never waits.

    Args:
        mirror: Says which chunks are wanted.
        num_credits: What Hello asked for: the most that can stand.
    """

    def __init__(self, mirror: PinMirror, num_credits: int) -> None:
        self._mirror, self._num_credits = mirror, num_credits
        self._credits: deque[Grant] = deque()
        self._num_standing = 0  # the most that stood in this session: small arenas give less than was asked for
        self._num_at_once = 1  # the most that were to be begun at once, up to half of the credits: a whole step
        self._writing: dict[ChunkKey, Grant] = {}
        self._committing: dict[ChunkKey, float] = {}
        self._orphaned: set[ChunkKey] = set()

    def add_credits(self, slots: Iterable[pb.SlotRef]) -> None:
        """Take in slots that the daemon gave ahead."""
        self._credits.extend(Grant(slot.slot, slot.generation) for slot in slots)
        self._num_standing = max(self._num_standing, len(self._credits))

    def wanted(self, keys: Sequence[ChunkKey], now_s: float) -> list[ChunkKey]:
        """Return which of these shall be stored, in the order given: not held, not on their way already."""
        return [key for key in keys if self._mirror.wants(key) and not self._is_on_its_way(key, now_s)]

    def pinned(self, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        """Return which of these are of pinned prompts."""
        return [key for key in keys if self._mirror.is_pinned(key)]

    def lacks_slots(self, num_chunks: int) -> bool:
        """Return whether waiting for credits can help: fewer stand than are needed and can be had."""
        return len(self._credits) < min(num_chunks, self._num_credits)

    def begin(self, keys: Sequence[ChunkKey], attachment: Attachment) -> list[tuple[ChunkKey, Grant]]:
        """Take slots for as many of these as there are credits, and tell the daemon; return them in the order given.

        That order is vLLM's: it pairs its blocks with our slots by it. Who gets a slot is another matter: pinned chunks
        first, and ordinary ones leave a share of the credits to pinned ones that come before the next credits do.
        """
        pinned = self.pinned(keys)[: len(self._credits)]
        chosen = {*pinned, *[key for key in keys if not self._mirror.is_pinned(key)][: self._num_for_any(len(pinned))]}
        begun = [(key, self._credits.popleft()) for key in keys if key in chosen]
        self._num_at_once = max(self._num_at_once, min(len(keys), self._num_credits // 2))
        if begun:
            self._writing.update(begun)
            message = pb.EngineMessage(store_begin=pb.StoreBegin(stores=_store_slots(begun)))
            self._tell(attachment, message, is_urgent=bool(pinned))
        if len(begun) < len(keys):
            attachment.flush()
        return begun

    def complete(self, keys: Collection[ChunkKey], attachment: Attachment | None, now_s: float) -> int:
        """All workers reported these; the daemon looks at the stamps. Stores of an earlier session end here.

        Returns:
            How many the daemon was told of.
        """
        self._orphaned.difference_update(keys)
        ours = self._writing.keys() & keys
        # In the order in which they were begun, which is prefix order; vLLM names them in none.
        done = [(key, self._writing.pop(key)) for key in list(self._writing) if key in ours] if ours else []
        if done and attachment is not None:
            self._committing.update((key, now_s + _COMMIT_GRACE_S) for key, _ in done)
            message = pb.EngineMessage(store_done=pb.StoreDone(stores=_store_slots(done)))
            self._tell(attachment, message, is_urgent=any(self._mirror.is_pinned(key) for key, _ in done))
        return len(done)

    def settled(self, keys: Iterable[ChunkKey]) -> None:
        """The daemon said whether it holds these; its commit need not be awaited any longer."""
        for key in keys:
            self._committing.pop(key, None)

    def session_lost(self) -> None:
        """The session is over: slots are the daemon's again once no worker holds the session's lock.

        vLLM's jobs go on, and name chunks, not sessions, when they end. So their chunks are not stored anew before:
        whose slots they had written could not be told.
        """
        self._orphaned.update(self._writing)
        self._credits.clear()
        self._num_standing = 0
        self._writing.clear()
        self._committing.clear()

    def jobs_dropped(self) -> None:
        """vLLM has dropped its jobs: nobody will say when they end."""
        self._orphaned.clear()

    def _num_for_any(self, num_taken: int = 0) -> int:
        """Return how many ordinary chunks could be begun now, after so many others."""
        return max(0, len(self._credits) - num_taken - self._num_standing // _PINNED_SHARE)

    def _tell(self, attachment: Attachment, message: pb.EngineMessage, *, is_urgent: bool) -> None:
        """Send with others; at once if it is urgent, or if what is left would not do for the largest step so far.

        The daemon gives new slots for those that it hears of.
        """
        is_short = self._num_for_any() < self._num_at_once
        (attachment.send if is_urgent or is_short else attachment.send_later)(message)

    def _is_on_its_way(self, key: ChunkKey, now_s: float) -> bool:
        return key in self._writing or key in self._orphaned or self._committing.get(key, now_s) > now_s


def store_deadline_s(now_s: float) -> float:
    """Return until when a request's stores wait for arena slots that are short now."""
    return now_s + _WAIT_FOR_SLOTS_S


def _store_slots(stores: Iterable[tuple[ChunkKey, Grant]]) -> list[pb.StoreSlot]:
    return [
        pb.StoreSlot(key=key, slot=pb.SlotRef(slot=grant.slot, generation=grant.generation)) for key, grant in stores
    ]
