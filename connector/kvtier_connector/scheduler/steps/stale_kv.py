"""What vLLM's prefix cache still has after a reset that it could not carry out."""

from collections.abc import Callable


class FailedResets:
    """Knows whether vLLM's prefix cache has KV of before a reset of its connector. Scheduler thread only.

    vLLM resets its connector also where it cannot reset its prefix cache, because requests run: those go on with KV of
    before, and others hit it. It replaces the index of that cache when it does reset it.
    Source: `Scheduler.reset_prefix_cache` and `BlockPool.reset_prefix_cache` of vLLM 0.32.

    Args:
        prefix_cache: Returns the index; None where there is none.
    """

    def __init__(self, prefix_cache: Callable[[], object]) -> None:
        self._prefix_cache = prefix_cache
        self._last: object = None  # the index when a request came, or at a reset
        self._of_before: object = None  # the index that a reset has left

    def has_kv_of_before(self) -> bool:
        """Return whether there is such KV; called when a request comes."""
        self._last = self._prefix_cache()
        return self._last is not None and self._last is self._of_before

    def reset(self) -> bool:
        """vLLM resets its connector: return whether it has left its prefix cache as it was."""
        index = self._prefix_cache()
        self._of_before = index if index is self._last else None
        self._last = index
        return self._of_before is not None
