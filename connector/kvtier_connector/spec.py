"""vLLM's factory hook: makes the manager in the scheduler process and the copier in the workers."""

from typing import TYPE_CHECKING, Any

from typing_extensions import override
from vllm.v1.kv_offload.base import OffloadingManager, OffloadingMetricMetadata, OffloadingSpec, OffloadingWorker

from kvtier_connector.engine.row_layout import num_regions, rank_bytes
from kvtier_connector.engine.vllm_compat import group_id_of, is_replicated
from kvtier_connector.metrics.engine_stats import definitions
from kvtier_connector.scheduler.manager import KVTierOffloadingManager
from kvtier_connector.workers import WorkerLayout, make_worker, page_places

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import CanonicalKVCaches
    from vllm.v1.kv_offload.config import OffloadingConfig


class KVTierOffloadingSpec(OffloadingSpec):
    """Named by `spec_name` in kv_connector_extra_config; the connector sets that itself."""

    def __init__(self, config: "OffloadingConfig") -> None:
        super().__init__(config)
        self.replicated_layout = is_replicated(config)

    @override
    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return definitions()

    @override
    def get_manager(self) -> OffloadingManager:
        return KVTierOffloadingManager()

    @override
    def get_worker(self, kv_caches: "CanonicalKVCaches") -> OffloadingWorker:
        config: Any = self.config
        layout = WorkerLayout(
            region=config.parallel.rank if num_regions(config) > 1 else 0,
            rank_bytes=rank_bytes(config),
            blocks_per_chunk=config.cache.blocks_per_chunk,
            group_positions={group_id_of(config, position): position for position in range(len(config.groups))},
            pages=page_places(kv_caches, config.cache.blocks_per_chunk),
        )
        return make_worker(layout, kv_caches)
