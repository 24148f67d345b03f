"""How this engine's chunks lie in an arena row, as the scheduler process derives it from vLLM's KV cache config."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvtier._pb import engine_pb2 as pb
from kvtier.core import limits
from kvtier.errors import ConfigError
from kvtier_connector.engine.chunk_keys import GroupShape
from kvtier_connector.engine.vllm_compat import is_recurrent, is_replicated, placements, prefix_cacheable_groups

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.config import OffloadingConfig

_CREDIT_STEPS, _MIN_CREDITS = 2, 16
_SMALL_BYTES, _MAX_SMALL = 16 * 1024**2, 512
"""Credits that cost next to no memory, whatever a step takes."""


def group_shapes(group_configs: Sequence[Any]) -> tuple[GroupShape, ...]:
    """Return what decides chunk keys, from vLLM's `GroupOffloadConfig`s."""
    return tuple(
        GroupShape(
            group_idx=config.group_idx,
            chunk_tokens=config.tokens_per_chunk,
            hashes_per_chunk=config.hashes_per_chunk,
            window_chunks=config.sliding_window_size_in_chunks or 0,
            is_recurrent=is_recurrent(config),
            is_draft=config.is_eagle_group,
        )
        for config in group_configs
    )


def num_regions(offloading: "OffloadingConfig") -> int:
    """Return the regions of a row: one per rank, or one in all when every rank holds the same bytes (MLA)."""
    return 1 if is_replicated(offloading) else int(offloading.parallel.world_size)


def rank_bytes(offloading: "OffloadingConfig") -> int:
    """Return the bytes of one rank's region."""
    return int(offloading.worker_kv_bytes_per_block) * int(offloading.cache.blocks_per_chunk)


def engine_layout(
    offloading: "OffloadingConfig", kv_cache_config: "KVCacheConfig", shapes: Sequence[GroupShape]
) -> pb.KVLayout:
    """Return the layout that Hello states. The worker checks `useful_bytes` against its tensors."""
    regions = num_regions(offloading)
    return pb.KVLayout(
        num_ranks=regions,
        num_writers=regions,
        rank_bytes=rank_bytes(offloading),
        groups=[
            pb.KVGroup(
                group_idx=shape.group_idx,
                chunk_tokens=shape.chunk_tokens,
                useful_bytes=group_block_bytes(kv_cache_config, shape.group_idx) * offloading.cache.blocks_per_chunk,
                window_chunks=shape.window_chunks,
            )
            for shape in shapes
        ],
    )


def group_block_bytes(kv_cache_config: "KVCacheConfig", group_idx: int) -> int:
    """Return the bytes that one block of a group really uses on one worker, padding left out.

    Source: `OffloadingConnectorWorker.register_kv_caches` of vLLM 0.32, which decides the same from the tensors: a
    layout that interleaves layers within a block is moved as whole blocks.
    """
    group = kv_cache_config.kv_cache_groups[group_idx]
    if stride := _packed_block_stride(kv_cache_config):
        return stride
    strides = {layer: placement.block_stride for placement in placements(kv_cache_config) for layer in placement.layers}
    return sum(_unpadded_page_bytes(group.kv_cache_spec, layer, strides.get(layer)) for layer in group.layer_names)


def check_layer_specs(kv_cache_config: "KVCacheConfig") -> None:
    """Refuse what this version cannot lay out, or does not know to be whole when a prefix ends.

    By exact type: what vLLM derives from these (sinks, ring buffers, cross attention, ...) keeps more, or less, than a
    chunk of tokens.

    Raises:
        ConfigError: The model has a kind of KV cache that kvtier does not know.
    """
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        MambaSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
    )

    known = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec, MambaSpec)
    for group in kv_cache_config.kv_cache_groups:
        for layer in group.layer_names:
            kind = type(_layer_spec(group.kv_cache_spec, layer))
            if kind not in known:
                raise ConfigError(
                    "model", kind.__name__, "vLLM", "kvtier does not know this kind of KV cache; run without kvtier"
                )


def store_credits(max_num_batched_tokens: int, shapes: Sequence[GroupShape], row_bytes: int) -> int:
    """Return how many arena slots to ask for ahead: what two full steps can store, or more where slots are small.

    Where chunks are small, steps are short: a busy daemon may grant new credits more slowly than vLLM
    computes a prompt, and what the last step offers without a slot is not stored. What that is of the arena the daemon
    bounds.
    """
    chunks = sum(-(-max_num_batched_tokens // shape.chunk_tokens) for shape in shapes)
    wanted = max(_CREDIT_STEPS * chunks, min(_MAX_SMALL, _SMALL_BYTES // max(1, row_bytes)), _MIN_CREDITS)
    return min(limits.STORE_CREDITS.most, wanted)


def _packed_block_stride(kv_cache_config: "KVCacheConfig") -> int | None:
    """Return the block stride of a layout that interleaves layers within each block, else None."""
    from vllm.v1.kv_cache_interface import AttentionSpec

    attention_layers = {
        layer
        for group in prefix_cacheable_groups(kv_cache_config)
        for layer in group.layer_names
        if isinstance(_layer_spec(group.kv_cache_spec, layer), AttentionSpec)
    }
    for placement in placements(kv_cache_config):
        # Not interleaved, all blocks of a layer come before the next layer's first.
        if placement.is_interleaved and not attention_layers.isdisjoint(placement.layers):
            return placement.block_stride
    return None


def _layer_spec(spec: Any, layer: str) -> Any:
    return spec.kv_cache_specs[layer] if hasattr(spec, "kv_cache_specs") else spec


def _unpadded_page_bytes(group_spec: Any, layer: str, block_stride: int | None) -> int:
    spec = _layer_spec(group_spec, layer)
    if block_stride is not None and block_stride != spec.page_size_bytes:
        # Layers of several sizes in one group: the scheduler only has the first one's spec. They are not padded.
        return block_stride
    if hasattr(spec, "unpadded_page_size_bytes"):
        return int(spec.unpadded_page_size_bytes)
    return int(replace(spec, page_size_padded=None).page_size_bytes)
