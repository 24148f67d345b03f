"""One Acquire of one request: what was asked, what the daemon reported, and what is still to be released."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtier._pb import engine_pb2 as pb
from kvtier.client.engine_session import Attachment
from kvtier.core.layout import ChunkKey
from kvtier.core.requests.request_outcomes import RequestOutcome
from kvtier.core.slots import SlotRef
from kvtier_connector.scheduler.lookup_planner import LookupQuery

HOST, _MISS, PROMOTING = pb.ChunkResidency.HOST, pb.ChunkResidency.MISS, pb.ChunkResidency.PROMOTING


class Resident(NamedTuple):
    """A chunk that was in host memory when it was asked for: what its ChunkResidency would say."""

    slot: SlotRef
    state: "pb.ChunkResidency.State" = HOST
    from_disk: bool = False


def outcome_of(value: int) -> RequestOutcome | None:
    """Return a message's outcome; None for one that this version does not know."""
    descriptor = pb.RequestOutcome.DESCRIPTOR.values_by_number.get(value)
    return RequestOutcome.__members__.get(descriptor.name) if descriptor is not None else None


Residency = pb.ChunkResidency | Resident


@dataclass(kw_only=True)
class Lease:
    """The scheduler's side of one Acquire. Scheduler thread only."""

    attachment: Attachment  # the session it belongs to; it dies with it
    acquire_id: int  # unique in the session
    req_id: str  # of the request it serves
    query: LookupQuery  # what was asked
    asked_s: float
    answer_deadline_s: float  # when the first answer is late
    promote_deadline_s: float | None = None  # set by the first answer: until when promotions are worth waiting for
    promoting_since_s: float | None = None  # when the first answer named promotions; None when it named none
    # when the promotions are forecast to end, at the last update; None while that is unknown
    ready_s: float | None = None
    miss_reason: RequestOutcome | None = None  # why the first answer lacks chunks; None when it lacks none
    pending_bytes: int = 0  # what is still promoted, at the last update
    loading: set[ChunkKey] = field(default_factory=set)  # chunks that a load job reads now
    num_to_load: int = 0  # how many they were at first
    loads_early: bool = False  # chunks that are still promoted are hits, too: the workers wait for them
    loading_since_s: float | None = None  # when the load began; None before
    # what the daemon reported about each chunk so far
    residencies: dict[ChunkKey, Residency] = field(default_factory=dict)
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

    def apply(self, update: pb.AcquireUpdate, now_s: float) -> None:
        """Record the daemon's update. It costs what the update names: a long promotion is a thousand updates."""
        missed: list[int] = []
        resident, keys = update.resident, self.query.keys
        slots = map(SlotRef, resident.slots, resident.generations)
        self.residencies.update(zip(map(keys.__getitem__, resident.indexes), map(Resident, slots), strict=True))
        for chunk in update.chunks:
            self.residencies[keys[chunk.index]] = chunk
            if chunk.state == PROMOTING:
                self._promoting.add(chunk.index)
            else:
                self._promoting.discard(chunk.index)
            if chunk.state == _MISS:
                missed.append(chunk.index)
        self._cut_prefix(missed)
        if update.miss_reason:
            self.miss_reason = outcome_of(update.miss_reason)
        self.pending_bytes = update.pending_bytes
        self.ready_s = now_s + update.ready_in_s if update.ready_in_s else None

    def _cut_prefix(self, missed: Sequence[int]) -> None:
        """Ignore what lies behind the first MISS of the prefix; windows too, which need all of it."""
        num_prefix, end = self.query.num_prefix_keys, self._prefix_end
        if end is None:  # what the first answer does not name is MISS
            prefix = self.query.keys[:num_prefix]
            end = next((index for index, key in enumerate(prefix) if key not in self.residencies), num_prefix)
        end = min(end, *missed) if missed else end
        if end < num_prefix and end != self._prefix_end:
            self._promoting = {index for index in self._promoting if index < end}
        self._prefix_end = end

    @property
    def why_not_all(self) -> RequestOutcome:
        """Why some of what was asked for cannot be loaded."""
        if self.miss_reason is not None:
            return self.miss_reason
        return RequestOutcome.NOT_PROMOTED if self._promoting else RequestOutcome.NOT_STORED

    @property
    def num_usable(self) -> int:
        """Chunks at the head of the prefix that can be loaded; counts none, since a prefix may have thousands."""
        return self._prefix_end or 0 if self.loads_early else min([self._prefix_end or 0, *self._promoting])

    def is_hit(self, residency: Residency) -> bool:
        """Return whether a chunk can be loaded."""
        return residency.state == HOST or (self.loads_early and residency.state == PROMOTING)

    def tokens_at_stake(self) -> int:
        """Return the tokens that would be computed if promotions were not waited for."""
        query = self.query
        prefix, others = query.keys[: query.num_prefix_keys], query.keys[query.num_prefix_keys :]
        if any(key in self.residencies and not self._is_in_host(key) for key in others):
            return query.end_token - query.first_token
        readable = next((i for i, key in enumerate(prefix) if not self._is_in_host(key)), len(prefix))
        return query.end_token - query.first_token - readable * query.chunk_tokens

    def _is_in_host(self, key: ChunkKey) -> bool:
        residency = self.residencies.get(key)
        return residency is not None and residency.state == HOST

    def leased_keys(self, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        """Return the keys that were asked for in place of the request's own."""
        aliases = self.query.aliases
        return [aliases.get(key, key) for key in keys] if aliases else list(keys)

    def release(self, keys: Sequence[ChunkKey] | None = None) -> None:
        """Release these chunks, or all."""
        release = pb.Release(acquire_id=self.acquire_id, all=keys is None)
        if keys is not None:
            wanted = set(keys)
            release.indexes.extend(i for i, key in enumerate(self.query.keys) if key in wanted)
        self.attachment.send(pb.EngineMessage(release=release))
