"""Reports calls that may change the weights of a running vLLM, which its connector API does not."""

import functools
import logging
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

_ORIGINAL, _WATCH = "_kvtier_original", "_kvtier_watch"
_SAFE_RPCS = frozenset(
    {
        "check_health",
        "checkpoint_prepare",
        "checkpoint_restore",
        "compute_weight_checksums",
        "get_encoder_timing_stats",
        "get_kv_cache_spec",
        "get_model_inspection",
        "get_supported_tasks",
        "init_weight_transfer_engine",
        "list_loras",
        "profile",
        "release_late_interaction_query_cache",
        "reset_encoder_cache",
        "reset_mm_cache",
        "save_sharded_state",
        "save_tensorized_model",
        "shutdown_weight_transfer_engine",
        "synchronize_device",
        "update_max_model_len",
    }
)
"""Methods of vLLM's own workers that change no weights."""

logger = logging.getLogger(__name__)


class _Watch(NamedTuple):
    report: Callable[[str], None]
    safe_rpcs: frozenset[str]


def watch_weight_changes(connector: object, report: Callable[[str], None], safe_rpcs: Collection[str] = ()) -> None:
    """Call `report` with the name of a method that may change weights, before vLLM's workers run it, in its thread.

    All ways to change them that vLLM offers come through here: `/collective_rpc`, `/update_weights`, `reload_weights`
    and what belongs to them, and programs that use `LLM`. Its own steps, LoRA loads and sleep do not. Not seen is what
    a program writes into the model by itself, or has vLLM's executor do.

    Args:
        connector: Of the engine that is watched; it is watched for as long as that is there.
        report: A failure of it is logged.
        safe_rpcs: Methods of the user's own that change no weights either.

    Source: `EngineCore.collective_rpc` of vLLM 0.26 to 0.33.
    """
    from vllm.v1.engine.core import EngineCore

    setattr(connector, _WATCH, _Watch(report, _SAFE_RPCS.union(safe_rpcs)))
    call: Callable[..., Any] = EngineCore.collective_rpc
    if hasattr(call, _ORIGINAL):
        return

    @functools.wraps(call)
    def collective_rpc(engine: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        name = method if isinstance(method, str) else getattr(method, "__name__", "a function")
        try:
            for watch in _watches_of(engine):
                if not (isinstance(method, str) and method in watch.safe_rpcs):
                    watch.report(name)
        except Exception:  # the call is vLLM's, and goes on
            logger.exception("kvtier: a possible change of weights was not noted (%s)", name)
        return call(engine, method, *args, **kwargs)

    setattr(collective_rpc, _ORIGINAL, call)
    EngineCore.collective_rpc = collective_rpc


def _watches_of(engine: Any) -> list[_Watch]:
    """Return those of an engine's connector, and of the connectors within a `MultiConnector`."""
    connector = engine.scheduler.connector
    connectors = [] if connector is None else [connector, *getattr(connector, "_connectors", ())]
    return [watch for each in connectors if (watch := getattr(each, _WATCH, None)) is not None]
