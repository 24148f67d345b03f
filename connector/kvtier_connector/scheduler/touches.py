"""Touches: reports to the daemon which known chunks vLLM used from its prefix cache, so that it evicts them late."""

from collections.abc import Sequence

from kvtier._pb import engine_pb2 as pb
from kvtier.client.engine_session import Attachment
from kvtier.core.layout import ChunkKey
from kvtier_connector.engine.chunk_keys import PromptHashes
from kvtier_connector.scheduler.lookup_planner import LookupPlanner

MAX_TOUCHED_KEYS = 65_536
"""The most keys of one message, 2.5 MB."""


class Touches:
    """Chunks to touch in the current session. Scheduler thread only; never waits."""

    def __init__(self, planner: LookupPlanner) -> None:
        self._planner = planner
        self._attachment: Attachment | None = None
        self._touched: set[ChunkKey] = set()  # first chunks of the prompts noted in this period
        self._period_end_s = 0.0
        self._pending: list[ChunkKey] = []

    def attach(self, attachment: Attachment | None) -> None:
        """Another session is up, or none: what was to be touched in the last one is dropped."""
        self._attachment = attachment
        self._pending.clear()
        self._touched.clear()

    def note(self, first_key: ChunkKey, prompt: PromptHashes, num_tokens: int, now_s: float) -> None:
        """Note a prefix-cache hit of a known prompt, at most once a second per prompt."""
        if now_s >= self._period_end_s:
            self._touched.clear()
            self._period_end_s = now_s + 1.0
        if first_key not in self._touched and (keys := self._planner.known_prefix(prompt, num_tokens)):
            self._touched.add(first_key)
            self._pending.extend(keys)

    def flush(self) -> None:
        """Send what was noted since the last call; called once a step."""
        if self._pending:
            self._send(self._pending)
            self._pending.clear()

    def send_order(self, keys: Sequence[ChunkKey]) -> None:
        """Report to the daemon the prefix order of what a request has stored step by step."""
        self._send(keys, stored=True)

    def _send(self, keys: Sequence[ChunkKey], *, stored: bool = False) -> None:
        """Send them in messages of a bounded size, the tail first: what is touched last is kept the longest.

        Not while the daemon does not read: they would pile up.
        """
        if self._attachment is None or self._attachment.is_behind:
            return
        for start in reversed(range(0, len(keys), MAX_TOUCHED_KEYS)):
            touch = pb.Touch(keys=keys[start : start + MAX_TOUCHED_KEYS], stored=stored)
            self._attachment.send_later(pb.EngineMessage(touch=touch))
