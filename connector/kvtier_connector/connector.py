"""vLLM's KV connector: OffloadingConnector with kvtier's manager, worker and lookups.

Source: `OffloadingConnector` of vLLM 0.32, which brings chunk keys, hybrid groups, preemption fences and job tracking.
"""

import logging
from typing import TYPE_CHECKING, Any

from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.platforms import current_platform

from kvtier_connector.engine import EngineFacts
from kvtier_connector.layout import check_layer_specs
from kvtier_connector.logs import share_vllm_handlers
from kvtier_connector.manager import KVTierOffloadingManager
from kvtier_connector.settings import check_vllm_config, name_our_spec, parse_settings
from kvtier_connector.worker import KVTierCPUWorker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class KVTierConnector(OffloadingConnector):
    """The connector that `--kv-transfer-config` names.

    Raises:
        ConfigError: A setting is unknown or rules kvtier out; the message names the remedy.
        NotImplementedError: vLLM does not run on its CPU platform.
    """

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        share_vllm_handlers()
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        settings = parse_settings(extra)
        check_vllm_config(vllm_config)
        _check_platform()
        check_layer_specs(kv_cache_config)
        name_our_spec(extra)
        super().__init__(vllm_config, role, kv_cache_config)
        self._manager: KVTierOffloadingManager | None = None
        if self.connector_scheduler is not None:
            facts = EngineFacts(
                settings=settings,
                vllm_config=vllm_config,
                kv_cache_config=kv_cache_config,
                offloading=build_offloading_config(vllm_config, kv_cache_config),
                group_configs=self.connector_scheduler.config.kv_group_configs,
            )
            self._manager = self.connector_scheduler.manager
            self._manager.start(facts.start_session())

    @property
    def manager(self) -> KVTierOffloadingManager:
        """The scheduler half's manager."""
        assert self._manager is not None
        return self._manager

    @override
    def on_new_request(self, request: "Request") -> None:
        self.manager.register(request)
        super().on_new_request(request)

    @override
    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        # While the daemon's answer is awaited vLLM's scan must not begin: it repeats at every step.
        if not self.manager.advance(request, num_computed_tokens):
            return None, False
        matched: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return matched

    @override
    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self.manager.allocated(request.request_id)

    @override
    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> "KVConnectorMetadata":
        self.manager.step_began(scheduler_output.total_num_scheduled_tokens)
        return super().build_connector_meta(scheduler_output)

    @override
    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        for req_id in connector_output.failed_recving or ():
            self.manager.load_failed(req_id)
        super().update_connector_output(connector_output)

    @override
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        # vLLM's base asserts that every transfer succeeded, so failures take this road around it.
        results = super().get_transfer_results(finished_req_ids)
        assert self.connector_worker is not None
        worker = self.connector_worker.worker
        if isinstance(worker, KVTierCPUWorker):
            results.failed_recving |= worker.take_failed_loads() & results.finished_recving
        return results

    @override
    def reset_cache(self) -> bool | None:
        # vLLM 0.32 asserts that the workers have been told of the jobs of the last reset; an idle engine tells nobody.
        assert self.connector_scheduler is not None
        to_flush = self.connector_scheduler._current_batch_jobs_to_flush
        untold = set(to_flush)
        to_flush.clear()
        was_reset: bool | None = super().reset_cache()
        to_flush.update(untold)
        return was_reset

    @override
    @classmethod
    def build_prom_metrics(cls, vllm_config: "VllmConfig", *args: Any, **kwargs: Any) -> Any:
        # Runs in the API server's process, where no connector is constructed.
        name_our_spec(vllm_config.kv_transfer_config.kv_connector_extra_config)
        return super().build_prom_metrics(vllm_config, *args, **kwargs)


def _check_platform() -> None:
    if not current_platform.is_cpu():
        raise NotImplementedError(
            f"this version of kvtier works on vLLM's CPU platform only, not on {current_platform.device_name}; start "
            "vLLM without the kvtier connector"
        )
