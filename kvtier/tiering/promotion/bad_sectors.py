"""Chunks that the disk refuses to read again and again."""

import errno
import time
from collections.abc import Callable
from contextlib import suppress

from kvtier.core.stored import StoredChunk
from kvtier.errors import TierIOError
from kvtier.tiering.resources import Resources
from kvtier.tiering.tiers import Tiers

MOST_REFUSALS = 3
BETWEEN_S = 60.0
_MAX_CHUNKS = 10_000


class BadSectors:
    """Says when a chunk that cannot be read is to be taken for lost. Loop thread only.

    A refusal says nothing about the bytes: a cable, a controller or a file server may be back in a minute. But a pin
    whose chunk lies on a bad sector would be called durable for ever, and no request would hit, because an engine does
    not store what the daemon holds. So the third EIO of a chunk counts, each a minute after the one before. What is
    kept is bounded: the oldest go.
    """

    def __init__(self, tiers: Tiers, resources: Resources, now_s: Callable[[], float] = time.monotonic) -> None:
        self._tiers, self._resources, self._now_s = tiers, resources, now_s
        self._refusals: dict[StoredChunk, tuple[int, float]] = {}  # how many count, and when the last one was

    def was_read(self, stored: StoredChunk) -> None:
        """It can be read after all."""
        self._refusals.pop(stored, None)

    def is_suspect(self, stored: StoredChunk, refusal: TierIOError) -> bool:
        """Count a refusal; say whether it is the last that counts."""
        num, last_s = self._refusals.get(stored, (0, float("-inf")))
        if refusal.errno != errno.EIO or self._now_s() - last_s < BETWEEN_S:
            return False
        self._refusals.pop(stored, None)
        if num + 1 == MOST_REFUSALS:
            return True
        if len(self._refusals) >= _MAX_CHUNKS:
            del self._refusals[next(iter(self._refusals))]
        self._refusals[stored] = (num + 1, self._now_s())
        return False

    async def drop_if_disk_works(self, stored: StoredChunk) -> None:
        """Drop a suspect, so that it is stored again when it is computed; it stays if the disk refuses all else too."""
        with suppress(TierIOError):
            await self._resources.in_background(self._resources.disk.probe)
            if (finish := self._tiers.drop_damaged([stored])) is not None:
                await finish
