"""A connector that does nothing: what vLLM itself pays for having one. Runs in vLLM's processes."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata


class BareConnector(KVConnectorBase_V1):
    """Knows nothing, stores nothing."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing to load."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is being loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved."""

    def wait_for_save(self) -> None:
        """Nothing is being saved."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Nothing matches."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """There is no state."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """There is nothing to send to workers."""
        return KVConnectorMetadata()
