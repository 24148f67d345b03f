"""The namespace fingerprint: everything that makes KV bytes interchangeable, one canonical JSON value per field."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier_connector.engine.namespace.canonical_json import canonical
from kvtier_connector.engine.namespace.numerics import numerics
from kvtier_connector.engine.vllm_compat import built_max_model_len, group_id_of, kv_layout_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.config import OffloadingConfig

LAYOUT_VERSION = 1
"""Raised when kvtier puts the same KV into other bytes."""
_ORIGINAL_CONTEXT = "original_max_position_embeddings"
_VOLATILE_CONFIG_KEYS = frozenset({"_name_or_path", "transformers_version", "_commit_hash"})
_REMEDIES = {
    "epoch": "the cache was reset in place; earlier chunks serve again after a restart of vLLM",
    "hash_seed": "start vLLM with the PYTHONHASHSEED it had before",
    "weights": "the weight files changed",
    "hf_config": "the model's config.json or --hf-overrides changed",
    "multimodal": "options for images, audio or video changed, like --mm-processor-kwargs",
    "long_rope": "--max-model-len crossed the original context length, where LongRoPE changes",
    "vllm_version": "another vLLM version computes these bytes",
    "cpu_isa": "vLLM packs KV per CPU instruction set",
    "device": "vLLM chooses kernels, and with them the layout of KV, per kind of GPU",
    "numerics": "options of kernels or VLLM_... variables make vLLM compute other values",
    "model_class": "--model-class-overrides changed",
    "kernels": "attention kernels that divide the blocks of the KV cache in another way were chosen",
    "rocm": "vLLM chooses kernels, and with them the layout of KV, by the VLLM_ROCM_... variables",
}


def engine_fingerprint(
    vllm_config: "VllmConfig",
    kv_cache_config: "KVCacheConfig",
    offloading: "OffloadingConfig",
    *,
    weights: str,
    none_hash: bytes,
    epoch: str = "",
) -> dict[str, str]:
    """Return the fields of this engine's namespace.

    Args:
        vllm_config: The engine's configuration.
        kv_cache_config: Its KV cache groups.
        offloading: vLLM's offloading view of both.
        weights: From `weights_field`.
        none_hash: vLLM's NONE_HASH, the seed of every block hash chain.
        epoch: Not empty after a weight update in place.
    """
    import vllm

    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, offloading.parallel
    draft = vllm_config.speculative_config
    fields: dict[str, object] = {
        "weights": json.loads(weights),
        "hf_config": _model_config(model.hf_config),
        "long_rope": _has_long_factors(model),
        "dtype": str(model.dtype),
        "kv_cache_dtype": _kv_cache_dtype(cache, offloading),
        "quantization": _quantization(model),
        "kv_layout": kv_layout_of(offloading),
        "tokens": {"hash": offloading.cache.tokens_per_hash, "blocks_per_chunk": offloading.cache.blocks_per_chunk},
        "groups": _groups(kv_cache_config, offloading),
        "parallel": {
            "tp": parallel.tp_size,
            "pp": parallel.pp_size,
            "pcp": parallel.pcp_size,
            "dcp": parallel.dcp_size,
            "world": parallel.world_size,
            **_interleave(vllm_config.parallel_config),
        },
        "hash_algorithm": cache.prefix_caching_hash_algo,
        "hash_seed": hashlib.sha256(none_hash).hexdigest(),
        **_attention(vllm_config.attention_config),
        **_processor(model),
        **_multimodal(model),
        **numerics(vllm_config),
        **_adapters(getattr(vllm_config, "lora_config", None), model),
        "vllm_version": ".".join(vllm.__version__.split(".")[:2]),
        "speculative": draft and {"method": draft.method, "model": draft.model, "tokens": draft.num_speculative_tokens},
        "layout_version": LAYOUT_VERSION,
        "epoch": epoch,
    }
    return {name: canonical(value) for name, value in fields.items()}


def explain_difference(namespace_id: str, fields: list[str], num_prompts: int) -> str:
    """Return a message: why this engine cannot use what another namespace holds."""
    hints = [_REMEDIES[field] for field in fields if field in _REMEDIES]
    return (
        f"kvtier: namespace {namespace_id[:12]} of this model holds {num_prompts} prompts that this engine cannot use; "
        f"different are: {', '.join(fields) or 'unknown fields'}" + (f" ({'; '.join(hints)})" if hints else "")
    )


def _model_config(hf_config: Any) -> Mapping[str, object]:
    return {key: value for key, value in hf_config.to_dict().items() if key not in _VOLATILE_CONFIG_KEYS}


def _has_long_factors(model: Any) -> bool:
    """Return whether max_model_len makes LongRoPE take its long factors, which it then does for all positions.

    Source: `Phi3LongRoPEScaledRotaryEmbedding` of vLLM 0.32.
    """
    config = getattr(model, "hf_text_config", model.hf_config).to_dict()
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    ropes = [rope, *(per_layer_type for per_layer_type in rope.values() if isinstance(per_layer_type, Mapping))]
    originals = [
        each.get(_ORIGINAL_CONTEXT) or config.get(_ORIGINAL_CONTEXT)
        for each in ropes
        if "longrope" in (each.get("rope_type"), each.get("type"))
    ]
    max_model_len = built_max_model_len(model)
    return any(original is not None and max_model_len > original for original in originals)


def _adapters(lora: Any, model: Any) -> dict[str, object]:
    """Return the field of how LoRA adapters are applied, where that was configured; what is in them is in the keys."""
    fields: dict[str, object] = {}
    if modules := getattr(lora, "target_modules", None):
        fields["modules"] = sorted(modules)
    if (dtype := str(getattr(lora, "lora_dtype", None))) not in ("None", "auto", str(model.dtype)):
        fields["dtype"] = dtype
    return {"lora": fields} if fields else {}


def _quantization(model: Any) -> object:
    """Return how vLLM quantizes weights as it loads them, layer by layer where that was configured."""
    by_layer = getattr(model, "quantization_config", None)
    return model.quantization if by_layer is None else {"method": model.quantization, "layers": by_layer}


def _multimodal(model: Any) -> dict[str, object]:
    """Return the field of what vLLM makes of images and the like, where that was configured.

    vLLM's block hash has the input and what its request says of it. Source: `get_mm_hashes` of vLLM 0.32.
    """
    config = getattr(model, "multimodal_config", None)
    names = ("mm_processor_kwargs", "mm_encoder_attn_dtype", "video_pruning_rate")
    chosen = {name: value for name in names if (value := getattr(config, name, None))}
    if "video_pruning_rate" in chosen:
        chosen["video_pruning_method"] = getattr(config, "video_pruning_method", None)
    if scales := getattr(config, "mm_encoder_fp8_scale_path", None):
        chosen["mm_encoder_fp8_scales"] = hashlib.sha256(Path(scales).read_bytes()).hexdigest()
    return {"multimodal": chosen} if chosen else {}


def _kv_cache_dtype(cache: Any, offloading: "OffloadingConfig") -> object:
    """Return the dtype of KV, and which layers have the model's own instead: a group's sum of bytes does not say."""
    skipped = getattr(cache, "kv_cache_dtype_skip_layers", None)
    return {"dtype": offloading.model.dtype, "not": sorted(skipped)} if skipped else offloading.model.dtype


def _interleave(parallel: Any) -> dict[str, object]:
    """Return how many tokens in a row one rank has, of those that share a sequence, where that is not one."""
    num_tokens = getattr(parallel, "cp_kv_cache_interleave_size", 1)
    return {} if num_tokens == 1 else {"interleave": num_tokens}


def _groups(kv_cache_config: "KVCacheConfig", offloading: "OffloadingConfig") -> list[dict[str, object]]:
    groups: list[dict[str, object]] = []
    for position, group in enumerate(offloading.groups):
        group_id = group_id_of(offloading, position)
        spec = kv_cache_config.kv_cache_groups[group_id].kv_cache_spec
        groups.append(
            {
                "group": group_id,
                "spec": type(spec).__name__,
                "tokens_per_block": group.tokens_per_block,
                "page_bytes": spec.page_size_bytes,
                "dtypes": list(getattr(spec, "dtypes", ())),
                "window": getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None),
                "layers": list(group.layer_names),
                # Of recurrent layers: vLLM may store a state transposed (VLLM_SSM_CONV_STATE_LAYOUT).
                **({"shapes": [list(shape) for shape in spec.shapes]} if hasattr(spec, "shapes") else {}),
            }
        )
    return groups


def _attention(config: Any) -> dict[str, object]:
    """Return the fields that name the attention backends that were chosen: one for all layers, or by their kind."""
    by_kind = getattr(config, "backend_per_kind", None)
    chosen = {"attention_by_kind": {kind: str(backend) for kind, backend in by_kind.items()}} if by_kind else {}
    return {"attention": str(config.backend), **chosen}


def _processor(model: Any) -> dict[str, object]:
    """Return the fields that name the processor: the attention backend, when left to vLLM, follows from it.

    On ROCm it also follows from the environment, and one of its variables chooses another order of the values within a
    page, `VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT`. Source: `rocm_aiter_fa.py` of vLLM 0.32.
    """
    import torch
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        capability = torch.backends.cpu.get_cpu_capability()
        # With AMX, which torch does not name, vLLM packs bfloat16 in another way: `_get_attn_isa` of vLLM 0.32.
        has_amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
        return {"cpu_isa": [capability, "AMX"] if has_amx and "bfloat16" in str(model.dtype) else capability}
    fields: dict[str, object] = {"device": [current_platform.device_type, current_platform.get_device_capability()]}
    chosen = {name: value for name, value in os.environ.items() if name.startswith("VLLM_ROCM_")}
    return fields | {"rocm": chosen} if chosen and current_platform.is_rocm() else fields
