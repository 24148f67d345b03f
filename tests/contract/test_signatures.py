"""What the connector overrides and uses, against what each published vLLM wheel has. Nothing of those versions was run.

`scripts/record_vllm_signatures.py` wrote the recording. A member with a version in `USES` is there from that one on,
and not before: what `kvtier_connector.engine.vllm_compat` bridges is exactly what has to be.
"""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from kvtier.vllm_versions import VLLM_SERIES, supports
from kvtier_connector.connector import KVTierConnector
from kvtier_connector.scheduler.manager import KVTierOffloadingManager
from kvtier_connector.spec import KVTierOffloadingSpec
from kvtier_connector.workers.cpu_worker import KVTierCPUWorker
from kvtier_connector.workers.cuda.cuda_worker import KVTierCUDAWorker

RECORDING: dict[str, dict[str, dict[str, Any]]] = json.loads(
    (Path(__file__).parent / "vllm_signatures.json").read_text()
)
ALWAYS = "0.26"
BASES = "v1.kv_offload.base"
CONNECTOR_V1 = "distributed.kv_transfer.kv_connector.v1"
OFFLOADING = f"{CONNECTOR_V1}.offloading"

OURS: list[tuple[type, tuple[str, ...]]] = [
    (KVTierOffloadingManager, (f"{BASES}:OffloadingManager",)),
    (KVTierOffloadingSpec, (f"{BASES}:OffloadingSpec",)),
    (KVTierCPUWorker, (f"{BASES}:OffloadingWorker",)),
    (KVTierCUDAWorker, (f"{BASES}:OffloadingWorker",)),
    (
        KVTierConnector,
        (f"{CONNECTOR_V1}.offloading_connector:OffloadingConnector", f"{CONNECTOR_V1}.base:KVConnectorBase_V1"),
    ),
]

USES: dict[str, dict[str, str]] = {
    f"{BASES}:OffloadingSpec": dict.fromkeys(("config", "extra_config"), ALWAYS),
    f"{BASES}:ReqContext": {"req_id": ALWAYS, "set_state": "0.27", "get_state": "0.27"},
    f"{BASES}:LookupResult": dict.fromkeys(("HIT", "MISS"), ALWAYS),
    f"{BASES}:OffloadPolicy": {"REQUEST_LEVEL": ALWAYS},
    f"{BASES}:RequestOffloadingContext": {"policy": ALWAYS},
    f"{BASES}:GPULoadStoreSpec": dict.fromkeys(("group_sizes", "block_indices"), ALWAYS),
    f"{BASES}:CanonicalKVCacheTensor": {"tensor": ALWAYS},
    f"{BASES}:CanonicalKVCacheRef": dict.fromkeys(("tensor_idx", "page_size_bytes"), ALWAYS),
    f"{BASES}:CanonicalKVCaches": dict.fromkeys(("tensors", "group_data_refs"), ALWAYS),
    f"{BASES}:OffloadingManager": {"get_load_source": "0.32", "lock": "0.33", "on_reset_flushed": "0.33"},
    "v1.kv_offload.config:OffloadingConfig": {
        **dict.fromkeys(("groups", "worker_kv_bytes_per_block", "model", "cache", "parallel"), ALWAYS),
        "replicated_layout": "0.27",
        "kv_cache_layout": "0.29",
    },
    "v1.kv_offload.config:OffloadingGroupConfig": {
        **dict.fromkeys(("tokens_per_block", "layer_names"), ALWAYS),
        "group_id": "0.30",
    },
    "v1.kv_offload.config:OffloadingModelConfig": {"dtype": ALWAYS},
    "v1.kv_offload.config:OffloadingCacheConfig": dict.fromkeys(("tokens_per_hash", "blocks_per_chunk"), ALWAYS),
    "v1.kv_offload.config:OffloadingParallelConfig": dict.fromkeys(
        ("rank", "world_size", "tp_size", "pp_size", "pcp_size", "dcp_size"), ALWAYS
    ),
    f"{OFFLOADING}.scheduler:OffloadingConnectorScheduler": dict.fromkeys(
        ("manager", "config", "_current_batch_jobs_to_flush"), ALWAYS
    ),
    f"{OFFLOADING}.scheduler:SchedulerOffloadConfig": {"kv_group_configs": ALWAYS, "supports_partial_tail": "0.28"},
    f"{OFFLOADING}.scheduler:GroupOffloadConfig": {
        **dict.fromkeys(
            ("group_idx", "tokens_per_chunk", "hashes_per_chunk", "sliding_window_size_in_chunks", "is_eagle_group"),
            ALWAYS,
        ),
        "requires_cow_source": "0.28",
    },
    f"{OFFLOADING}.worker:OffloadingConnectorWorker": {"worker": ALWAYS},
    f"{OFFLOADING}.metrics:OffloadingConnectorStats": dict.fromkeys(
        ("increase_counter", "observe_histogram", "set_gauge"), ALWAYS
    ),
    f"{CONNECTOR_V1}.base:KVConnectorBase_V1": {
        "get_block_ids_with_load_errors": ALWAYS,
        "get_transfer_results": "0.30",
        "unregister_kv_caches": "0.33",
        "restore_kv_caches": "0.33",
        "supports_sleep_mode": "0.33",
    },
    f"{CONNECTOR_V1}.base:KVConnectorTransferResults": {
        "": "0.30",
        "failed_recving": "0.30",
        "finished_recving": "0.30",
    },
    "v1.outputs:KVConnectorOutput": {
        **dict.fromkeys(("finished_recving", "invalid_block_ids"), ALWAYS),
        "failed_recving": "0.30",
    },
    "v1.metrics.cache_hit_source:CacheHitSource": {
        "": "0.32",
        "HOST": "0.32",
        "DISK": "0.32",
        "EXTERNAL_UNSPECIFIED": "0.32",
    },
    "v1.executor.abstract:Executor": {"add_lora": ALWAYS},
    "lora.request:LoRARequest": dict.fromkeys(("lora_name", "lora_path", "lora_int_id", "load_inplace"), ALWAYS),
    "v1.request:Request": {
        **dict.fromkeys(
            ("request_id", "lora_request", "skip_reading_prefix_cache", "is_finished", "block_hashes"), ALWAYS
        ),
        **dict.fromkeys(("kv_transfer_params", "prompt_token_ids", "prompt_embeds", "mm_features"), ALWAYS),
        **dict.fromkeys(("num_prompt_tokens", "cache_salt", "all_token_ids"), ALWAYS),
        "kv_hints": "0.31",
    },
    "v1.kv_cache_interface:KVCacheConfig": {
        **dict.fromkeys(("num_blocks", "kv_cache_tensors", "kv_cache_groups"), ALWAYS),
        "prefix_cacheable_groups": "0.30",
    },
    "v1.kv_cache_interface:KVCacheTensor": {"block_stride": ALWAYS, "layers": "0.29", "layer_stride": "0.29"},
    "v1.kv_cache_interface:KVCacheGroupSpec": dict.fromkeys(("layer_names", "kv_cache_spec"), ALWAYS),
    "v1.kv_cache_interface:KVCacheSpec": {"page_size_bytes": ALWAYS},
    "v1.kv_cache_interface:AttentionSpec": {"unpadded_page_size_bytes": ALWAYS},
    "v1.kv_cache_interface:UniformTypeKVCacheSpecs": {"kv_cache_specs": ALWAYS},
    "v1.core.kv_cache_utils:NONE_HASH": {"": ALWAYS},
    "platforms.interface:Platform": dict.fromkeys(
        ("is_cpu", "is_cuda_alike", "device_type", "device_name", "get_device_capability"), ALWAYS
    ),
    **{
        f"v1.kv_cache_interface:{kind}": {"": ALWAYS}
        for kind in (
            "FullAttentionSpec",
            "MLAAttentionSpec",
            "SlidingWindowSpec",
            "ChunkedLocalAttentionSpec",
            "MambaSpec",
        )
    },
}
GONE = {
    "v1.kv_cache_interface:KVCacheTensor": {"shared_by": "0.29"},
    f"{CONNECTOR_V1}.offloading_connector:OffloadingConnector": {"prefer_cross_layer_blocks": "0.29"},
}
CALLS: dict[str, list[str]] = {
    "_custom_ops:swap_blocks_batch": ["src_ptrs", "dst_ptrs", "sizes", "is_src_access_order_any="],
    "v1.kv_offload.cpu.swap_blocks_triton:_swap_blocks_kernel": [
        "src_addrs",
        "dst_addrs",
        "sizes",
        "n_jobs",
        "BYTES_PER_CHUNK",
    ],
    "utils.hashing:get_hash_fn_by_name": ["hash_fn_name"],
    f"{OFFLOADING}.config:build_offloading_config": ["vllm_config", "kv_cache_config"],
}
FIELDS_IN_ORDER: dict[str, list[str]] = {
    f"{BASES}:PrepareStoreOutput": ["keys_to_store", "store_spec", "evicted_keys"],
    f"{BASES}:TransferResult": ["job_id", "success", "transfer_size", "transfer_time"],
    f"{BASES}:OffloadingMetricMetadata": ["documentation", "labelnames"],
    f"{BASES}:OffloadingHistogramMetadata": ["buckets"],
}

versions = pytest.mark.parametrize("version", RECORDING)


def is_before(version: str, other: str) -> bool:
    return [int(part) for part in version.split(".")[:2]] < [int(part) for part in other.split(".")]


def facts(version: str, name: str) -> dict[str, Any] | None:
    return RECORDING[version].get(f"vllm.{name}")


def members(version: str, name: str) -> set[str]:
    found = facts(version, name)
    if found is None:
        return set()
    kinds = ("fields", "constants", "methods", "attributes", "properties")
    return {"", *(member for kind in kinds for member in found.get(kind, ()))}


def accepts(function: Any, offered: list[str]) -> str:
    """Return why an override cannot be called as vLLM calls what it overrides; empty: it can."""
    ours = list(inspect.signature(function).parameters.values())
    takes_any = {each.kind for each in ours} >= {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    names = [each.name for each in ours]
    theirs = [name.removesuffix("=") for name in offered if not name.startswith("*") and name not in ("self", "cls")]
    names = [name for name in names if name not in ("self", "cls")]
    if takes_any:
        return ""
    if names[: len(theirs)] != theirs:
        return f"vLLM passes {theirs}, we take {names}"
    optional = {each.name for each in ours if each.default is not inspect.Parameter.empty}
    missing = [name for name in names[len(theirs) :] if name not in optional]
    return f"we need {missing}, which vLLM does not pass" if missing else ""


def test_the_recording_covers_what_we_say_we_support() -> None:
    recorded = sorted({version.rsplit(".", 1)[0] for version in RECORDING})
    assert (recorded[0], recorded[-1], len(recorded)) == (*VLLM_SERIES, 8)
    assert all(supports(version) for version in RECORDING)


@versions
@pytest.mark.parametrize(("ours", "bases"), OURS, ids=lambda value: getattr(value, "__name__", ""))
def test_overrides_take_what_vllm_passes(version: str, ours: type, bases: tuple[str, ...]) -> None:
    recorded: dict[str, list[str]] = {}
    for base in reversed(bases):
        found = facts(version, base)
        assert found is not None
        recorded |= found["methods"]
    inherited = {each for base in ours.__mro__ if base.__module__.startswith("kvtier") for each in vars(base)}
    problems = {
        name: accepts(getattr(ours, name), recorded[name])
        for name in sorted(inherited & recorded.keys() - {"__init__"})
    }
    assert not {name: problem for name, problem in problems.items() if problem}


@versions
@pytest.mark.parametrize(("ours", "bases"), OURS, ids=lambda value: getattr(value, "__name__", ""))
def test_every_abstract_method_is_implemented(version: str, ours: type, bases: tuple[str, ...]) -> None:
    implemented = {each for base in ours.__mro__ if base.__module__.startswith("kvtier") for each in vars(base)}
    parent = facts(version, bases[0])
    assert parent is not None
    abstract = {name for base in bases for name in (facts(version, base) or {}).get("abstract", ())}
    assert abstract <= implemented | set(parent["methods"]) - set(parent.get("abstract", ()))


@versions
def test_what_we_use_is_there_from_its_version_on_and_not_before(version: str) -> None:
    wrong = [
        f"{name}.{member} (since {since})"
        for name, uses in USES.items()
        for member, since in uses.items()
        if (member in members(version, name)) == is_before(version, since)
    ]
    assert not wrong


@versions
def test_what_older_versions_have_instead(version: str) -> None:
    for name, uses in GONE.items():
        for member, until in uses.items():
            assert (member in members(version, name)) == is_before(version, until), f"{name}.{member}"


@versions
def test_functions_that_we_call(version: str) -> None:
    for name, parameters in CALLS.items():
        found = facts(version, name)
        assert found is not None
        assert found["parameters"] == parameters, name
    found = facts(version, "v1.core.kv_cache_utils:get_request_block_hasher")
    assert found is not None
    lookahead = [] if is_before(version, "0.33") else ["num_hash_lookahead_tokens="]
    assert found["parameters"] == ["hash_block_size", "caching_hash_fn", *lookahead]


@versions
def test_values_that_we_make(version: str) -> None:
    for name, fields in FIELDS_IN_ORDER.items():
        found = facts(version, name)
        assert found is not None
        assert found["fields"][: len(fields)] == fields, name
    spec = facts(version, f"{BASES}:GPULoadStoreSpec")
    assert spec is not None
    assert spec["methods"]["__init__"] == ["self", "block_ids", "group_sizes", "block_indices"]
