"""vLLM's KV connector: OffloadingConnector with kvtier's manager, worker and lookups.

Source: `OffloadingConnector` of vLLM 0.32, which brings chunk keys, hybrid groups, preemption fences and job tracking.
"""

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.platforms import current_platform

from kvtier.errors import ConfigError
from kvtier.obs import trace
from kvtier_connector import startup
from kvtier_connector.admission import Admission
from kvtier_connector.engine.facts import EngineFacts
from kvtier_connector.engine.pipeline_stages import check_pipeline_stages
from kvtier_connector.engine.row_layout import check_layer_specs
from kvtier_connector.engine.vllm_block_pool import index_of, is_empty
from kvtier_connector.engine.vllm_compat import (
    block_major_layout,
    cache_hit_sources,
    check_failed_loads_can_be_named,
    failed_requests,
    names_failed_requests,
    note_allocated_blocks,
    offer_whole_chunks_only,
    overwrites_before_flush,
    version_warning,
    vllm_is_tested,
)
from kvtier_connector.engine.weights.weight_changes import watch_weight_changes
from kvtier_connector.gpu_pins import GpuPins
from kvtier_connector.scheduler.manager import KVTierOffloadingManager
from kvtier_connector.scheduler.steps.decoding_requests import DecodingRequests
from kvtier_connector.scheduler.steps.idle_wait import idle_wait_s
from kvtier_connector.scheduler.steps.old_blocks import forget_blocks
from kvtier_connector.scheduler.steps.split_offers import offer_again
from kvtier_connector.session.device_blocks import DeviceBlocks
from kvtier_connector.settings import check_vllm_config, name_our_spec, parse_settings
from kvtier_connector.workers import KVTierWorker

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorTransferResults
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_NEW_ARENA = "kvtier_new_arena"
"""Attribute of the metadata of a step: the arena of a session that has begun."""
_IS_EMPTY = "kvtier_is_empty"
"""Attribute of the metadata of a step that computes nothing."""


class KVTierConnector(OffloadingConnector):
    """The connector that `--kv-transfer-config` names.

    Raises:
        ConfigError: A setting is unknown or rules kvtier out; the message names the remedy.
        NotImplementedError: vLLM runs neither on its CPU platform nor on CUDA.
    """

    _found_worker: KVTierWorker | None = None
    _block_pool: "BlockPool | None" = None

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        _share_vllm_handlers()
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        settings = parse_settings(extra)
        _start_trace(settings.trace_folder, role)
        check_vllm_config(vllm_config)
        check_pipeline_stages(vllm_config)
        _check_platform()
        check_layer_specs(kv_cache_config)
        check_failed_loads_can_be_named(kv_cache_config)
        name_our_spec(extra)
        super().__init__(vllm_config, role, kv_cache_config)
        self._manager: KVTierOffloadingManager | None = None
        self._gpu_pins: GpuPins | None = None
        self._admission: Admission | None = None
        self._decoding: DecodingRequests | None = None
        self._device_blocks: DeviceBlocks | None = None
        # Requests that kvtier loads; their blocks, where vLLM names failed blocks.
        self._loading: dict[str, set[int]] = {}
        self._overwrites_before_flush = overwrites_before_flush(vllm_config)
        self._idle_wait_s = idle_wait_s(vllm_config)
        if self.connector_scheduler is not None:
            _warn_untested_platform()
            offer_whole_chunks_only(self.connector_scheduler)
            facts = EngineFacts(
                settings=settings,
                vllm_config=vllm_config,
                kv_cache_config=kv_cache_config,
                offloading=build_offloading_config(vllm_config, kv_cache_config),
                group_configs=self.connector_scheduler.config.kv_group_configs,
            )
            self._manager = self.connector_scheduler.manager
            parts = startup.start_session(facts)

            def prefix_cache() -> object:
                return index_of(self._block_pool)

            self._manager.start(parts, prefix_cache, lambda: is_empty(self._block_pool))
            watch_weight_changes(self, self._manager.changes.weights_may_change, settings.safe_rpcs)
            shape = startup.gpu_shape(facts) if vllm_is_tested() else None
            self._gpu_pins = GpuPins(settings, shape, self._manager.pinned_blocks, self._manager.stats)
            self._admission = Admission(
                startup.pool_shape(facts, shape), self._manager.stats, lambda: self.gpu_pins.num_held
            )
            self._decoding = DecodingRequests(self.connector_scheduler)
            self._device_blocks = parts.device_blocks
            if parts.warm_start is not None:
                parts.warm_start.watch(self._manager.serves_users, prefix_cache)

    @property
    def manager(self) -> KVTierOffloadingManager:
        """The scheduler half's manager."""
        assert self._manager is not None
        return self._manager

    @property
    def gpu_pins(self) -> GpuPins:
        """What keeps pinned prompts in vLLM's prefix cache."""
        assert self._gpu_pins is not None
        return self._gpu_pins

    @property
    def admission(self) -> Admission:
        """What has requests let others pass when vLLM's pool is short of blocks."""
        assert self._admission is not None
        return self._admission

    @override
    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if vllm_is_tested():
            self.gpu_pins.bind(kv_cache_manager)
            self.admission.bind(kv_cache_manager)
        if self._device_blocks is not None:
            self._device_blocks.bind(kv_cache_manager)

    @override
    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        # The only call of the two before 0.30; from then on the other one makes this one too.
        super().bind_gpu_block_pool(gpu_block_pool)
        self._block_pool = gpu_block_pool

    @override
    def take_events(self) -> "Iterable[KVCacheEvent]":
        yield from super().take_events()
        if self.manager.host_events is not None:
            yield from self.manager.host_events.take(time.monotonic())

    @override
    def on_new_request(self, request: "Request") -> None:
        self.manager.register(request)
        self.admission.arrived(request.request_id)
        super().on_new_request(request)

    @override
    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        # While the daemon's answer is awaited vLLM must not scan the prompt's chunks: it would do so at every step.
        if not self.manager.advance(request, num_computed_tokens):
            return None, False
        if self.admission.is_still_held(request, num_computed_tokens):
            return None, False
        num_matched: int | None
        num_matched, is_load = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if num_matched is not None:
            self.manager.matched(request.request_id, num_matched)
            if self.admission.is_held(request, num_computed_tokens, num_matched):
                return None, False
            self.gpu_pins.before_admission(request, num_computed_tokens + num_matched, is_load=is_load)
        return num_matched, is_load

    @override
    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        note_allocated_blocks(self.connector_scheduler, blocks)
        instructed = self.manager.allocated(request, num_external_tokens)
        self.gpu_pins.allocated(request)
        self.admission.allocated(request.request_id, blocks)
        if instructed is not None:
            instructed.admitted(cache_hit_sources(self.connector_scheduler, request, num_external_tokens))
        if num_external_tokens:
            named_blocks = () if names_failed_requests() else blocks.get_block_ids()
            self._loading[request.request_id] = {block for group in named_blocks for block in group}

    @override
    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        report = _ended(self, request)
        is_delayed, params = super().request_finished(request, block_ids)
        return is_delayed, report or params

    @override
    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        report = _ended(self, request)
        is_delayed, params = super().request_finished_all_groups(request, block_ids)
        return is_delayed, report or params

    @override
    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> "KVConnectorMetadata":
        self.manager.step_scheduled(scheduler_output.total_num_scheduled_tokens)
        assert self._decoding is not None
        assert self.connector_scheduler is not None
        output = forget_blocks(self.connector_scheduler, scheduler_output)
        meta = super().build_connector_meta(self._decoding.left_out(output))
        offer_again(self.connector_scheduler, self.manager.stores.take_left())
        self._decoding.step_built(scheduler_output)
        if (arena := self.manager.new_arena()) is not None:
            setattr(meta, _NEW_ARENA, arena)
            self.admission.matches_changed()
        if not scheduler_output.total_num_scheduled_tokens:
            setattr(meta, _IS_EMPTY, True)
        self.gpu_pins.after_step(scheduler_output)
        self.admission.step_scheduled(scheduler_output.total_num_scheduled_tokens)
        return meta

    @override
    def bind_connector_metadata(self, connector_metadata: "KVConnectorMetadata") -> None:
        super().bind_connector_metadata(connector_metadata)
        arena = getattr(connector_metadata, _NEW_ARENA, None)
        if (worker := self._worker) is None:
            return
        if arena is not None:
            worker.prepare(arena)
        worker.step_begins(has_loads=bool(getattr(connector_metadata, "load_jobs", None)))

    @override
    def handle_preemptions(self, kv_connector_metadata: "KVConnectorMetadata") -> None:
        if not self._overwrites_before_flush or (worker := self._worker) is None:
            super().handle_preemptions(kv_connector_metadata)
            return
        # vLLM flushes stores of blocks that this step gives to other requests.
        with worker.stores_refused(getattr(kv_connector_metadata, "jobs_to_flush", None) or set()):
            super().handle_preemptions(kv_connector_metadata)

    @override
    def wait_for_save(self) -> None:
        super().wait_for_save()
        # vLLM keeps a step's stores until the next step: too late where that begins with overwriting their blocks.
        if self._overwrites_before_flush and (worker := self._worker) is not None:
            self.connector_worker.start_kv_transfers(OffloadingConnectorMetadata(load_jobs={}, store_jobs={}))
            worker.finish_stores()

    @override
    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        if getattr(connector_output, "invalid_block_ids", None):
            # Another connector could not load these: what is being stored may have been computed over them.
            self.manager.stores.discard_open()
        for req_id in failed_requests(connector_output, self._loading):
            self.manager.load_failed(req_id)
        if self._loading:
            for req_id in self._loading.keys() & (connector_output.finished_recving or set()):
                del self._loading[req_id]
        # Of a step in which no job ended vLLM's offloading scheduler has nothing to note.
        if connector_output.kv_connector_worker_meta is not None:
            super().update_connector_output(connector_output)

    @override
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        worker = self._worker
        # vLLM would step again after a pause of 1 ms: until the load is over that costs others the cores.
        if worker is not None and getattr(self._connector_metadata, _IS_EMPTY, False):
            worker.await_load(self._idle_wait_s)
        finished: tuple[set[str], set[str]] = super().get_finished(finished_req_ids)
        return finished

    def get_transfer_results(self, finished_req_ids: set[str]) -> "KVConnectorTransferResults":
        """Report failed loads to vLLM from 0.30 on."""
        # vLLM's base asserts that every transfer succeeded, so failures are reported here, not there.
        results = super().get_transfer_results(finished_req_ids)
        if (worker := self._worker) is not None and (failed := worker.take_failed_loads()):
            results.failed_recving |= failed & results.finished_recving
        return results

    @override
    def get_block_ids_with_load_errors(self) -> set[int]:
        if names_failed_requests() or self._worker is None:
            return set()
        return self._worker.take_failed_blocks()

    def unregister_kv_caches(self) -> None:
        """Stop touching the KV cache until `restore_kv_caches`: vLLM sleeps. From vLLM 0.33 on; its addresses stay."""
        if self._worker is not None:
            self._worker.drain()

    @property
    def _worker(self) -> KVTierWorker | None:
        """Of a worker's half, from when vLLM has registered its KV caches; each step asks several times."""
        if self._found_worker is None and self.connector_worker is not None:
            worker = self.connector_worker.worker
            self._found_worker = worker if isinstance(worker, KVTierWorker) else None
        return self._found_worker

    @override
    def reset_cache(self) -> bool | None:
        # vLLM 0.32 asserts that the workers were sent the jobs of the last reset; an idle engine sends nothing.
        assert self.connector_scheduler is not None
        to_flush = self.connector_scheduler._current_batch_jobs_to_flush
        unsent = set(to_flush)
        to_flush.clear()
        was_reset: bool | None = super().reset_cache()
        self.admission.matches_changed()
        to_flush.update(unsent)
        return was_reset

    @override
    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: "VllmConfig") -> str | None:
        # One copy for each block instead of one for each block and layer, which are too short for a GPU's link. vLLM
        # takes another layout where an attention backend cannot work with this one.
        block_major = block_major_layout() if current_platform.is_cuda() else None
        if block_major is not None and not vllm_config.model_config.is_attention_free:
            return block_major
        layout: str | None = super().get_required_kvcache_layout(vllm_config)
        return layout

    @override
    @classmethod
    def build_prom_metrics(cls, vllm_config: "VllmConfig", *args: Any, **kwargs: Any) -> Any:
        # Runs in the API server's process, where no connector is constructed.
        name_our_spec(vllm_config.kv_transfer_config.kv_connector_extra_config)
        return super().build_prom_metrics(vllm_config, *args, **kwargs)


def _ended(connector: KVTierConnector, request: "Request") -> dict[str, Any] | None:
    """Return what the answer shall say of what the request asked; None where it asked nothing."""
    connector.admission.finished(request.request_id)
    return connector.manager.ended(request)


def _share_vllm_handlers() -> None:
    """Give our loggers vLLM's handlers, once, unless they or the root logger are configured already."""
    theirs = logging.getLogger("vllm")
    if logging.getLogger().handlers or not theirs.handlers:
        return
    for ours in map(logging.getLogger, ("kvtier", "kvtier_connector")):
        if not ours.handlers:
            ours.handlers = list(theirs.handlers)
            ours.setLevel(theirs.getEffectiveLevel())
            ours.propagate = False


def _start_trace(folder: Path | None, role: KVConnectorRole) -> None:
    """Raises ConfigError."""
    try:
        path = trace.start(folder, "engine" if role is KVConnectorRole.SCHEDULER else "worker")
    except OSError as exc:
        raise ConfigError(
            "KVTIER_TRACE_FOLDER", str(folder), "environment", f"{exc}; name a folder that can be written"
        ) from exc
    if path is not None:
        logger.info("kvtier: tracing to %s", path)


def _check_platform() -> None:
    if not (current_platform.is_cpu() or current_platform.is_cuda_alike()):
        raise NotImplementedError(
            f"this version of kvtier works on vLLM's CPU platform and on CUDA, not on {current_platform.device_name}; "
            "start vLLM without the kvtier connector"
        )


def _warn_untested_platform() -> None:
    if not current_platform.is_cpu():
        logger.warning("kvtier: the CUDA worker is not proven on a GPU yet; compare outputs before you rely on it")
    if warning := version_warning():
        logger.warning("kvtier: %s", warning)
