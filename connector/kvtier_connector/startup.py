"""Puts the scheduler half together: from vLLM's configuration to a running session with the daemon."""

import logging
import os

import platformdirs
from vllm import __version__ as vllm_version
from vllm.platforms import current_platform

from kvtier_connector.admission import PoolShape
from kvtier_connector.discovery import PromptObserver
from kvtier_connector.discovery.chat_rendering import load_chat_renderer
from kvtier_connector.engine.chunk_keys import has_one_whole_prefix
from kvtier_connector.engine.facts import EngineFacts
from kvtier_connector.engine.lora.adapter_digests import Adapter, AdapterDigests
from kvtier_connector.engine.lora.loads import watch_lora_loads
from kvtier_connector.engine.lora.remembered_digests import RememberedDigests
from kvtier_connector.engine.vllm_compat import hash_lookahead_tokens
from kvtier_connector.gpu_pins.block_demand import EngineShape
from kvtier_connector.kv_events.event_maker import EventMaker, spec_kind_of
from kvtier_connector.kv_events.host_events import REPEAT_S
from kvtier_connector.kv_events.idle_engine import Alarm, find_wake
from kvtier_connector.metrics.request_spans import RequestSpans, exporting_to
from kvtier_connector.own_api.api_server_search import find_api_server
from kvtier_connector.own_api.warm_start import WarmStart
from kvtier_connector.scheduler.manager import EngineParts
from kvtier_connector.scheduler.steps.idle_wait import idle_wait_s
from kvtier_connector.session.daemon_events import BackgroundThread, DaemonEvents
from kvtier_connector.session.device_blocks import DeviceBlocks
from kvtier_connector.session.hello import HelloMaker
from kvtier_connector.session.pin_binder import PinBinder
from kvtier_connector.settings import AdmissionOrder

logger = logging.getLogger(__name__)


def start_session(facts: EngineFacts) -> EngineParts:
    """Begin to attach, in the background, and return what the manager needs."""
    spans = _request_spans(facts)
    background = BackgroundThread("kvtier-bind")
    remembered = RememberedDigests(platformdirs.user_cache_path("kvtier") / "lora_adapters.json")
    background.submit(remembered.load)
    digests = AdapterDigests(background.submit, remembered)
    watch_lora_loads(lambda lora: digests.note_load(Adapter.of(lora), in_place=lora.load_inplace))
    warm_start = None
    if facts.settings.warm_url is not None:
        warm_start = WarmStart(facts, os.environ.get("VLLM_API_KEY", ""), lambda: find_api_server(vllm_version))
    model_config, template_path = facts.vllm_config.model_config, facts.settings.chat_template
    observer = PromptObserver(facts.shapes, digests.digest, lambda: load_chat_renderer(model_config, template_path))
    device_blocks = DeviceBlocks(shape.block_tokens if (shape := gpu_shape(facts)) is not None else None)
    wake = find_wake() if facts.announces_pins else None
    binder = PinBinder(
        facts.shapes,
        facts.block_hasher,
        digests,
        model_config.max_model_len,
        hash_lookahead_tokens(facts.vllm_config),
        keys_are_hashes=facts.keys_are_hashes,
        announces=facts.announces_pins,
    )
    hello = HelloMaker(facts, takes_joined_keys=binder.takes_joined_keys)
    events = DaemonEvents(
        facts.settings.socket,
        hello.make,
        binder,
        background,
        device_blocks,
        warm_start.bound if warm_start is not None else lambda attachment: None,
        facts.settings.daemon_uid,
        wake if wake is not None else lambda: None,
    )
    events.start()
    return EngineParts(
        events=events,
        digests=digests,
        groups=facts.shapes,
        useful_bytes=tuple(group.useful_bytes for group in hello.layout.groups),
        num_credits=hello.num_credits,
        lookup_timeout_s=facts.settings.lookup_timeout_s,
        prefill_tokens_per_s=facts.settings.prefill_tokens_per_s,
        can_load_early=_can_load_early(facts),
        role=facts.role,
        warm_start=warm_start,
        observer=observer,
        block_hasher=facts.block_hasher,
        spans=spans,
        idle_wait_s=idle_wait_s(facts.vllm_config),
        submit=background.submit,
        device_blocks=device_blocks,
        event_maker=_event_maker(facts),
        alarm=Alarm(wake, REPEAT_S + 1) if wake is not None else None,
    )


def _event_maker(facts: EngineFacts) -> EventMaker | None:
    if not facts.announces_pins:
        return None
    (group,) = facts.shapes
    kv_cache_spec = facts.kv_cache_config.kv_cache_groups[group.group_idx].kv_cache_spec
    return EventMaker(group.chunk_tokens // group.hashes_per_chunk, group.group_idx, spec_kind_of(kv_cache_spec))


def _request_spans(facts: EngineFacts) -> RequestSpans | None:
    if (endpoint := facts.settings.otlp_endpoint) is None:
        return None
    if getattr(facts.vllm_config.observability_config, "otlp_traces_endpoint", None) is None:
        logger.warning("kvtier: otlp_endpoint has no effect: vLLM passes no trace on without --otlp-traces-endpoint")
    return exporting_to(endpoint)


def _can_load_early(facts: EngineFacts) -> bool:
    """Loads with awaited chunks fail more often than others: the copying thread awaits them on vLLM's CPU platform."""
    recomputes: bool = facts.vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute"
    return recomputes and current_platform.is_cpu()


def gpu_shape(facts: EngineFacts) -> EngineShape | None:
    """Return what bounds vLLM's demand for blocks; None where a hit needs more than the blocks of one prefix."""
    if len(facts.kv_cache_config.kv_cache_groups) > 1 or not has_one_whole_prefix(facts.shapes):
        return None
    return EngineShape.of(facts.vllm_config, facts.shapes[0].chunk_tokens // facts.settings.blocks_per_chunk)


def pool_shape(facts: EngineFacts, shape: EngineShape | None) -> PoolShape | None:
    """Return what says whether a request fits; None where requests are admitted in vLLM's own order."""
    if facts.settings.admission is not AdmissionOrder.PREFIX_FIRST or shape is None:
        return None
    if facts.vllm_config.scheduler_config.policy != "fcfs":
        logger.info("kvtier: admission is fcfs: requests have priorities, and kvtier changes none")
        return None
    return PoolShape(
        block_tokens=shape.block_tokens,
        watermark_ratio=shape.watermark_ratio,
        reserves_whole_prompt=shape.reserves_whole_prompt,
    )
