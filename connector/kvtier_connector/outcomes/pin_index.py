"""With which pin a request begins, found by its chunk keys: dict lookups, a few for most requests.

Keys chain, so a pin that has a chunk of a full-attention group has all chunks before it. So the last chunk that a
request shares with any pin is found by bisection, and of the pins that end before it only their lengths are tried.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

from kvtier.core.layout import ChunkKey, group_idx_of
from kvtier_connector.engine.chunk_keys import GroupShape, PromptHashes

T = TypeVar("T")


class PinShare(NamedTuple):
    """What a request shares with a pin."""

    pin_id: str
    num_tokens: int  # in whole chunks
    is_whole: bool  # the request begins with the whole pin
    ends_inside: bool  # every whole chunk of the request is the pin's: it does not differ, as far as chunks tell


class PinIndex:
    """Pins by their chunks. Scheduler thread only.

    Requests are compared with chunks of one KV cache group, the first full-attention one. In models without one, pins
    have last windows only: whole pins are found, and nothing of what requests share with others.

    Args:
        groups: The engine's KV cache groups.

    Attributes:
        owners: One pin that has each chunk: the last one added, one that was unpinned only if there was no other. It
            may have ended while others have the chunk too: `_owner_of` looks for one of them when a request asks. To
            keep all pins of each chunk would take a set per chunk. For others to look into, not to change.
    """

    def __init__(self, groups: Sequence[GroupShape]) -> None:
        self._group = next((group for group in groups if not group.window_chunks), groups[0])
        self._is_only_group = len(groups) == 1
        self._pins: dict[str, Sequence[ChunkKey]] = {}  # all keys of each pin
        self._keys: dict[str, Sequence[ChunkKey]] = {}  # those of the group, in prefix order, if it has any
        self.owners: dict[ChunkKey, str] = {}
        self._more: Counter[ChunkKey] = Counter()  # how many pins have a chunk beside one; most chunks are not in it
        self._ends: dict[ChunkKey, dict[str, bool]] = {}  # last chunk -> pins that end there, and if they are pinned
        self._lengths: Counter[int] = Counter()  # how many pins have this many chunks

    def num_pins(self, key: ChunkKey) -> int:
        """Return how many pins have a chunk."""
        return 1 + self._more[key] if key in self.owners else 0

    def add(self, pin_id: str, keys: Sequence[ChunkKey], *, pinned: bool) -> None:
        """Add a pin, which is not there, by all its keys."""
        shared = [*filter(self.owners.__contains__, keys)]
        self._more.update(shared)
        owned = dict.fromkeys(keys, pin_id)
        if not pinned:
            owned |= {key: self.owners[key] for key in shared}
        self.owners |= owned
        self._pins[pin_id] = keys
        if not self._is_only_group:
            keys = [key for key in keys if group_idx_of(key) == self._group.group_idx]
        if keys:
            self._keys[pin_id] = keys
            self._ends.setdefault(keys[-1], {})[pin_id] = pinned
            self._lengths[len(keys)] += 1

    def remove(self, pin_id: str) -> Sequence[ChunkKey]:
        """Remove a pin; return the chunks that no other has. One that is not there is ignored."""
        gone = list[ChunkKey]()
        for key in self._pins.pop(pin_id, ()):
            if key in self._more:
                discount(self._more, [key])
            else:
                self.owners.pop(key, None)
                gone.append(key)
        if (keys := self._keys.pop(pin_id, None)) is not None:
            ends = self._ends[keys[-1]]
            del ends[pin_id]
            if not ends:
                del self._ends[keys[-1]]
            discount(self._lengths, [len(keys)])
        return gone

    def clear(self) -> None:
        """Remove all."""
        for each in (self._pins, self._keys, self.owners, self._more, self._ends, self._lengths):
            each.clear()

    def find(self, prompt: PromptHashes) -> PinShare | None:
        """Return the longest pin that a prompt begins with, else one that shares most chunks with it.

        A request with a salt may be restored public prompts as well as pins of its salt: what reaches further counts.
        """
        own = self._find(prompt.own, prompt.adapter_digest, self._group.num_chunks(prompt.own))
        if not prompt.public:
            return own
        public = self._find(prompt.public, prompt.adapter_digest, self._group.num_chunks(prompt.own))
        found = [share for share in (own, public) if share is not None]
        return max(found, key=lambda share: (share.is_whole, share.num_tokens), default=None)

    def _find(self, hashes: Sequence[bytes], digest: bytes | None, num_request_chunks: int) -> PinShare | None:
        group, num_chunks = self._group, self._group.num_chunks(hashes)
        if group.window_chunks:
            return self._whole_pin(hashes, digest, range(num_chunks, 0, -1), num_request_chunks)

        def differs(chunk_idx: int) -> bool:
            return group.key(hashes, chunk_idx, digest) not in self.owners

        if not num_chunks or differs(0):
            return None
        num_shared = bisect_left(range(num_chunks), True, lo=1, key=differs)
        lengths = sorted((length for length in self._lengths if length <= num_shared), reverse=True)
        if (whole := self._whole_pin(hashes, digest, lengths, num_request_chunks)) is not None:
            return whole
        pin_id = self._owner_of(group.key(hashes, num_shared - 1, digest), num_shared - 1)
        return PinShare(pin_id, num_shared * group.chunk_tokens, False, num_shared == num_request_chunks)

    def _whole_pin(
        self, hashes: Sequence[bytes], digest: bytes | None, lengths: Iterable[int], num_request_chunks: int
    ) -> PinShare | None:
        """Return a pin that ends behind one of these numbers of chunks, the first that has one."""
        for num_chunks in lengths:
            pins = self._ends.get(self._group.key(hashes, num_chunks - 1, digest))
            if pins:
                pin_id = max(pins, key=pins.__getitem__)  # a pinned one before one that was unpinned
                num_tokens = num_chunks * self._group.chunk_tokens
                return PinShare(pin_id, num_tokens, True, num_chunks == num_request_chunks)
        return None

    def _owner_of(self, key: ChunkKey, chunk_idx: int) -> str:
        """Return a pin that has this chunk; some pin has."""
        owner = self.owners[key]
        if not self._has(owner, key, chunk_idx):
            having = (each for each in self._keys if self._has(each, key, chunk_idx))
            # The scheduler's thread survives a pin of odd keys.
            owner = self.owners[key] = max(having, key=self._is_pinned, default=owner)
        return owner

    def _is_pinned(self, pin_id: str) -> bool:
        return self._ends[self._keys[pin_id][-1]][pin_id]

    def _has(self, pin_id: str, key: ChunkKey, chunk_idx: int) -> bool:
        keys = self._keys.get(pin_id, ())
        return chunk_idx < len(keys) and keys[chunk_idx] == key


def discount(counts: Counter[T], items: Iterable[T]) -> None:
    """Count each item once less; one that is not counted any longer is not in it."""
    for item in items:
        counts[item] -= 1
        if counts[item] <= 0:
            del counts[item]
