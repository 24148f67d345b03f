"""Counts distinct values in bounded memory."""

import bisect

_NUM_KEPT = 64
_DIGESTS = 2**64


class DistinctCounter:
    """How many different 64-bit digests were added: exact up to 63 of them, then within some 12 %.

    It keeps the 64 smallest: the closer they lie to zero, the more there were.
    Source: Bar-Yossef et al., "Counting distinct elements in a data stream", 2002 (k minimum values).
    """

    def __init__(self) -> None:
        self._smallest: list[int] = []

    def add(self, digest: int) -> None:
        """Count a digest, once; digests must be spread evenly over 64 bits."""
        place = bisect.bisect_left(self._smallest, digest)
        if digest not in self._smallest[place : place + 1]:
            self._smallest.insert(place, digest)
            del self._smallest[_NUM_KEPT:]

    def count(self) -> int:
        """Return how many there were."""
        if len(self._smallest) < _NUM_KEPT:
            return len(self._smallest)
        return (_NUM_KEPT - 1) * _DIGESTS // self._smallest[-1]
