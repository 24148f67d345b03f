"""One Acquire of one request: what was asked, what the daemon said, and what is still to be released."""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtier._pb import engine_pb2 as pb
from kvtier.client.engine_session import Attachment
from kvtier.core.layout import ChunkKey
from kvtier_connector.engine.lora_adapters import Adapter
from kvtier_connector.scheduler.forecasts import ready_s

_HOST, _MISS, _PROMOTING = pb.ChunkResidency.HOST, pb.ChunkResidency.MISS, pb.ChunkResidency.PROMOTING


class Residency(NamedTuple):
    """What the daemon said of one chunk."""

    state: int
    slot: int
    generation: int
    from_disk: bool


class AcquirePlan(NamedTuple):
    """What to ask for a request.

    Attributes:
        keys: In prefix order within each group.
        num_prefix_keys: How many of `keys`, the first ones, are the run of the first full-attention group.
        chunk_tokens: Tokens of one chunk of that run.
        first_token: Where the run begins.
        end_token: Where it ends.
    """

    keys: tuple[ChunkKey, ...]
    num_prefix_keys: int
    chunk_tokens: int
    first_token: int
    end_token: int


@dataclass(kw_only=True)
class Lease:
    """The scheduler's side of one Acquire. Scheduler thread only.

    Attributes:
        attachment: The session it belongs to; it dies with it.
        acquire_id: Unique in the session.
        req_id: Of the request it serves.
        plan: What was asked.
        asked_s: When.
        answer_deadline_s: When the first answer is late.
        promote_deadline_s: Set by the first answer: until when promotions are worth waiting for.
        promoting_since_s: When the first answer named promotions; None when it named none.
        ready_s: When the promotions are forecast to end, at the last update; None while that is unknown.
        loading: Chunks that a load job reads now.
        num_to_load: How many they were at first.
        loading_since_s: When the load began; None before.
    """

    attachment: Attachment
    acquire_id: int
    req_id: str
    plan: AcquirePlan
    asked_s: float
    answer_deadline_s: float
    promote_deadline_s: float | None = None
    promoting_since_s: float | None = None
    ready_s: float | None = None
    loading: set[ChunkKey] = field(default_factory=set)
    num_to_load: int = 0
    loading_since_s: float | None = None
    _chunks: dict[ChunkKey, Residency] = field(default_factory=dict)
    _promoting: set[int] = field(default_factory=set)  # indexes of those that could be used
    _prefix_end: int | None = None  # index of the first MISS of the prefix, once answered

    @property
    def is_answered(self) -> bool:
        """Whether the first answer has come."""
        return self.promote_deadline_s is not None

    @property
    def is_promoting(self) -> bool:
        """Whether some chunk that could be used is still on its way from disk."""
        return bool(self._promoting)

    def readable(self, key: ChunkKey) -> Residency | None:
        """Return the chunk's place if it may be read, else None."""
        chunk = self._chunks.get(key)
        return chunk if chunk is not None and chunk.state == _HOST else None

    def apply(self, update: pb.AcquireUpdate, now_s: float) -> None:
        """Take in what the daemon says, at the cost of what it names: a long promotion is a thousand updates."""
        missed: list[int] = []
        for chunk in update.chunks:
            self._chunks[self.plan.keys[chunk.index]] = Residency(
                chunk.state, chunk.slot.slot, chunk.slot.generation, chunk.from_disk
            )
            if chunk.state == _PROMOTING:
                self._promoting.add(chunk.index)
            else:
                self._promoting.discard(chunk.index)
            if chunk.state == _MISS:
                missed.append(chunk.index)
        self._cut_prefix(missed)
        self.ready_s = ready_s(now_s, update.ready_in_s, update.pending_bytes, update.promote_bytes_per_s)

    def _cut_prefix(self, missed: Sequence[int]) -> None:
        """Leave out of account what lies behind the first MISS of the prefix; windows too, which need all of it."""
        num_prefix, end = self.plan.num_prefix_keys, self._prefix_end
        if end is None:  # what the first answer does not name is MISS
            prefix = self.plan.keys[:num_prefix]
            end = next((index for index, key in enumerate(prefix) if key not in self._chunks), num_prefix)
        end = min(end, *missed) if missed else end
        if end < num_prefix and end != self._prefix_end:
            self._promoting = {index for index in self._promoting if index < end}
        self._prefix_end = end

    @property
    def num_usable(self) -> int:
        """Chunks at the head of the prefix that can be loaded; counts none, since a prefix may have thousands."""
        return min([self._prefix_end or 0, *self._promoting])

    def tokens_at_stake(self) -> int:
        """Return the tokens that would be computed if promotions were not waited for."""
        plan = self.plan
        prefix, others = plan.keys[: plan.num_prefix_keys], plan.keys[plan.num_prefix_keys :]
        if any(key in self._chunks and self.readable(key) is None for key in others):
            return plan.end_token - plan.first_token
        readable = next((i for i, key in enumerate(prefix) if self.readable(key) is None), len(prefix))
        return plan.end_token - plan.first_token - readable * plan.chunk_tokens

    def release(self, keys: Sequence[ChunkKey] | None = None) -> None:
        """Give back these chunks, or all."""
        release = pb.Release(acquire_id=self.acquire_id, all=keys is None)
        if keys is not None:
            wanted = set(keys)
            release.indexes.extend(i for i, key in enumerate(self.plan.keys) if key in wanted)
        self.attachment.send(pb.EngineMessage(release=release))


class Phase(enum.Enum):
    """Where a request is in its lookup round."""

    NEW = enum.auto()
    """Nothing asked in this round."""
    ASKED = enum.auto()
    """Acquire sent, no answer yet."""
    PROMOTING = enum.auto()
    """Answered; waiting for promotions."""
    SETTLED = enum.auto()
    """HIT and MISS are fixed; vLLM may ask again for many steps."""
    TAKEN = enum.auto()
    """vLLM allocated; another question means a new round (preemption, failed load)."""


@dataclass(kw_only=True)
class RequestState:
    """What kvtier knows of one vLLM request. Scheduler thread only.

    Attributes:
        req_id: vLLM's id.
        is_finished: Whether vLLM is done with it.
        adapter: Its LoRA adapter.
        adapter_digest: The adapter's content, once known.
        adapter_deadline_s: Until when the request waits for that; None before the first question.
        cacheable: False when chunk keys could not tell its KV apart: nothing is looked up or stored.
        phase: Where its lookup round is.
        asked_tokens: Where the question of this round begins; where nothing was asked, vLLM's own prefix hit then.
        lease: Of this round.
        failed: A load failed; everything is MISS from then on.
        store_deadline_s: Until when its stores wait for arena slots; None before the first shortage.
        offered: Its chunks so far, as vLLM offered them for storing: prefix order within each group.
        num_store_jobs: Store jobs begun; `num_open_stores` of their chunks are with the workers.
        has_hole: Ordinary chunks of it found no slot: what lies behind them would serve nobody.
        is_over: vLLM has forgotten it, but for its jobs.
    """

    req_id: str
    is_finished: Callable[[], bool] = lambda: True
    adapter: Adapter | None = None
    adapter_digest: bytes | None = None
    adapter_deadline_s: float | None = None
    cacheable: bool = True
    phase: Phase = Phase.NEW
    asked_tokens: int = 0
    lease: Lease | None = None
    failed: bool = False
    store_deadline_s: float | None = None
    offered: list[ChunkKey] = field(default_factory=list)
    num_store_jobs: int = 0
    num_open_stores: int = 0
    has_hole: bool = False
    is_over: bool = False
