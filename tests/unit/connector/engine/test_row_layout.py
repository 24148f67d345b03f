"""What the scheduler process announces is what the workers' tensors have, though it sees less of the specs."""

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    CrossAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    SinkFullAttentionSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor

from kvtier.errors import ConfigError
from kvtier_connector.engine.chunk_keys import GroupShape
from kvtier_connector.engine.row_layout import (
    check_layer_specs,
    engine_layout,
    group_block_bytes,
    group_shapes,
    store_credits,
)
from kvtier_connector.workers import page_places
from tests.unit.connector.harness import full_spec, kv_cache_config_of, sliding_spec, vllm_config_of

SHAPE: dict[str, Any] = {"block_size": 4, "num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16}

NUM_BLOCKS = 8


def uneven_heads(num_kv_heads: list[int]) -> KVCacheConfig:
    """One group of layers of one kind and different sizes, as vLLM lays it out (DeciLM, OpenELM), layer by layer."""
    specs = {f"layer{index}": replace(full_spec(), num_kv_heads=heads) for index, heads in enumerate(num_kv_heads)}
    total = sum(spec.page_size_bytes for spec in specs.values()) * NUM_BLOCKS
    uniform = UniformTypeKVCacheSpecs.from_specs(specs)
    assert uniform is not None
    return KVCacheConfig(
        num_blocks=NUM_BLOCKS,
        kv_cache_tensors=[
            KVCacheTensor(
                size=total,
                layers=[name],
                layer_stride=spec.page_size_bytes * NUM_BLOCKS,
                block_stride=spec.page_size_bytes,
            )
            for name, spec in specs.items()
        ],
        kv_cache_groups=[KVCacheGroupSpec(layer_names=list(specs), kv_cache_spec=uniform)],
    )


@pytest.mark.parametrize("num_kv_heads", [[1, 2, 4], [4, 2, 1], [2, 2, 2]])
def test_layers_of_different_sizes_in_one_group(num_kv_heads: list[int]) -> None:
    """vLLM's scheduler has the first layer's spec only."""
    worker = uneven_heads(num_kv_heads)
    scheduler = generate_scheduler_kv_cache_config([copy.deepcopy(worker)])
    page = full_spec().page_size_bytes // full_spec().num_kv_heads
    assert group_block_bytes(worker, 0) == group_block_bytes(scheduler, 0) == sum(num_kv_heads) * page
    config: Any = vllm_config_of()
    offloading = build_offloading_config(config, scheduler)
    assert offloading.worker_kv_bytes_per_block == sum(num_kv_heads) * page
    assert engine_layout(offloading, scheduler, ()).rank_bytes == sum(num_kv_heads) * page


def test_layers_interleaved_in_a_block_are_moved_with_it() -> None:
    page = full_spec().page_size_bytes
    config = KVCacheConfig(
        num_blocks=NUM_BLOCKS,
        kv_cache_tensors=[
            KVCacheTensor(size=2 * page * NUM_BLOCKS, layers=["a", "b"], layer_stride=page, block_stride=2 * page)
        ],
        kv_cache_groups=[KVCacheGroupSpec(layer_names=["a", "b"], kv_cache_spec=full_spec())],
    )
    assert group_block_bytes(config, 0) == 2 * page


def test_padding_is_left_out() -> None:
    padded = replace(full_spec(), page_size_padded=2 * full_spec().page_size_bytes)
    assert torch.bfloat16 == padded.dtype
    config = KVCacheConfig(
        num_blocks=NUM_BLOCKS,
        kv_cache_tensors=[
            KVCacheTensor(
                size=padded.page_size_bytes * NUM_BLOCKS,
                layers=["a"],
                layer_stride=padded.page_size_bytes * NUM_BLOCKS,
                block_stride=padded.page_size_bytes,
            )
        ],
        kv_cache_groups=[KVCacheGroupSpec(layer_names=["a"], kv_cache_spec=padded)],
    )
    assert group_block_bytes(config, 0) == full_spec().page_size_bytes


def test_known_kinds_of_kv_cache() -> None:
    """A group of layers of several sizes hides theirs."""
    state = MambaSpec(block_size=4, shapes=((16,),), dtypes=(torch.float32,))
    check_layer_specs(kv_cache_config_of([full_spec(), sliding_spec(8), state]))
    check_layer_specs(uneven_heads([1, 2]))


@pytest.mark.parametrize(
    "spec",
    [CrossAttentionSpec(**SHAPE), CircularBufferSpec(**SHAPE), SinkFullAttentionSpec(**SHAPE, sink_len=4)],
    ids=lambda spec: type(spec).__name__,
)
@pytest.mark.parametrize("in_uniform_group", [False, True])
def test_other_kinds_of_kv_cache_are_refused(spec: KVCacheSpec, in_uniform_group: bool) -> None:
    """A hit must not rest on what a chunk of tokens does not hold: the encoder's states, a ring, a sink."""
    group = UniformTypeKVCacheSpecs(block_size=4, kv_cache_specs={"layer0": spec}) if in_uniform_group else spec
    config = KVCacheConfig(1, [], [KVCacheGroupSpec(layer_names=["layer0"], kv_cache_spec=group)])
    with pytest.raises(ConfigError, match=f"{type(spec).__name__}.*run without kvtier"):
        check_layer_specs(config)


def test_blocks_across_layers_of_an_old_vllm_are_announced_as_they_are_copied() -> None:
    """vLLM 0.26 to 0.28 may keep one tensor whose page holds all layers; its scheduler does not say which it does."""
    num_layers, page = 3, full_spec().page_size_bytes
    config: Any = SimpleNamespace(
        kv_cache_groups=[KVCacheGroupSpec([f"l{number}" for number in range(num_layers)], full_spec())],
        kv_cache_tensors=[SimpleNamespace(shared_by=[f"l{number}"], block_stride=0) for number in range(num_layers)],
    )
    tensor = torch.zeros((NUM_BLOCKS, num_layers * page), dtype=torch.int8)
    across = CanonicalKVCaches(
        [CanonicalKVCacheTensor(tensor, num_layers * page)], [[CanonicalKVCacheRef(0, num_layers * page)]]
    )
    (pages,) = page_places(across, blocks_per_chunk=2)
    assert (pages.page_bytes.item(), pages.block_strides.item()) == (num_layers * page, num_layers * page)
    assert group_block_bytes(config, 0) == pages.page_bytes.sum()


@pytest.mark.parametrize(
    ("max_tokens", "row_bytes", "num_credits"),
    [
        pytest.param(512, 4 << 20, 2 * 32, id="two steps"),
        pytest.param(96, 4 << 20, 16, id="short steps"),
        pytest.param(96, 64 << 10, 256, id="small chunks: 16 MiB of them"),
        pytest.param(96, 4096, 512, id="tiny chunks"),
        pytest.param(8192, 2 << 20, 1024, id="the steps of a GPU"),
        pytest.param(100_000, 4 << 20, 4096, id="long steps: what a daemon allows"),
    ],
)
def test_slots_asked_for_ahead(max_tokens: int, row_bytes: int, num_credits: int) -> None:
    """Two steps' worth, and never less than what costs next to no memory."""
    shape = GroupShape(group_idx=0, chunk_tokens=16, hashes_per_chunk=1, window_chunks=0)
    assert store_credits(max_tokens, [shape], row_bytes) == num_credits


@pytest.mark.parametrize(
    ("max_tokens", "num_credits"), [(512, 2 * (32 + 16)), (513, 2 * (33 + 17)), (528, 2 * (33 + 17)), (529, 2 * 51)]
)
def test_slots_are_for_the_chunks_of_all_groups_begun_ones_too(max_tokens: int, num_credits: int) -> None:
    shapes = [
        GroupShape(group_idx=index, chunk_tokens=tokens, hashes_per_chunk=1, window_chunks=0)
        for index, tokens in enumerate((16, 32))
    ]
    assert store_credits(max_tokens, shapes, 4 << 20) == num_credits


@pytest.mark.parametrize(("is_replicated", "num_regions"), [(False, 3), (True, 1)])
def test_a_row_has_a_region_for_each_rank_that_holds_other_bytes(is_replicated: bool, num_regions: int) -> None:
    page = full_spec().page_size_bytes
    config = kv_cache_config_of([full_spec(), sliding_spec(8)])
    plain = {"tokens_per_chunk": 8, "hashes_per_chunk": 2, "is_eagle_group": False}
    shapes = group_shapes(
        [
            SimpleNamespace(group_idx=0, sliding_window_size_in_chunks=None, **plain),
            SimpleNamespace(group_idx=1, sliding_window_size_in_chunks=3, **plain),
        ]
    )
    assert [(shape.window_chunks, shape.is_recurrent) for shape in shapes] == [(0, False), (3, False)]
    offloading: Any = SimpleNamespace(
        worker_kv_bytes_per_block=3 * page,
        cache=SimpleNamespace(blocks_per_chunk=2),
        parallel=SimpleNamespace(world_size=3),
        replicated_layout=is_replicated,
    )
    layout = engine_layout(offloading, config, shapes)
    assert (layout.num_ranks, layout.num_writers, layout.rank_bytes) == (num_regions, num_regions, 6 * page)
    assert [(group.group_idx, group.chunk_tokens, group.window_chunks) for group in layout.groups] == [
        (0, 8, 0),
        (1, 8, 3),
    ]
    assert [group.useful_bytes for group in layout.groups] == [2 * page, 2 * page]
