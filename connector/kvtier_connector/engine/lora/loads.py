"""Reports when vLLM loads a LoRA adapter, which its connector API does not."""

import functools
import logging
from collections.abc import Callable
from typing import Any

_ORIGINAL = "_kvtier_original"

logger = logging.getLogger(__name__)


def watch_lora_loads(report: Callable[[Any], None]) -> None:
    """Call `report` with vLLM's LoRARequest before its workers load the adapter, in vLLM's engine thread.

    Of several engines in one process the last one is called.
    Source: `EngineCore.add_lora`, `Executor.add_lora` of vLLM 0.26 to 0.33.
    """
    from vllm.v1.executor.abstract import Executor

    load: Callable[..., bool] = getattr(Executor.add_lora, _ORIGINAL, Executor.add_lora)

    @functools.wraps(load)
    def add_lora(executor: Any, lora_request: Any) -> bool:
        try:
            report(lora_request)
        except Exception:  # the load is vLLM's, and goes on
            logger.exception("kvtier: the load of a LoRA adapter was not noted")
        return load(executor, lora_request)

    setattr(add_lora, _ORIGINAL, load)
    Executor.add_lora = add_lora
