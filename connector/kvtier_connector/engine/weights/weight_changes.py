"""Reports calls that may change the weights of a running vLLM, which its connector API does not."""

import functools
import logging
from collections.abc import Callable, Collection
from typing import Any

_ORIGINAL = "_kvtier_original"
_SAFE_RPCS = frozenset(
    {
        "checkpoint_prepare",
        "checkpoint_restore",
        "compute_weight_checksums",
        "get_encoder_timing_stats",
        "get_model_inspection",
        "init_weight_transfer_engine",
        "list_loras",
        "profile",
        "release_late_interaction_query_cache",
        "save_sharded_state",
        "save_tensorized_model",
        "shutdown_weight_transfer_engine",
        "update_max_model_len",
    }
)
"""Methods of vLLM's own workers that change no weights."""

logger = logging.getLogger(__name__)


def watch_weight_changes(report: Callable[[str], None], safe_rpcs: Collection[str] = ()) -> None:
    """Call `report` with the name of a method that may change weights, before vLLM's workers run it, in its thread.

    All ways to change them that vLLM offers come through here: `/collective_rpc`, `/update_weights`, `reload_weights`
    and what belongs to them, and programs that use `LLM`. Its own steps, LoRA loads and sleep do not. Not seen is what
    a program writes into the model by itself. Of several engines in one process the last one is called.

    Args:
        report: A failure of it is logged.
        safe_rpcs: Methods of the user's own that change no weights either.

    Source: `EngineCore.collective_rpc` of vLLM 0.26 to 0.33.
    """
    from vllm.v1.engine.core import EngineCore

    call: Callable[..., Any] = getattr(EngineCore.collective_rpc, _ORIGINAL, EngineCore.collective_rpc)
    safe = _SAFE_RPCS.union(safe_rpcs)

    @functools.wraps(call)
    def collective_rpc(engine: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        name = method if isinstance(method, str) else getattr(method, "__name__", "a function")
        try:
            if not (isinstance(method, str) and method in safe):
                report(name)
        except Exception:  # the call is vLLM's, and goes on
            logger.exception("kvtier: a possible change of weights was not noted (%s)", name)
        return call(engine, method, *args, **kwargs)

    setattr(collective_rpc, _ORIGINAL, call)
    EngineCore.collective_rpc = collective_rpc
