"""What is remembered of chunks that were evicted, and what a chunk that comes in is worth by that.

A chunk that comes back soon after its eviction shows that it should have stayed. Two generations of a hash table keep
the frequencies of evicted chunks in 16 bits each: 11 of the key's hash, one that says that the chunk was kept long and
not hit, and 4 of frequency. When the new generation is half full, with one and a half to three times as many chunks as
the tier holds, the old one is dropped. So what was evicted first is forgotten first, a tail before its head. Both take
12 to 24 bytes for each chunk of the tier.

A loop over more chunks than the tier holds is the exception: all of them come back, and keeping all of them a little
longer hits none. There it is best to keep some of them much longer. So the chunks of each prompt that comes in draw a
number, and until they are hit they count with `(draw / FULL_DRAW) ** spread` of their weight. At a spread of 0 all
count in full; the higher it is, the fewer are kept, and those for longer. It is learned, for new chunks and for those
that came back: it rises when chunks that were kept long come back after they were evicted without a hit, and falls when
chunks are hit in the first half of their time in the tier.
"""

import math
from array import array
from random import Random

from kvtier.core.layout import ChunkKey

MAX_REMEMBERED = 15
MIN_FIRST_USE = 0.01
_MIN_SLOTS = 256
_STEP = 4.0
FULL_DRAW = 15
"""Of chunks that were hit, or were not drawn: they count in full."""
MIN_SHARE = 0.01
MAX_SPREAD = 8.0
_SPREAD_STEP = 8.0
_EARLY_HIT = 3.0
"""What a hit in the first half of a chunk's time counts beside one that came too late. The memory of evicted chunks
reaches over some turnovers of the tier, so to hit all that comes back would take three or more times the space."""
_KEPT_SHARE = 0.5
"""From which on a chunk counts as one that was kept long."""
_TAG, _KEPT = 0xFFE0, 0x10


class _Generation:
    """A hash table of fixed size that loses an entry when both slots that it may have are taken."""

    def __init__(self, num_slots: int) -> None:
        self._slots = array("H", bytes(2 * num_slots))
        self._mask = num_slots - 1
        self.num_once = self.num_repeated = 0

    @property
    def full(self) -> bool:
        return 2 * (self.num_once + self.num_repeated) > self._mask

    def put(self, key_hash: int, frequency: int, *, kept: bool) -> None:
        slots, index = self._slots, key_hash & self._mask
        if slots[index]:
            index = (key_hash >> 20) & self._mask
            if slots[index]:
                return
        slots[index] = (key_hash >> 44) & _TAG | (_KEPT if kept else 0) | frequency
        self._count(frequency, 1)

    def pop(self, key_hash: int) -> int:
        """Take out the frequency, with `_KEPT` added where it was so; 0 when there is none."""
        slots, tag = self._slots, (key_hash >> 44) & _TAG
        index = key_hash & self._mask
        slot = slots[index]
        if not slot or slot & _TAG != tag:
            index = (key_hash >> 20) & self._mask
            slot = slots[index]
            if not slot or slot & _TAG != tag:
                return 0
        slots[index] = 0
        self._count(slot & MAX_REMEMBERED, -1)
        return slot & ~_TAG

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
        draw: Of the chunks that come in now, 1 to FULL_DRAW - 1.

    Source: N. Megiddo, D. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003. That only a part of
    a loop is to be kept: M. Qureshi et al., "Adaptive Insertion Policies for High Performance Caching", ISCA 2007, and
    N. Beckmann, D. Sanchez, "Talus: A Simple Way to Remove Cliffs in Cache Performance", HPCA 2015. How it is learned
    is ours (ADR 41).
    """

    def __init__(self) -> None:
        self._new, self._old = _Generation(_MIN_SLOTS), _Generation(_MIN_SLOTS)
        self.first_use = 1.0
        self._new_spread = self._returned_spread = 0.0
        self._random = Random(1)
        self.draw = FULL_DRAW
        self.draw_again()

    def draw_again(self) -> None:
        """What comes in from now on belongs to another prompt."""
        self.draw = self._random.randint(1, FULL_DRAW - 1)

    def share(self, draw: int, frequency: int) -> float:
        """Return the part of its weight that a chunk of this draw and frequency counts, MIN_SHARE to 1."""
        spread = self._returned_spread if frequency > 1 else self._new_spread
        return max(MIN_SHARE, math.pow(draw / FULL_DRAW, spread)) if spread else 1.0

    def note(self, key: ChunkKey, frequency: int, num_chunks: int, draw: int = FULL_DRAW) -> None:
        """The chunk was evicted from a tier of `num_chunks`; its draw is FULL_DRAW if it was hit there."""
        if self._new.full:
            num_slots = max(_MIN_SLOTS, 1 << (3 * num_chunks - 1).bit_length())
            self._new, self._old = _Generation(num_slots), self._new
        kept = draw != FULL_DRAW and self.share(draw, frequency) >= _KEPT_SHARE
        self._new.put(hash(key), min(frequency, MAX_REMEMBERED), kept=kept)

    def recall(self, key: ChunkKey, num_chunks: int) -> int:
        """The chunk is back; return how often it was used before, 0 when that is not known."""
        key_hash = hash(key)
        found = self._new.pop(key_hash) or self._old.pop(key_hash)
        frequency = found & MAX_REMEMBERED
        if frequency:
            self._adapt(frequency == 1, num_chunks)
            if found & _KEPT:
                self._spread_by(_SPREAD_STEP, frequency, num_chunks)
        return frequency

    def note_first_hit(self, draw: int, frequency: int, num_chunks: int, part_left: float) -> None:
        """A chunk that was not hit before was hit, with this part of its value left."""
        share = self.share(draw, frequency)
        if share >= _KEPT_SHARE and part_left > share / 2:
            self._spread_by(-_EARLY_HIT * _SPREAD_STEP, frequency, num_chunks)

    def _spread_by(self, step: float, frequency: int, num_chunks: int) -> None:
        step /= max(1, num_chunks)
        if frequency > 1:
            self._returned_spread = min(MAX_SPREAD, max(0.0, self._returned_spread + step))
        else:
            self._new_spread = min(MAX_SPREAD, max(0.0, self._new_spread + step))

    def _adapt(self, used_once: bool, num_chunks: int) -> None:
        num_once = 1 + self._new.num_once + self._old.num_once
        num_repeated = 1 + self._new.num_repeated + self._old.num_repeated
        share = num_repeated / num_once if used_once else num_once / num_repeated
        step = _STEP / max(1, num_chunks) * max(1.0, share) * (1 if used_once else -1)
        moved = math.log(self.first_use) + step
        self.first_use = math.exp(min(0.0, max(math.log(MIN_FIRST_USE), moved)))
