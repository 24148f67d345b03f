"""What is remembered of chunks that were evicted: how often they were used, and what a first use is worth by that.

A chunk that comes back soon after its eviction shows that it should have stayed. Two generations of a hash table keep
the frequencies of evicted chunks in 16 bits each: 11 of the key's hash, one that says that the slot is taken, and 4 of
frequency. When the new generation is half full, with one and a half to three times as many chunks as the tier holds,
the old one is dropped. So what was evicted first is forgotten first, a tail before its head. Both take 12 to 24 bytes
for each chunk of the tier.
"""

import math
from array import array

from kvtier.core.layout import ChunkKey

MAX_REMEMBERED = 15
MIN_FIRST_USE = 0.01
_MIN_SLOTS = 256
_STEP = 4.0
_TAG, _TAKEN = 0xFFE0, 0x10
_TAG_AND_TAKEN = _TAG | _TAKEN


class _Generation:
    """A hash table of fixed size that loses an entry when both slots that it may have are taken."""

    def __init__(self, num_slots: int) -> None:
        self._slots = array("H", bytes(2 * num_slots))
        self._mask = num_slots - 1
        self.num_once = self.num_repeated = 0

    @property
    def full(self) -> bool:
        return 2 * (self.num_once + self.num_repeated) > self._mask

    def put(self, key_hash: int, frequency: int) -> None:
        slots, index = self._slots, key_hash & self._mask
        if slots[index]:
            index = (key_hash >> 20) & self._mask
            if slots[index]:
                return
        slots[index] = (key_hash >> 44) & _TAG | _TAKEN | frequency
        self._count(frequency, 1)

    def pop(self, key_hash: int) -> int:
        slots, tag = self._slots, (key_hash >> 44) & _TAG | _TAKEN
        index = key_hash & self._mask
        if slots[index] & _TAG_AND_TAKEN != tag:
            index = (key_hash >> 20) & self._mask
            if slots[index] & _TAG_AND_TAKEN != tag:
                return 0
        frequency, slots[index] = slots[index] & MAX_REMEMBERED, 0
        self._count(frequency, -1)
        return frequency

    def _count(self, frequency: int, sign: int) -> None:
        if frequency == 1:
            self.num_once += sign
        else:
            self.num_repeated += sign


class EvictedChunks:
    """Frequencies of the chunks that were evicted last from one tier.

    Attributes:
        first_use: What the first use of a chunk counts, beside 1 for each further one; MIN_FIRST_USE to 1. It rises
            when chunks come back that were evicted after one use, and falls when those come back that were used
            repeatedly. Either counts by how rare its kind is among the remembered ones: what a slot more of each would
            have hit.

    Source: N. Megiddo, D. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003.
    """

    def __init__(self) -> None:
        self._new, self._old = _Generation(_MIN_SLOTS), _Generation(_MIN_SLOTS)
        self.first_use = 1.0

    def note(self, key: ChunkKey, frequency: int, num_chunks: int) -> None:
        """The chunk was evicted from a tier of `num_chunks`."""
        if self._new.full:
            num_slots = max(_MIN_SLOTS, 1 << (3 * num_chunks - 1).bit_length())
            self._new, self._old = _Generation(num_slots), self._new
        self._new.put(hash(key), min(frequency, MAX_REMEMBERED))

    def recall(self, key: ChunkKey, num_chunks: int) -> int:
        """The chunk is back; return how often it was used before, 0 when that is not known."""
        key_hash = hash(key)
        frequency = self._new.pop(key_hash) or self._old.pop(key_hash)
        if frequency:
            self._adapt(frequency == 1, num_chunks)
        return frequency

    def _adapt(self, used_once: bool, num_chunks: int) -> None:
        num_once = 1 + self._new.num_once + self._old.num_once
        num_repeated = 1 + self._new.num_repeated + self._old.num_repeated
        share = num_repeated / num_once if used_once else num_once / num_repeated
        step = _STEP / max(1, num_chunks) * max(1.0, share) * (1 if used_once else -1)
        moved = math.log(self.first_use) + step
        self.first_use = math.exp(min(0.0, max(math.log(MIN_FIRST_USE), moved)))
