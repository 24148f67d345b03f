"""Which prefixes came once, lately: so that one that comes once only takes no counter from one that repeats."""

from array import array
from typing import NamedTuple

import numpy as np
import xxhash

_NUM_SLOTS = 2**15  # 32 bytes each: the prefixes of the last five thousand requests at least


class EarlierRequest(NamedTuple):
    """The first request of a prefix that has come again.

    Attributes:
        weight: Of that request.
        prompt: Digest of its prompt.
        forgotten: Weight of requests before it that this prefix may have had.
    """

    weight: float
    prompt: int
    forgotten: float


class RecentPrefixes:
    """A slot for each digest by its hash: the prefix that came last, and the weight of those that it displaced.

    1 MiB, whatever comes. A tag of 64 bits stands for the prefix.
    """

    def __init__(self) -> None:
        self._tags = array("Q", bytes(8 * _NUM_SLOTS))
        self._prompts = array("Q", bytes(8 * _NUM_SLOTS))
        self._weights = array("d", bytes(8 * _NUM_SLOTS))
        self._forgotten = array("d", bytes(8 * _NUM_SLOTS))

    def take(self, digest: bytes, prompt: int, weight: float) -> EarlierRequest | None:
        """Return the earlier request of a prefix and clear its slot; None after remembering this one as the first."""
        tag = xxhash.xxh3_64_intdigest(digest)
        slot = tag % _NUM_SLOTS
        if self._tags[slot] == tag and self._weights[slot]:
            earlier = EarlierRequest(self._weights[slot], self._prompts[slot], self._forgotten[slot])
            self._weights[slot] = 0.0
            return earlier
        self._forgotten[slot] += self._weights[slot]
        self._tags[slot], self._prompts[slot], self._weights[slot] = tag, prompt, weight
        return None

    def most_forgotten(self) -> float:
        """Return the weight that any one prefix may have here at most."""
        return float(np.max(np.frombuffer(self._forgotten) + np.frombuffer(self._weights)))

    def scale_down(self, share: float) -> None:
        """Multiply all weights."""
        for weights in (self._forgotten, self._weights):
            np.multiply(weights, share, out=np.frombuffer(weights))
