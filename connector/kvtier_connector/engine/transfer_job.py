"""A load or store job as the scheduler half sends it to the workers: which chunks, in which arena."""

from dataclasses import dataclass
from typing import NamedTuple

from vllm.v1.kv_offload.base import LoadStoreSpec


class ArenaChunk(NamedTuple):
    """One chunk's place in the arena."""

    key_tag: int
    slot: int
    generation: int
    group_idx: int


class Awaited(NamedTuple):
    """Chunks of a load that are still read from disk; their rows' marks say when they can be copied."""

    indexes: tuple[int, ...]  # in `ArenaSpec.chunks`, ascending
    until_s: float  # when the job fails if not all are there, by the machine's monotonic clock
    silence_s: float  # it fails, too, when none has come for so long


@dataclass(frozen=True, kw_only=True)
class ArenaSpec(LoadStoreSpec):
    """The arena side of a load or store job; travels to the workers by pickle."""

    req_id: str  # vLLM's request, to report a failed load
    arena_id: bytes  # which arena the slots are in
    arena_path: str  # where it is mapped from
    lock_path: str  # the session's lock file
    # per offloaded group, the bytes of a chunk in one region as the engine announced them
    useful_bytes: tuple[int, ...]
    chunks: tuple[ArenaChunk, ...]  # in vLLM's order: prefix order within a group, groups one after the other
    awaited: Awaited | None = None
