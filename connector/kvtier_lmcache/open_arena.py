"""The arena of one session: copies objects into and out of its rows."""

import ctypes
from collections.abc import Callable
from typing import Self

from kvtier._pb import engine_pb2 as pb
from kvtier.client.arena_map import ArenaMap, SessionLockHolder
from kvtier.client.engine_session import Attachment
from kvtier.client.prefaulted_rows import PrefaultedRows
from kvtier.core.arena_format import key_tag_of
from kvtier.core.layout import ChunkKey


class OpenArena:
    """A mapped arena whose session's lock is held, until `close`. One thread.

    Args:
        attachment: The session.
        object_bytes: Of each object; what a row holds of use.

    Raises:
        ArenaError: The arena cannot be mapped, or the session has ended.
    """

    def __init__(self, attachment: Attachment, object_bytes: int) -> None:
        info = attachment.welcome.arena
        self.attachment, self.num_slots = attachment, info.num_slots
        self._object_bytes = object_bytes
        self._arena = ArenaMap(info.path, info.arena_id)
        self._lock = SessionLockHolder(attachment.welcome.lock_path)
        try:
            self._lock.acquire()
        except BaseException:
            self._arena.close()
            raise
        self._rows = PrefaultedRows(self._arena, 0)

    def check_length(self) -> None:
        """Raise ArenaError if the file was shortened."""
        self._arena.check_length()

    def map_rows(self, is_wanted: Callable[[], bool]) -> float | None:
        """Map some rows before they are copied, while nothing else is to do; see `PrefaultedRows.map_some`."""
        return self._rows.map_some(is_wanted)

    def write(self, key: ChunkKey, ref: pb.SlotRef, source_address: int) -> None:
        """Copy an object into a granted slot, and stamp it."""
        ctypes.memmove(self._arena.row_address(ref.slot), source_address, self._object_bytes)
        self._arena.stamp(ref.slot, 0, key_tag_of(key), ref.generation, self._object_bytes)

    def read(self, slot: int, generation: int, destination_address: int) -> bool:
        """Copy an object out of a leased slot; False, with anything in the destination, if the slot is another's."""
        if self._arena.generation(slot) != generation:
            return False
        ctypes.memmove(destination_address, self._arena.row_address(slot), self._object_bytes)
        return self._arena.generation(slot) == generation

    def close(self) -> None:
        """Unmap, and let the daemon give the slots to others."""
        self._arena.close()
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
