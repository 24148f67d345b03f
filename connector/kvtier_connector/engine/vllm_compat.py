"""Where vLLM's versions differ in what the connector uses: here and nowhere else. `kvtier.vllm_versions` has the range.

Each function names the difference that it bridges, and the version that brought the newest form. The test
`tests/contract/test_signatures` compares both sides with what `scripts/record_vllm_signatures.py` read in the wheels.
"""

import enum
import functools
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import vllm

from kvtier.errors import ConfigError
from kvtier.vllm_versions import TESTED_VERSIONS, VLLM_SERIES, is_tested, supports

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.base import ReqContext
    from vllm.v1.kv_offload.config import OffloadingConfig

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource as CacheHitSource  # for the manager
except ImportError:

    class CacheHitSource(enum.Enum):  # type: ignore[no-redef]
        """What vLLM asks for from 0.32 on; older versions do not ask."""

        HOST = "host"
        DISK = "disk"
        EXTERNAL_UNSPECIFIED = "external_unspecified"


_RANDOM_SUFFIX = re.compile(r"-[0-9a-f]{8}$")
_State = TypeVar("_State")
_STATE = "_kvtier_state"


def vllm_is_tested() -> bool:
    """Return whether this vLLM was run with kvtier. Only there does kvtier move vLLM's own blocks."""
    return is_tested(str(vllm.__version__))


def version_warning() -> str:
    """Return what an operator should know about the version of this vLLM; empty for a tested one."""
    version = str(vllm.__version__)
    if is_tested(version):
        return ""
    if not supports(version):
        return f"vLLM {version} is not supported, only {' to '.join(VLLM_SERIES)} is; install that. gpu_pin is off"
    return (
        f"vLLM {version} was never run with kvtier, only {TESTED_VERSIONS} were; what differs is known from its wheel. "
        "gpu_pin, which moves vLLM's own blocks, is off there"
    )


def client_request_id(request_id: str) -> str:
    """Return a request's id as its client knows it: vLLM appends eight random hex digits to that.

    Source: `InputProcessor.assign_request_id` of vLLM 0.32.
    """
    is_plain = os.environ.get("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "0") not in ("", "0")
    return request_id if is_plain else _RANDOM_SUFFIX.sub("", request_id)


def cache_hit_sources(connector_scheduler: Any, request: Any, num_external_tokens: int) -> dict[str, int]:
    """Return by source what of a prompt is loaded; vLLM tells them apart from 0.32 on."""
    split = getattr(connector_scheduler, "get_external_cache_hit_sources", None)
    if split is None or not num_external_tokens:
        return {"external_unspecified": num_external_tokens}
    return {source.value: num_tokens for source, num_tokens in split(request, num_external_tokens).items()}


def attach(context: "ReqContext", state: object) -> None:
    """Keep our state with vLLM's request. `ReqContext.set_state` is there from 0.27 on."""
    if hasattr(context, "set_state"):
        context.set_state(state)
    else:
        setattr(context, _STATE, state)


def attached(context: "ReqContext", kind: type[_State]) -> _State:
    """Return what `attach` kept."""
    state = context.get_state(kind) if hasattr(context, "get_state") else getattr(context, _STATE, None)
    assert isinstance(state, kind), "on_new_request comes first"
    return state


@functools.cache
def names_failed_requests() -> bool:
    """Return whether workers name requests whose loads failed (from 0.30 on), or blocks (before that)."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    return hasattr(base, "KVConnectorTransferResults")


def failed_requests(output: Any, loading: Mapping[str, Collection[int]]) -> Collection[str]:
    """Return which of the requests that are `loading` failed; each step asks. Others are of other connectors."""
    if hasattr(output, "failed_recving"):
        return loading.keys() & output.failed_recving if output.failed_recving else ()
    if not (blocks := output.invalid_block_ids):
        return ()
    return {req_id for req_id, of_request in loading.items() if not blocks.isdisjoint(of_request)}


def note_allocated_blocks(connector_scheduler: Any, blocks: "KVCacheBlocks") -> None:
    """Have vLLM's offloading scheduler know all blocks that a step gives to requests, as it does itself from 0.33 on.

    Before that it did not know those that another connector of a `MultiConnector` loads into, and flushed no store that
    still read them: the other one's bytes were stored.
    """
    allocated = getattr(connector_scheduler, "_current_batch_allocated_block_ids", None)
    if allocated is not None:
        allocated.update(block.block_id for group in blocks.blocks for block in group if block.block_id)


def overwrites_before_flush(vllm_config: "VllmConfig") -> bool:
    """Return whether a step zeroes re-allocated blocks, or copies over them, before stores of them can be flushed.

    Source: vLLM 0.32, Model Runner V2 (`v1/worker/gpu/model_runner.py`): `update_requests` comes before the connector's
    `handle_preemptions`. V1 calls them in the other order.
    """
    return bool(getattr(vllm_config, "use_v2_model_runner", False))


def check_failed_loads_can_be_named(kv_cache_config: "KVCacheConfig") -> None:
    """Refuse models for which an old vLLM cannot take back a failed load: it would go on with wrong bytes.

    Source: `_update_requests_with_invalid_blocks` of vLLM 0.26 to 0.29, which takes one list of blocks per request.

    Raises:
        ConfigError: vLLM names blocks, and the model has several groups or recurrent state.
    """
    from vllm.v1.kv_cache_interface import MambaSpec

    groups = kv_cache_config.kv_cache_groups
    if names_failed_requests() or (len(groups) == 1 and not isinstance(groups[0].kv_cache_spec, MambaSpec)):
        return
    raise ConfigError(
        "vllm",
        "before 0.30",
        "vLLM",
        "it cannot take back a failed load of a model with several kinds of KV cache, or with recurrent state; use "
        "vLLM 0.30 or later for this model, or run without kvtier",
    )


def is_replicated(offloading: "OffloadingConfig") -> bool:
    """Return whether every rank holds the same bytes and one writes them; from 0.27 on, before that all do."""
    return bool(getattr(offloading, "replicated_layout", False))


def kv_layout_of(offloading: "OffloadingConfig") -> object:
    """Return the order of dimensions in a page; from 0.29 on.

    Before that the workers choose it with their attention backend, and the scheduler's process does not know it: then
    everything is named that the choice depends on beside the version, the model and the device.
    """
    if hasattr(offloading, "kv_cache_layout"):
        return offloading.kv_cache_layout
    chosen = {name: os.environ.get(name) for name in ("VLLM_KV_CACHE_LAYOUT", "VLLM_ATTENTION_BACKEND")}
    return {**chosen, **{name: _installed_version(name) for name in ("flashinfer-python", "flash-attn")}}


def built_max_model_len(model: Any) -> int:
    """Return the `max_model_len` with which vLLM built the model.

    With `--max-model-len auto` vLLM then shortens it to what the KV cache has blocks for. Source:
    `_auto_fit_max_model_len` in `v1/core/kv_cache_utils.py` of vLLM 0.32.
    """
    if getattr(model, "original_max_model_len", None) == -1:
        return int(model.get_and_verify_max_len(-1))
    return int(model.max_model_len)


def block_major_layout() -> str | None:
    """Return vLLM's name of the layout with all layers of a block together; None before 0.29."""
    try:
        from vllm.v1.kv_cache_layout import KVCacheLayout
    except ImportError:
        return None
    return str(KVCacheLayout.BLHNC.name)


def _installed_version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def group_id_of(offloading: "OffloadingConfig", position: int) -> int:
    """Return a group's index among the model's. From 0.30 on some may be left out; before that none is."""
    return int(getattr(offloading.groups[position], "group_id", position))


def is_recurrent(group_config: Any) -> bool:
    """Return whether a `GroupOffloadConfig` is of recurrent state; from 0.28 on, and refused before 0.30."""
    return bool(getattr(group_config, "requires_cow_source", False))


def offer_whole_chunks_only(connector_scheduler: Any) -> None:
    """Have vLLM's offloading scheduler offer no part of a block that a prompt ends in: nothing asks for it.

    From 0.28 on it does, for models with recurrent state and a `prefix_match_unit` that is finer than their blocks.
    """
    config = connector_scheduler.config
    if getattr(config, "supports_partial_tail", False):
        connector_scheduler.config = config._replace(supports_partial_tail=False)


class TensorPlacement(NamedTuple):
    """Layers whose pages lie in one allocation."""

    layers: list[str]
    block_stride: int | None  # bytes from a block to the next; None where it is the page of each layer's spec
    is_interleaved: bool  # all layers of a block come before the next block


def placements(kv_cache_config: "KVCacheConfig") -> Iterable[TensorPlacement]:
    """Yield where layers lie: with strides of layers from 0.29 on, with one for packed blocks only before that."""
    for tensor in kv_cache_config.kv_cache_tensors:
        if hasattr(tensor, "layer_stride"):
            yield TensorPlacement(tensor.layers, tensor.block_stride, tensor.layer_stride < tensor.block_stride)
        else:
            yield TensorPlacement(tensor.shared_by, tensor.block_stride or None, bool(tensor.block_stride))


def prefix_cacheable_groups(kv_cache_config: "KVCacheConfig") -> Iterable[Any]:
    """Return the groups that prefix caching knows; a list of their own from 0.30 on."""
    groups: Iterable[Any] = getattr(kv_cache_config, "prefix_cacheable_groups", kv_cache_config.kv_cache_groups)
    return groups


def hash_lookahead_tokens(config: "VllmConfig") -> int:
    """Return how many tokens after its block a hash covers: none before 0.33."""
    return int(getattr(config, "num_hash_lookahead_tokens", None) or 0)


def block_hasher(
    config: "VllmConfig", tokens_per_hash: int, hash_fn: Callable[[Any], bytes]
) -> Callable[[Any], list[bytes]]:
    """Return vLLM's own block hasher, as its engine makes it; from 0.33 on a hash may cover tokens after its block."""
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher

    lookahead = getattr(config, "num_hash_lookahead_tokens", None)
    hasher: Callable[[Any], list[bytes]] = get_request_block_hasher(
        tokens_per_hash, hash_fn, *([] if lookahead is None else [lookahead])
    )
    return hasher
