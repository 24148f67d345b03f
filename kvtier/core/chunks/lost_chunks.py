"""What is remembered of chunks that left the last tier that held them: when, and why."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvtier.core.layout import ChunkKey

MAX_LOST_CHUNKS = 262_144
"""Twice what the longest prompt has. They take 20 MB, if nothing else keeps their keys."""
MAX_BATCHES = 16_384
"""Chunks that are lost one by one, in batches of a second, are remembered for four hours at least."""
_MERGED_S = 1.0
_MERGED_KEYS = 1024
"""A batch that has as many is not added to: to search it is one step of the event loop."""


class MissingCause(StrEnum):
    """MissingChunks.Cause of proto/kvtier/v1/cache.proto, by the same names; the exact meanings stand there."""

    NOT_RECORDED = "not_recorded"
    EVICTED_BY_COMMAND = "evicted_by_command"
    EVICTED_FOR_HOST_MEMORY = "evicted_for_host_memory"
    EVICTED_FOR_DISK_SPACE = "evicted_for_disk_space"
    DROPPED_AS_DAMAGED = "dropped_as_damaged"


@dataclass(frozen=True, kw_only=True, slots=True)
class LostBatch:
    """Chunks of one namespace that were lost within a second. The list grows while its batch is the last one."""

    namespace_id: str
    cause: MissingCause
    unix_s: float
    keys: list[ChunkKey]


class LostChunks:
    """The chunks that were lost last, in batches as they were lost; the oldest batches are forgotten first.

    A chunk that is stored again stays in it, and may be in it several times: it is asked about chunks that are missing,
    and the newest batch that has one says why. To keep an index by key would cost every eviction; so the question
    costs a walk through the batches.
    """

    def __init__(self) -> None:
        self._batches: deque[LostBatch] = deque()
        self._num_keys = 0

    def __len__(self) -> int:
        return self._num_keys

    def add(self, namespace_id: str, cause: MissingCause, keys: Sequence[ChunkKey], now_unix_s: float) -> None:
        """Remember that these chunks were lost now; at most MAX_LOST_CHUNKS of them."""
        if not keys:
            return
        last = self._batches[-1] if self._batches else None
        if last is not None and _continues(last, namespace_id, cause, now_unix_s):
            last.keys.extend(keys)
        else:
            batch = LostBatch(namespace_id=namespace_id, cause=cause, unix_s=now_unix_s, keys=list(keys))
            self._batches.append(batch)
        self._num_keys += len(keys)
        while self._num_keys > MAX_LOST_CHUNKS or len(self._batches) > MAX_BATCHES:
            self._num_keys -= len(self._batches.popleft().keys)

    def newest_first(self, namespace_id: str) -> list[LostBatch]:
        """Return the batches of a namespace, as a list of their own."""
        return [batch for batch in reversed(self._batches) if batch.namespace_id == namespace_id]


def _continues(last: LostBatch, namespace_id: str, cause: MissingCause, now_unix_s: float) -> bool:
    is_alike = (last.namespace_id, last.cause) == (namespace_id, cause)
    return is_alike and len(last.keys) < _MERGED_KEYS and 0 <= now_unix_s - last.unix_s < _MERGED_S
