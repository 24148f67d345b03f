"""The token ids of a prompt, in the four bytes each that they need: as Python's integers they take ten times that."""

import hashlib
import itertools
import sys
from array import array
from collections.abc import Iterator, Sequence
from functools import cached_property
from operator import eq
from typing import overload

_FIRST_COMPARED = 16


class TokenIds(Sequence[int]):
    """Token ids that do not change; equal to any sequence of the same ids.

    Args:
        ids: A whole `array("I")` is taken over, not copied.

    Raises:
        OverflowError: An id is negative or needs more than 32 bits.
    """

    def __init__(self, ids: "Sequence[int] | array[int]" = ()) -> None:
        self._ids: array[int] = ids if isinstance(ids, array) and ids.typecode == "I" else array("I", ids)

    @classmethod
    def of(cls, ids: Sequence[int]) -> "TokenIds":
        """Return the same ids, not copied if they are token ids already. Raises OverflowError."""
        return ids if isinstance(ids, TokenIds) else cls(ids)

    @classmethod
    def from_bytes(cls, data: bytes) -> "TokenIds":
        """Undo `to_bytes`.

        Raises:
            ValueError: The bytes are no whole number of ids.
        """
        ids = array("I")
        ids.frombytes(data)
        return cls(_little_endian(ids))

    def to_bytes(self) -> bytes:
        """Return the ids as little-endian uint32."""
        return _little_endian(self._ids[:]).tobytes() if sys.byteorder == "big" else self._ids.tobytes()

    def to_list(self) -> list[int]:
        """Return the ids as Python's integers; protobuf takes a list in a third of the time."""
        return self._ids.tolist()

    @property
    def num_bytes(self) -> int:
        """Memory that they take."""
        return len(self._ids) * self._ids.itemsize

    def begins_with(self, other: "TokenIds") -> bool:
        """Return whether these ids begin with all of the other ones.

        Of many prompts that share a beginning most differ in the last of these ids: that is compared first.
        """
        mine, its = memoryview(self._ids), memoryview(other._ids)
        if len(its) > len(mine) or (len(its) and mine[len(its) - 1] != its[-1]):
            return False
        return mine[: len(its)].tobytes() == its.tobytes()  # memoryviews are compared item by item

    def num_shared(self, other: "TokenIds") -> int:
        """Return how many ids are equal, from the first on. Most differ early, so short parts are compared first."""
        mine, its = memoryview(self._ids), memoryview(other._ids)
        start, end, num_ids = 0, min(len(mine), len(its)), _FIRST_COMPARED
        while start < end:
            stop = min(start + num_ids, end)
            one, two = mine[start:stop].tobytes(), its[start:stop].tobytes()
            if one != two:
                difference = int.from_bytes(one, "little") ^ int.from_bytes(two, "little")
                lowest_bit = (difference & -difference).bit_length() - 1
                return start + lowest_bit // (8 * self._ids.itemsize)
            start, num_ids = stop, 2 * num_ids
        return end

    @cached_property
    def digest(self) -> str:
        """Return a short digest, empty for no ids."""
        return hashlib.sha256(self.to_bytes()).hexdigest()[:12] if self._ids else ""

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> "TokenIds": ...

    def __getitem__(self, index: int | slice) -> "int | TokenIds":
        return TokenIds(self._ids[index]) if isinstance(index, slice) else self._ids[index]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenIds):
            return self is other or self._ids.tobytes() == other._ids.tobytes()
        if isinstance(other, Sequence):
            return len(self) == len(other) and all(map(eq, self, other))
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self._ids.tobytes())


def _little_endian(ids: "array[int]") -> "array[int]":
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


def common_prefix(sequences: Sequence[Sequence[int]]) -> list[int]:
    """Return the tokens with which all begin."""
    columns = zip(*sequences, strict=False)
    return [column[0] for column in itertools.takewhile(lambda column: len(set(column)) == 1, columns)]
