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


@dataclass(frozen=True, kw_only=True)
class ArenaSpec(LoadStoreSpec):
    """The arena side of a load or store job; travels to the workers by pickle.

    Attributes:
        req_id: vLLM's request, to report a failed load.
        arena_id: Which arena the slots are in.
        arena_path: Where it is mapped from.
        lock_path: The session's lock file.
        useful_bytes: Per offloaded group, the bytes of a chunk in one region as the engine announced them.
        chunks: In vLLM's order: prefix order within a group, groups one after the other.
    """

    req_id: str
    arena_id: bytes
    arena_path: str
    lock_path: str
    useful_bytes: tuple[int, ...]
    chunks: tuple[ArenaChunk, ...]
