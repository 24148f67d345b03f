"""From vLLM's configuration to a running session: the Hello, the pin binder, the parts of the manager."""

import functools
import logging
import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtier._pb import engine_pb2 as pb
from kvtier.client.engine_session import PROTOCOL_VERSION, NotReadyError
from kvtier.printable import shown_url
from kvtier.version import __version__
from kvtier_connector.engine.chunk_keys import GroupShape, has_one_whole_prefix
from kvtier_connector.engine.lora_adapters import AdapterDigests
from kvtier_connector.engine.namespace_fingerprint import engine_fingerprint, weights_field
from kvtier_connector.engine.row_layout import engine_layout, group_shapes, store_credits
from kvtier_connector.engine.vllm_compat import block_hasher
from kvtier_connector.gpu_pins.block_demand import EngineShape
from kvtier_connector.scheduler.manager import EngineParts
from kvtier_connector.session.background_thread import Background
from kvtier_connector.session.daemon_events import EngineLink
from kvtier_connector.session.engine_api_client import OwnApi
from kvtier_connector.session.pin_binder import BlockHasher, PinBinder
from kvtier_connector.session.warm_start import WarmFacts, WarmStart
from kvtier_connector.settings import ConnectorSettings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.config import OffloadingConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """What this engine is; read by the session's threads, changed by nobody.

    Attributes:
        settings: The connector's settings.
        vllm_config: vLLM's configuration.
        kv_cache_config: Its KV cache groups.
        offloading: vLLM's offloading view of both.
        group_configs: vLLM's `GroupOffloadConfig` of each offloaded group.
    """

    settings: ConnectorSettings
    vllm_config: "VllmConfig"
    kv_cache_config: "KVCacheConfig"
    offloading: "OffloadingConfig"
    group_configs: Sequence[Any]

    def start_session(self) -> EngineParts:
        """Begin to attach, in the background, and return what the manager needs."""
        background = Background("kvtier-bind")
        digests = AdapterDigests(background)
        hello = HelloMaker(self)
        warm_start = self._warm_start()
        link = EngineLink(
            self.settings.socket,
            hello.make,
            lambda: PinBinder(self.shapes, self._hasher, digests, self.vllm_config.model_config.max_model_len),
            background,
            warm_start.bound if warm_start is not None else lambda attachment: None,
            self.settings.daemon_uid,
        )
        link.start()
        return EngineParts(
            link=link,
            digests=digests,
            groups=self.shapes,
            useful_bytes=tuple(group.useful_bytes for group in hello.layout.groups),
            num_credits=hello.num_credits,
            lookup_timeout_s=self.settings.lookup_timeout_s,
            prefill_tokens_per_s=self.settings.prefill_tokens_per_s,
            warm_start=warm_start,
        )

    def _warm_start(self) -> WarmStart | None:
        settings, config = self.settings, self.vllm_config
        if settings.warm_url is None:
            return None
        facts = WarmFacts(
            socket=settings.socket,
            daemon_uid=settings.daemon_uid,
            url=shown_url(settings.warm_url),
            model_names=self.model_names,
            room_tokens=self._room_tokens,
            block_tokens=config.cache_config.block_size,
            by_priority=config.scheduler_config.policy == "priority",
        )
        return WarmStart(facts, OwnApi(settings.warm_url, os.environ.get("VLLM_API_KEY", "")))

    def _room_tokens(self) -> int:
        """Return how many tokens vLLM's own cache takes; its groups share the blocks."""
        known: int | None = getattr(self.vllm_config.cache_config, "kv_cache_size_tokens", None)
        config = self.kv_cache_config
        by_blocks = config.num_blocks * self.vllm_config.cache_config.block_size // len(config.kv_cache_groups)
        return known or int(by_blocks)

    @functools.cached_property
    def model_names(self) -> list[str]:
        """Under which requests address the model, the first of them, and the path as typed."""
        model = self.vllm_config.model_config
        served = model.served_model_name
        served = [served] if isinstance(served, str) else list(served or ())
        return list(dict.fromkeys([*served, str(model.model)]))

    @functools.cached_property
    def shapes(self) -> tuple[GroupShape, ...]:
        """What decides chunk keys, per group."""
        return group_shapes(self.group_configs)

    @property
    def gpu_shape(self) -> EngineShape | None:
        """What bounds vLLM's demand for blocks; None where a hit needs more than the blocks of one prefix."""
        if len(self.kv_cache_config.kv_cache_groups) > 1 or not has_one_whole_prefix(self.shapes):
            return None
        return EngineShape.of(self.vllm_config, self.shapes[0].chunk_tokens // self.settings.blocks_per_chunk)

    def _hasher(self) -> BlockHasher:
        """Return vLLM's own block hasher. Only used after Hello, so the hash seed is there."""
        from vllm.utils.hashing import get_hash_fn_by_name

        hash_fn = get_hash_fn_by_name(self.vllm_config.cache_config.prefix_caching_hash_algo)
        hasher: BlockHasher = block_hasher(self.vllm_config, self.offloading.cache.tokens_per_hash, hash_fn)
        return hasher


class HelloMaker:
    """Makes the Hello of each session; the slow part, fingerprinting the weights, once. Session thread.

    Attributes:
        layout: The engine's row layout.
        num_credits: Arena slots to ask for ahead.
    """

    def __init__(self, facts: EngineFacts) -> None:
        self._facts = facts
        self._engine_id = uuid.uuid4().hex
        self._weights: str | None = None
        self.layout = engine_layout(facts.offloading, facts.kv_cache_config, facts.shapes)
        max_tokens = facts.vllm_config.scheduler_config.max_num_batched_tokens
        row_bytes = self.layout.num_ranks * self.layout.rank_bytes
        self.num_credits = store_credits(max_tokens, facts.shapes, row_bytes)

    def make(self, turn: int) -> pb.Hello:
        """Return the Hello; after a reset of the cache, of a namespace of its own that ends with the session.

        Raises:
            NotReadyError: vLLM has not chosen its hash seed yet: it does so after it constructs the connector.
        """
        import vllm
        from vllm.v1.core import kv_cache_utils

        none_hash: bytes | None = getattr(kv_cache_utils, "NONE_HASH", None)
        if none_hash is None:
            raise NotReadyError("vLLM is still starting")
        facts = self._facts
        return pb.Hello(
            protocol=PROTOCOL_VERSION,
            engine_id=self._engine_id,
            pid=os.getpid(),
            vllm_version=vllm.__version__,
            kvtier_version=__version__,
            model_names=facts.model_names,
            fingerprint=engine_fingerprint(
                facts.vllm_config,
                facts.kv_cache_config,
                facts.offloading,
                weights=self._weights_once(),
                none_hash=none_hash,
                epoch=f"{self._engine_id}:{turn}" if turn else "",
            ),
            layout=self.layout,
            store_credits=self.num_credits,
            ephemeral=turn > 0,
        )

    def _weights_once(self) -> str:
        if self._weights is None:
            self._weights = weights_field(self._facts.vllm_config, self._facts.settings.weights_fingerprint)
        return self._weights
