"""The Hello: what an engine says of itself when it attaches to the daemon."""

import functools
import logging
import os
import uuid

from kvtier._pb import engine_pb2 as pb
from kvtier.client.address import PROTOCOL_VERSION
from kvtier.client.engine_session import NotReadyError
from kvtier.version import __version__
from kvtier_connector.engine.facts import EngineFacts
from kvtier_connector.engine.namespace.namespace_fingerprint import engine_fingerprint
from kvtier_connector.engine.namespace.weights_field import weights_are_known, weights_field
from kvtier_connector.engine.row_layout import engine_layout, store_credits

logger = logging.getLogger(__name__)


class HelloMaker:
    """Makes the Hello of each session. The slow part, the weights fingerprint, is computed once. Session thread."""

    def __init__(self, facts: EngineFacts, *, takes_joined_keys: bool) -> None:
        self._facts, self._takes_joined_keys = facts, takes_joined_keys
        self._engine_id = uuid.uuid4().hex
        self.layout = engine_layout(facts.offloading, facts.kv_cache_config, facts.shapes)
        max_tokens = facts.vllm_config.scheduler_config.max_num_batched_tokens
        row_bytes = self.layout.num_ranks * self.layout.rank_bytes
        # A decode engine stores nothing, and Hello has to ask for one.
        self.num_credits = store_credits(max_tokens, facts.shapes, row_bytes) if facts.role.stores else 1

    def make(self, turn: int) -> pb.Hello:
        """Return the Hello; of a namespace of its own that ends with the session after a reset of the cache.

        So too where vLLM may have other weights than those of the model's files.

        Raises:
            NotReadyError: vLLM has not chosen its hash seed yet: it does so after it constructs the connector.
        """
        import vllm
        from vllm.v1.core import kv_cache_utils

        none_hash: bytes | None = getattr(kv_cache_utils, "NONE_HASH", None)
        if none_hash is None:
            raise NotReadyError("vLLM is still starting")
        facts = self._facts
        is_own = turn > 0 or not self._weights_are_known
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
                weights=self._weights,
                none_hash=none_hash,
                epoch=f"{self._engine_id}:{turn}" if is_own else "",
            ),
            layout=self.layout,
            store_credits=self.num_credits,
            ephemeral=is_own,
            report_residency=facts.announces_pins,
            takes_joined_keys=self._takes_joined_keys,
        )

    @functools.cached_property
    def _weights_are_known(self) -> bool:
        is_known = weights_are_known(self._facts.vllm_config)
        if not is_known:
            logger.warning(
                "kvtier: where load_format %s has its weights from is not known, so they cannot be distinguished: "
                "prompts are kept in host memory until vLLM ends, for this engine alone, and not on disk",
                self._facts.vllm_config.load_config.load_format,
            )
        return is_known

    @functools.cached_property
    def _weights(self) -> str:
        return weights_field(self._facts.vllm_config, self._facts.settings.weights_fingerprint)
