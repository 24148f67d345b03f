"""Recurrent state (Mamba, short convolutions): how a pinned prompt gets it.

vLLM offers such state for storing when it computes it, never out of its prefix cache: a prompt that vLLM has cached
when it is pinned would stay incomplete until vLLM evicts it. So a request that can produce the missing state, mostly
the warm request, is computed without the prefix cache.
"""

from collections.abc import Sequence
from typing import Any

from kvtier.core.layout import ChunkKey
from kvtier_connector.engine.chunk_keys import GroupShape, reachable_keys
from kvtier_connector.scheduler.chunk_mirror import ChunkMirror

_PERIOD_S = 10.0
_MAX_STATES = 1024
"""Beyond it those are forgotten whose period is over: in a month of requests some hundred thousand would collect."""


class MissingStates:
    """Which requests must not read vLLM's cache. Scheduler thread only."""

    def __init__(self, groups: Sequence[GroupShape], mirror: ChunkMirror) -> None:
        self._groups = [group for group in groups if group.is_recurrent]
        self._mirror = mirror
        self._computed_s: dict[ChunkKey, float] = {}

    @property
    def can_be(self) -> bool:
        """Whether the model has recurrent state."""
        return bool(self._groups)

    def clear(self) -> None:
        """The session is over."""
        self._computed_s.clear()

    def must_compute(self, request: Any, adapter_digest: bytes | None, now_s: float) -> bool:
        """Return whether the request ends where a pinned prompt does whose state is missing.

        Once in ten seconds per state: while it cannot be stored, other requests still hit vLLM's cache.
        """
        ends = reachable_keys(self._groups, request.block_hashes, request.num_prompt_tokens, adapter_digest).keys
        missing = [key for key in ends if self._mirror.is_pinned(key) and not self._mirror.may_be_held(key)]
        if not missing or now_s - self._computed_s.get(missing[0], -_PERIOD_S) < _PERIOD_S:
            return False
        if len(self._computed_s) >= _MAX_STATES:
            self._computed_s = {key: at_s for key, at_s in self._computed_s.items() if now_s - at_s < _PERIOD_S}
        self._computed_s[missing[0]] = now_s
        return True
