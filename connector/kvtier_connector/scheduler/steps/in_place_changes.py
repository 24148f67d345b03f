"""Resets and changes of weights in a running vLLM: which KV is of before, and when the next namespace begins."""

import logging
from collections.abc import Callable, Mapping

from kvtier_connector.scheduler.request_state import RequestState

logger = logging.getLogger(__name__)


class InPlaceChanges:
    """Keeps KV of before a reset, or of other weights, out of the namespace that follows. Scheduler thread only.

    vLLM resets its connector also where it cannot reset its prefix cache, because requests run: those go on with KV of
    before, and others hit it. A change of weights leaves that cache as it is. vLLM replaces its index when it does
    reset it; until then no request is stored or restored.
    Source: `Scheduler.reset_prefix_cache` and `BlockPool.reset_prefix_cache` of vLLM 0.32.

    Args:
        requests: Those that are open, or of which vLLM has yet to store something.
        next_namespace: Ends the session, and begins one whose KV is kept in memory only.
        prefix_cache: Returns the index of vLLM's prefix cache; None where it is not known.
        pool_is_empty: Returns whether none of vLLM's blocks has KV or belongs to a request.
    """

    def __init__(
        self,
        requests: Mapping[str, RequestState],
        next_namespace: Callable[[], None],
        prefix_cache: Callable[[], object],
        pool_is_empty: Callable[[], bool],
    ) -> None:
        self._requests, self._next_namespace = requests, next_namespace
        self._prefix_cache, self._pool_is_empty = prefix_cache, pool_is_empty
        self._stale: object = None  # the index with KV of before
        self._is_used = True  # the namespace; the first one is that of the weights that vLLM has read

    def has_stale_kv(self) -> bool:
        """Return whether requests may hit KV of before."""
        index = self._prefix_cache()
        return index is not None and index is self._stale

    def step_scheduled(self, num_tokens: int) -> None:
        """Called once per scheduled step."""
        if num_tokens and not self._is_used:
            self._is_used = any(state.cacheable for state in self._requests.values())

    def reset(self) -> None:
        """vLLM resets its connector."""
        self._changed()
        self._begin()

    def weights_may_change(self, method: str) -> None:
        """vLLM's workers are about to run a method that is not known to leave the weights as they are."""
        was_stale = self.has_stale_kv()
        is_stale = self._changed()
        if self._is_used or (is_stale and not was_stale):
            logger.warning(
                "kvtier: collective_rpc %s may change the weights: this engine has a namespace of its own from now "
                "on%s. If it changes none, name it in safe_rpcs of kv_connector_extra_config",
                method,
                ", and uses it once vLLM's prefix cache is reset" if is_stale else "",
            )
        if self._is_used:
            self._begin()

    def _changed(self) -> bool:
        """Return whether vLLM has KV of before."""
        is_stale = not self._pool_is_empty()
        self._stale = self._prefix_cache() if is_stale else None
        for state in self._requests.values():
            if is_stale or state.is_finished():
                state.cacheable = False
        return is_stale

    def _begin(self) -> None:
        self._next_namespace()
        self._is_used = False
