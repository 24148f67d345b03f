"""What LMCache's objects are in kvtier's terms: which namespace they belong to, and their chunk keys.

Objects are duck-typed here, so that nothing of this imports LMCache or torch.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtier._pb import engine_pb2 as pb
from kvtier.core.layout import ChunkKey, suffix_of

_WORLD_SIZE_SHIFT = 24  # ObjectKey.ComputeKVRank packs world size, rank, local world size, local rank, 8 bits each


class ObjectName(Protocol):
    """LMCache's `ObjectKey`."""

    @property
    def chunk_hash(self) -> bytes: ...
    @property
    def model_name(self) -> str: ...
    @property
    def kv_rank(self) -> int: ...
    @property
    def object_group_id(self) -> int: ...
    @property
    def cache_salt(self) -> str: ...


@dataclass(frozen=True)
class ObjectFamily:
    """What LMCache's keys say of a layout: their objects have one size and one meaning."""

    model_name: str
    world_size: int
    group_id: int


@dataclass(frozen=True)
class ObjectLayout:
    """A family and how each of its objects lies in memory; makes one namespace.

    Attributes:
        parts: Shape and dtype of each tensor in an object, as text.
        object_bytes: Of each object.
    """

    family: ObjectFamily
    parts: tuple[tuple[str, str], ...]
    object_bytes: int

    def fingerprint(self) -> dict[str, str]:
        """Return the fields of Hello that name the namespace."""
        family = self.family
        fields = {
            "lmcache.model": family.model_name,
            "lmcache.world_size": family.world_size,
            "lmcache.object_group": family.group_id,
            "lmcache.layout": self.parts,
            "lmcache.object_bytes": self.object_bytes,
        }
        return {name: json.dumps(value) for name, value in fields.items()}

    def kv_layout(self) -> pb.KVLayout:
        """Return a layout of one rank, whose chunk is an object, and one "token" long."""
        group = pb.KVGroup(group_idx=0, chunk_tokens=1, useful_bytes=self.object_bytes)
        return pb.KVLayout(num_ranks=1, rank_bytes=self.object_bytes, num_writers=1, groups=[group])


def family_of(name: ObjectName) -> ObjectFamily:
    """Return the family of an object; ranks of one world share it, since their objects are alike."""
    return ObjectFamily(name.model_name, name.kv_rank >> _WORLD_SIZE_SHIFT & 0xFF, name.object_group_id)


def pin_model_of(layout: ObjectLayout) -> str:
    """Return the name by which pins address a layout, and no vLLM."""
    digest = hashlib.sha256(repr(sorted(layout.fingerprint().items())).encode()).hexdigest()
    return f"lmcache/{layout.family.model_name}@{digest[:12]}"


def parts_of(shapes: Sequence[object], dtypes: Sequence[object]) -> tuple[tuple[str, str], ...]:
    """Return shapes and dtypes of torch as text."""
    texts = ("x".join(map(str, shape)) for shape in shapes)  # type: ignore[call-overload]
    return tuple(zip(texts, map(str, dtypes), strict=True))


def chunk_key_of(name: ObjectName) -> ChunkKey:
    """Return the chunk key: a digest of everything in LMCache's key, each field with its length."""
    digest = hashlib.sha256()
    for field in (name.model_name.encode(), name.cache_salt.encode(), name.chunk_hash):
        digest.update(len(field).to_bytes(8, "big") + field)
    digest.update(f"{name.kv_rank}:{name.object_group_id}".encode())
    return digest.digest() + suffix_of(0)
