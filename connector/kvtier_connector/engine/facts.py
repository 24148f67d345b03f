"""The facts about this engine that other parts of the connector need, from vLLM's configuration."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtier_connector.engine.chunk_keys import GroupShape, has_one_whole_prefix
from kvtier_connector.engine.row_layout import group_shapes
from kvtier_connector.engine.vllm_compat import block_hasher, hash_lookahead_tokens, vllm_is_tested
from kvtier_connector.settings import ConnectorSettings, Role

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.config import OffloadingConfig


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """vLLM's configuration of this engine. Read by every thread, changed by none."""

    settings: ConnectorSettings
    vllm_config: "VllmConfig"
    kv_cache_config: "KVCacheConfig"  # its KV cache groups
    offloading: "OffloadingConfig"  # vLLM's offloading view of both
    group_configs: Sequence[Any]  # vLLM's `GroupOffloadConfig` of each offloaded group

    @functools.cached_property
    def model_names(self) -> list[str]:
        """Names by which requests address the model, the served one first, and the path as typed."""
        model = self.vllm_config.model_config
        served = model.served_model_name
        served = [served] if isinstance(served, str) else list(served or ())
        return list(dict.fromkeys([*served, str(model.model)]))

    @functools.cached_property
    def shapes(self) -> tuple[GroupShape, ...]:
        """The properties that decide chunk keys, per group."""
        return group_shapes(self.group_configs)

    @property
    def role(self) -> Role:
        """Which half of a pair of engines this one is."""
        return Role(self.vllm_config.kv_transfer_config.kv_role)

    @property
    def announces_pins(self) -> bool:
        """Whether routers are to know of pins: by vLLM's events, of blocks of one prefix."""
        config = self.vllm_config.kv_events_config
        is_on = config is not None and config.enable_kv_cache_events
        has_one_group = len(self.kv_cache_config.kv_cache_groups) == 1 and has_one_whole_prefix(self.shapes)
        # Events of hashes that cover tokens after their block (vLLM 0.33) name those tokens; ours do not.
        has_plain_hashes = not hash_lookahead_tokens(self.vllm_config)
        return bool(is_on) and vllm_is_tested() and has_one_group and has_plain_hashes

    @property
    def keys_are_hashes(self) -> bool:
        """Whether vLLM's block hashes are long enough to be in chunk keys as they are."""
        return str(self.vllm_config.cache_config.prefix_caching_hash_algo).startswith("sha256")

    def cache_tokens(self) -> int:
        """Return how many tokens vLLM's prefix cache takes; its groups share the blocks."""
        known: int | None = getattr(self.vllm_config.cache_config, "kv_cache_size_tokens", None)
        config = self.kv_cache_config
        by_blocks = config.num_blocks * self.vllm_config.cache_config.block_size // len(config.kv_cache_groups)
        return known or int(by_blocks)

    def block_hasher(self) -> Callable[[Any], list[bytes]]:
        """Return vLLM's own block hasher. Only valid after the first Hello: by then vLLM has chosen its hash seed."""
        from vllm.utils.hashing import get_hash_fn_by_name

        hash_fn = get_hash_fn_by_name(self.vllm_config.cache_config.prefix_caching_hash_algo)
        return block_hasher(self.vllm_config, self.offloading.cache.tokens_per_hash, hash_fn)
