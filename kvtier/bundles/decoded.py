"""A prompt's KV decoded into plain tensors, one for each layer where it is known where a layer lies. For reading only.

What lies where in a chunk's payload follows from the namespace's fingerprint (the connector's
`engine/namespace/namespace_fingerprint.py`) and from how its workers fill a row (`workers/copy_plan.py`): a region for
each rank, in it for each layer of the group `blocks_per_chunk` pages. docs/format.md has the names and shapes.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvtier.bundles.bundle import Bundle, BundleChunk
from kvtier.bundles.bundle_format import DECODED, describe
from kvtier.bundles.safetensors_header import ITEM_BYTES, Tensor, build_header
from kvtier.bundles.spool import Spool
from kvtier.core.layout import GroupLayout, group_idx_of
from kvtier.ledger.rows import encode_tokens

_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_LAYER_BY_LAYER = ("LBNHC", "LBHNC")
"""Orders of dimensions (L: layers, B: blocks) in which a layer's pages lie together, each page in one piece."""


class _Part(NamedTuple):
    """A tensor, and which bytes of each chunk's payload belong to it."""

    tensor: Tensor
    group_idx: int
    payload_offset: int
    chunk_bytes: int


class DecodedFile:
    """Says where a bundle's decoded chunks lie in a file, and writes them there. Blocks: for worker threads."""

    def __init__(self, bundle: Bundle) -> None:
        num_chunks = Counter(group_idx_of(chunk.stored.key) for chunk in bundle.chunks)
        groups = [group for group in bundle.layout.groups if num_chunks[group.group_idx]]
        parts = [part for group in groups for part in _parts(bundle, group, num_chunks[group.group_idx])]
        parts.sort(key=lambda part: -ITEM_BYTES[part.tensor.dtype])  # so that all numbers are aligned
        tokens, recipe = bundle.prompt.tokens, bundle.prompt.recipe_json.encode()
        tensors = [Tensor("kvtier.tokens", "U32", (len(tokens),)), *(part.tensor for part in parts)]
        tensors.append(Tensor("kvtier.recipe", "U8", (len(recipe),)))
        self._front = build_header({DECODED: "1", **describe(bundle)}, tensors) + encode_tokens(tokens)
        self._recipe = recipe
        self._places: list[tuple[_Part, int]] = []
        self.file_bytes = len(self._front)
        for part in parts:
            self._places.append((part, self.file_bytes))
            self.file_bytes += part.tensor.num_bytes
        self.file_bytes += len(recipe)
        self._num_written: Counter[int] = Counter()

    def write_front(self, target: Spool) -> None:
        """Write everything but the chunks."""
        target.write(self._front, 0)
        target.write(self._recipe, self.file_bytes - len(self._recipe))

    def write_chunks(self, source: Spool, target: Spool, chunks: Sequence[BundleChunk]) -> None:
        """Decode the next chunks of the bundle in `source`; raises as `Spool.payload` and `Spool.write` do."""
        for chunk, _ in chunks:
            payload, group_idx = source.payload(chunk), group_idx_of(chunk.key)
            number = self._num_written[group_idx]
            for part, offset in self._places:
                if part.group_idx == group_idx:
                    data = payload[part.payload_offset : part.payload_offset + part.chunk_bytes]
                    target.write(data, offset + number * part.chunk_bytes)
            self._num_written[group_idx] += 1


def _parts(bundle: Bundle, group: GroupLayout, num_chunks: int) -> Iterator[_Part]:
    layers = _layers(bundle, group)
    for rank in range(bundle.layout.num_writers):
        offset, suffix = rank * group.useful_bytes, f".rank{rank}" if bundle.layout.num_writers > 1 else ""
        if layers is None:
            tensor = Tensor(f"group{group.group_idx}{suffix}", "U8", (num_chunks, group.useful_bytes))
            yield _Part(tensor, group.group_idx, offset, group.useful_bytes)
            continue
        for number, name in enumerate(layers.names):
            shape = (num_chunks * layers.blocks_per_chunk, layers.page_bytes // ITEM_BYTES[layers.dtype])
            chunk_bytes = layers.blocks_per_chunk * layers.page_bytes
            yield _Part(
                Tensor(name + suffix, layers.dtype, shape), group.group_idx, offset + number * chunk_bytes, chunk_bytes
            )


class _Layers(NamedTuple):
    names: Sequence[str]
    blocks_per_chunk: int
    page_bytes: int
    dtype: str


def _layers(bundle: Bundle, group: GroupLayout) -> _Layers | None:
    """Return how a region of this group divides into layers; None unless all that is known says so."""
    try:
        known = {name: json.loads(bundle.fingerprint[name]) for name in ("kv_layout", "kv_cache_dtype", "parallel")}
        blocks_per_chunk = json.loads(bundle.fingerprint["tokens"])["blocks_per_chunk"]
        (of_group,) = (each for each in json.loads(bundle.fingerprint["groups"]) if each["group"] == group.group_idx)
        layers = _Layers(of_group["layers"], blocks_per_chunk, of_group["page_bytes"], "U8")
        is_certain = (
            known["kv_layout"] in _LAYER_BY_LAYER
            and known["parallel"]["pp"] == 1  # else ranks have different layers
            and all(isinstance(name, str) for name in layers.names)
            and len({*layers.names}) * blocks_per_chunk * layers.page_bytes == group.useful_bytes  # none is padded
        )
        of_all = known["kv_cache_dtype"]  # no text where some layers have the model's own
        dtype = _DTYPES.get(of_all, "U8") if isinstance(of_all, str) and not of_group["dtypes"] else "U8"
    except (KeyError, TypeError, ValueError, RecursionError):  # another fingerprint than today's connector makes
        return None
    if not is_certain:
        return None
    return layers._replace(dtype=dtype if layers.page_bytes % ITEM_BYTES[dtype] == 0 else "U8")
