"""Where many chunks lie on disk, in columns: 28 bytes for each, where an object for each took 128."""

from array import array
from collections.abc import Collection, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from kvtier.core.layout import ChunkKey
from kvtier.core.stored import StoredChunk

N = TypeVar("N", bound=np.generic)

_NOWHERE = 0
"""Number of the part of a row that is not on disk."""


class Part(NamedTuple):
    """What many chunks of one pack have in common."""

    pack_id: str
    codec: str
    raw_bytes: int


class PlaceTotals(NamedTuple):
    """Of several rows together: how many lie on disk, what they take there, and what they hold."""

    num_placed: int
    stored_bytes: int
    raw_bytes: int


class PlaceColumns:
    """The place of the chunk in each row, or that it lies nowhere. Who has a row keeps its key.

    A number for each `Part` stands for it in the column; it is given out again when no row has it any longer.
    """

    def __init__(self) -> None:
        self._parts: list[Part | None] = [None]
        self._numbers: dict[Part, int] = {}
        self._num_rows = [0]  # by number of the part; the first, of nowhere, is not looked at
        self._free_numbers: list[int] = []
        self._part_of, self._offsets = array("I"), array("Q")
        self._stored_bytes, self._checksums = array("Q"), array("Q")

    @classmethod
    def of(
        cls,
        parts: Sequence[Part],
        part_of: npt.NDArray[np.int64],
        offsets: npt.NDArray[np.int64],
        stored_bytes: npt.NDArray[np.int64],
        checksums: npt.NDArray[np.int64],
    ) -> "PlaceColumns":
        """Return columns with these values, which are in range; `part_of` has indexes in `parts`."""
        columns = cls()
        columns._parts += parts
        columns._numbers = {part: number for number, part in enumerate(columns._parts) if part is not None}
        columns._num_rows += np.bincount(part_of, minlength=len(parts)).tolist()
        columns._part_of.frombytes((part_of + 1).astype(np.uint32).tobytes())
        for column, values in (
            (columns._offsets, offsets),
            (columns._stored_bytes, stored_bytes),
            (columns._checksums, checksums),
        ):
            column.frombytes(values.tobytes())
        return columns

    def __len__(self) -> int:
        return len(self._part_of)

    def append(self) -> None:
        """Add a row, which lies nowhere."""
        self._part_of.append(_NOWHERE)
        for column in (self._offsets, self._stored_bytes, self._checksums):
            column.append(0)

    @property
    def parts_by_row(self) -> Sequence[int]:
        """Of each row the number of what it is a part of, 0 if it lies nowhere: to look at many. Not to be changed."""
        return self._part_of

    def is_placed(self, row: int) -> bool:
        """Say whether the row's chunk lies on disk."""
        return self._part_of[row] != _NOWHERE

    def stored_bytes(self, row: int) -> int:
        """Return the bytes that the row's chunk takes on disk, 0 if it lies nowhere."""
        return self._stored_bytes[row] if self._part_of[row] else 0

    def totals(self, rows: Sequence[int]) -> PlaceTotals:
        """Return what these rows come to; makes no object of any."""
        part_of, parts = self._part_of, self._parts
        placed = [row for row in rows if part_of[row]]
        raw_bytes = sum([part.raw_bytes for part in [parts[part_of[row]] for row in placed] if part is not None])
        return PlaceTotals(len(placed), sum([self._stored_bytes[row] for row in placed]), raw_bytes)

    def get(self, row: int, key: ChunkKey) -> StoredChunk | None:
        """Return the place of the row's chunk, which has this key; None is nowhere."""
        part = self._parts[self._part_of[row]]
        if part is None:
            return None
        return StoredChunk(
            key, part.pack_id, self._offsets[row], self._stored_bytes[row], part.raw_bytes, part.codec,
            self._checksums[row],
        )  # fmt: skip

    def put(self, row: int, stored: StoredChunk | None) -> None:
        """The row's chunk lies here now; None is nowhere."""
        number = _NOWHERE
        if stored is not None:
            number = self._number_of(Part(stored.pack_id, stored.codec, stored.raw_bytes))
            self._offsets[row], self._stored_bytes[row] = stored.offset, stored.stored_bytes
            self._checksums[row] = stored.checksum
        self._num_rows[number] += 1
        old, self._part_of[row] = self._part_of[row], number
        self._release(old)

    def _number_of(self, part: Part) -> int:
        number = self._numbers.get(part)
        if number is None:
            if self._free_numbers:
                number = self._free_numbers.pop()
                self._parts[number] = part
            else:
                number = len(self._parts)
                self._parts.append(part)
                self._num_rows.append(0)
            self._numbers[part] = number
        return number

    def _release(self, number: int) -> None:
        self._num_rows[number] -= 1
        part = self._parts[number]
        if part is not None and not self._num_rows[number]:
            del self._numbers[part]
            self._parts[number] = None
            self._free_numbers.append(number)

    # All rows at once. Arrays are views: no row can be added while one is kept.

    @property
    def parts(self) -> Sequence[Part | None]:
        """The parts by their numbers; None is a number that no row has."""
        return self._parts

    @property
    def part_numbers(self) -> npt.NDArray[np.uint32]:
        """The number of each row's part."""
        return _view(self._part_of, np.uint32)

    @property
    def all_stored_bytes(self) -> npt.NDArray[np.uint64]:
        """The stored bytes of each row's chunk."""
        return _view(self._stored_bytes, np.uint64)

    @property
    def ends(self) -> npt.NDArray[np.uint64]:
        """Where the stored bytes of each row's chunk end in the pack."""
        ends: npt.NDArray[np.uint64] = _view(self._offsets, np.uint64) + self.all_stored_bytes
        return ends

    def is_in(self, pack_ids: Collection[str]) -> npt.NDArray[np.bool_]:
        """Say of each row whether its chunk lies in one of these packs."""
        wanted = np.array([part is not None and part.pack_id in pack_ids for part in self._parts])
        return wanted[self.part_numbers]

    def select(self, rows: npt.NDArray[np.int64]) -> "PlaceColumns":
        """Return columns with these rows, which all lie somewhere, in this order."""
        used, part_of = np.unique(self.part_numbers[rows], return_inverse=True)
        parts = [part for part in (self._parts[number] for number in used.tolist()) if part is not None]
        columns = (self._offsets, self._stored_bytes, self._checksums)
        return PlaceColumns.of(parts, part_of, *(_view(column, np.int64)[rows] for column in columns))


def _view(column: "array[int]", kind: type[N]) -> npt.NDArray[N]:
    return np.frombuffer(column, kind) if column else np.empty(0, kind)  # NumPy makes no view of nothing
