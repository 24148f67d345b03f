"""kvtier's log lines go where vLLM's go."""

import logging

_OURS = ("kvtier", "kvtier_connector")


def share_vllm_handlers() -> None:
    """Give our loggers vLLM's handlers, once, unless they or the root logger are configured already."""
    theirs = logging.getLogger("vllm")
    if logging.getLogger().handlers or not theirs.handlers:
        return
    for name in _OURS:
        ours = logging.getLogger(name)
        if not ours.handlers:
            ours.handlers = list(theirs.handlers)
            ours.setLevel(theirs.getEffectiveLevel())
            ours.propagate = False
