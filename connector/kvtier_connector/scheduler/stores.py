"""Stores: which of a request's blocks are stored, into which arena slots, and what the daemon is sent."""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence, Set

from vllm.v1.kv_offload.base import OffloadKey

from kvtier._pb import engine_pb2 as pb
from kvtier.client.engine_session import Attachment
from kvtier.core.layout import ChunkKey
from kvtier_connector.engine.chunk_keys import chunk_key
from kvtier_connector.metrics.declared import STORED_CHUNKS, UNSTORED_CHUNKS
from kvtier_connector.metrics.engine_stats import ConnectorStats
from kvtier_connector.scheduler.chunk_mirror import ChunkMirror
from kvtier_connector.scheduler.request_state import RequestState
from kvtier_connector.scheduler.touches import Touches
from kvtier_connector.settings import Role

_WAIT_FOR_SLOTS_S = 1.0
"""Without any slot: with each one that comes it begins again."""
_COMMIT_GRACE_S = 2.0


class StorePlanner:
    """Decides which of a request's blocks are stored, and where. Scheduler thread only; never waits.

    Slots are standing credits of the current session.
    """

    def __init__(
        self,
        mirror: ChunkMirror,
        touches: Touches,
        num_credits: int,
        stats: ConnectorStats,
        role: Role = Role.BOTH,
        *,
        can_split: bool = True,
    ) -> None:
        """Prepare.

        Args:
            mirror: Knows what is pinned, and what the daemon holds.
            touches: Gets the order of what was stored.
            num_credits: As many as Hello asked for.
            stats: Count.
            role: Which half of a pair of engines this one is.
            can_split: vLLM offers again what `take_left` names.
        """
        self._role, self._can_split = role, can_split
        self._mirror, self._touches, self._stats = mirror, touches, stats
        self._num_credits = num_credits
        self._attachment: Attachment | None = None
        self._credits: deque[pb.SlotRef] = deque()
        self._num_standing = 0  # the most that stood in this session: small arenas give less than was asked for
        self._writing: dict[ChunkKey, pb.SlotRef] = {}
        self._committing: dict[ChunkKey, float] = {}
        self._orphaned: set[ChunkKey] = set()
        self._discarded: set[ChunkKey] = set()  # those of _writing that hold other bytes than their keys say
        self._left: dict[str, Set[OffloadKey]] = {}  # by request, of the offers of this step

    def attach(self, attachment: Attachment | None) -> None:
        """Another session is up, or none: the last one's slots are the daemon's once no worker holds its lock.

        vLLM's jobs go on, and name chunks, not sessions, when they end: which session's slots they wrote could not be
        said. So their chunks are not stored again before these jobs end.
        """
        self._attachment = attachment
        self._orphaned.update(self._writing)
        self._credits.clear()
        self._num_standing = 0
        self._writing.clear()
        self._committing.clear()
        self._discarded.clear()

    def discard_open(self) -> None:
        """Have the daemon keep nothing of the stores that are open now, whatever is in their rows."""
        self._discarded.update(self._writing)

    def jobs_dropped(self) -> None:
        """vLLM has dropped its jobs and will not report their end."""
        self._orphaned.clear()

    def add_credits(self, slots: Iterable[pb.SlotRef]) -> None:
        """Add slots that the daemon granted before they were needed."""
        self._credits.extend(slots)
        self._num_standing = max(self._num_standing, len(self._credits))

    def commit_answered(self, keys: Iterable[ChunkKey]) -> None:
        """The daemon said whether it holds these; its commit need not be awaited any longer."""
        if self._committing:
            for key in keys:
                self._committing.pop(key, None)

    def begin(
        self, keys: Collection[OffloadKey], state: RequestState, now_s: float
    ) -> list[tuple[OffloadKey, ChunkKey, pb.SlotRef]] | None:
        """Begin to store what of the offered chunks is wanted, as far as there are slots.

        Returns:
            The stores in the order offered; None when vLLM is to offer all of them again: the stores wait for slots.
            `take_left` names what else it is to offer again.
        """
        if not self._role.stores:
            return []
        wanted = self._wanted(keys, state, now_s)
        attachment = self._attachment
        begun: list[tuple[ChunkKey, pb.SlotRef]] = []
        if wanted and attachment is not None:
            promised = {key for key in wanted if self._is_promised(key, state)}
            is_awaiting = self._awaits_slots(len(promised), state, now_s)
            if is_awaiting and not (self._credits and self._can_split):
                attachment.flush()
                return None
            begun = self._take_slots(list(wanted), promised, attachment)
            left = wanted.keys() - {key for key, _ in begun}
            if is_awaiting:
                state.store_deadline_s = now_s + _WAIT_FOR_SLOTS_S
                self._left[state.req_id] = {wanted[key] for key in left}
            else:
                state.has_hole |= bool(left)
                self._stats.count(UNSTORED_CHUNKS, num=len(left))
            state.num_store_jobs += bool(begun)
            state.num_open_stores += len(begun)
        if state.cacheable and not state.no_store and self._mirror.stores_all:
            state.offered.update(dict.fromkeys(state.chunk_keys(keys)))
        return [(wanted[key], key, slot) for key, slot in begun]

    def take_left(self) -> Mapping[str, Set[OffloadKey]]:
        """Return, by request, what of the offers of this step waits for slots still, though a part was begun."""
        left, self._left = self._left, {}
        return left

    def _wanted(self, keys: Collection[OffloadKey], state: RequestState, now_s: float) -> dict[ChunkKey, OffloadKey]:
        """Decide which of the offered chunks are stored; return them by chunk key, in the order offered.

        Those that the mirror wants, or that the request asks to pin, and that are not in flight. Behind a hole only
        these and pinned ones: another chunk there could not be hit, a pinned one can once the hole is filled. Of what a
        request with a salt shares with a public prompt only these, too, or each salt would keep a copy of that prompt.
        """
        if not state.may_store:
            return {}
        wanted: dict[ChunkKey, OffloadKey] = {}
        is_asking = state.instructed is not None
        for offload_key in keys:
            key = chunk_key(offload_key, state.adapter_digest)
            is_wanted = self._mirror.wants(key) or (is_asking and self._is_requested(key, state))
            if not is_wanted or self._is_in_flight(key, now_s):
                continue
            if not (state.has_hole or state.public.covers(offload_key)) or self._is_promised(key, state):
                wanted[key] = offload_key
        return wanted

    def _is_requested(self, key: ChunkKey, state: RequestState) -> bool:
        """Return whether the request has asked to pin the chunk, and the daemon does not hold it."""
        if state.instructed is None or self._mirror.may_be_held(key):
            return False
        return state.instructed.wants(key, self._mirror.is_pinned)

    def _is_promised(self, key: ChunkKey, state: RequestState) -> bool:
        return self._mirror.is_pinned(key) or self._is_requested(key, state)

    def _is_in_flight(self, key: ChunkKey, now_s: float) -> bool:
        return key in self._writing or key in self._orphaned or self._committing.get(key, now_s) > now_s

    def _awaits_slots(self, num_promised: int, state: RequestState, now_s: float) -> bool:
        """Return whether the request's stores wait for slots; only promised chunks are worth that."""
        # In one go no more can be stored than ever stood.
        num_needed = num_promised if self._can_split else min(num_promised, self._num_standing or self._num_credits)
        if len(self._credits) >= num_needed:
            state.store_deadline_s = None
            return False
        if state.is_finished():  # it offers these for the last time
            return False
        state.store_deadline_s = state.store_deadline_s or now_s + _WAIT_FOR_SLOTS_S
        # However long vLLM's step took: what has slots by now is stored, and the rest waits again.
        return now_s < state.store_deadline_s or (self._can_split and bool(self._credits))

    def _take_slots(
        self, keys: Sequence[ChunkKey], promised: Set[ChunkKey], attachment: Attachment
    ) -> list[tuple[ChunkKey, pb.SlotRef]]:
        """Take slots for as many of these as there are credits, and send a StoreBegin; return them in the order given.

        That order is vLLM's: it pairs its blocks with our slots by it. Which chunks get a slot is another matter:
        promised chunks (pinned, or soon) first, and others leave a quarter of the credits to promised ones that come
        before the next credits do.
        """
        pinned = [key for key in keys if key in promised][: len(self._credits)]
        unpinned = [key for key in keys if key not in promised]
        num_unpinned = max(0, len(self._credits) - len(pinned) - self._num_standing // 4)
        chosen = {*pinned, *unpinned[:num_unpinned]}
        begun = [(key, self._credits.popleft()) for key in keys if key in chosen]
        if begun:
            self._writing.update(begun)
            stores = [
                pb.StoreSlot(key=key, slot=slot, requested=key in promised and not self._mirror.is_pinned(key))
                for key, slot in begun
            ]
            message = pb.EngineMessage(store_begin=pb.StoreBegin(stores=stores))
            self._send(attachment, message, is_urgent=bool(pinned))
        if len(begun) < len(keys):
            attachment.flush()
        return begun

    def _send(self, attachment: Attachment, message: pb.EngineMessage, *, is_urgent: bool) -> None:
        """Send at once if it is urgent or slots are short: the daemon gives new ones for those that are reported.

        All that a prefill engine stores is urgent: a decode engine waits for it.

        Short is less than three quarters of the credits, which are for two whole steps: what is left would not do for
        another step and the share of pinned chunks.
        """
        is_short = 4 * len(self._credits) < 3 * self._num_standing
        is_urgent |= self._role is Role.PRODUCER
        (attachment.send if is_urgent or is_short else attachment.send_later)(message)

    def complete(self, offload_keys: Collection[OffloadKey], state: RequestState, now_s: float) -> None:
        """All workers are done with these, well or badly; the daemon looks at the stamps."""
        keys = state.chunk_keys(offload_keys)
        self._orphaned.difference_update(keys)  # stores of an earlier session end here
        ours = self._writing.keys() & keys
        # In the order in which they were begun, which is prefix order; vLLM names them in none.
        ended = [(key, self._writing.pop(key)) for key in list(self._writing) if key in ours] if ours else []
        done = [(key, slot) for key, slot in ended if key not in self._discarded]
        aborted = [(key, slot) for key, slot in ended if key in self._discarded]
        if aborted and self._attachment is not None:
            self._discarded.difference_update(key for key, _ in aborted)
            abort = pb.EngineMessage(store_abort=pb.StoreAbort(stores=_store_slots(aborted)))
            self._send(self._attachment, abort, is_urgent=False)
        if done and self._attachment is not None:
            self._committing.update((key, now_s + _COMMIT_GRACE_S) for key, _ in done)
            message = pb.EngineMessage(store_done=pb.StoreDone(stores=_store_slots(done)))
            self._send(self._attachment, message, is_urgent=any(self._mirror.is_pinned(key) for key, _ in done))
        self._stats.count(STORED_CHUNKS, num=len(done))
        state.num_open_stores -= len(keys)
        self._send_order(state)

    def finish(self, state: RequestState) -> None:
        """vLLM has forgotten the request, but for its jobs."""
        state.is_over = True
        self._send_order(state)

    def _send_order(self, state: RequestState) -> None:
        """After the last of several store jobs: the chunks stored first are the head, and to be kept the longest."""
        if state.is_over and not state.num_open_stores and state.num_store_jobs > 1 and state.offered:
            state.num_store_jobs = 0
            self._touches.send_order(list(state.offered))


def _store_slots(stores: Iterable[tuple[ChunkKey, pb.SlotRef]]) -> list[pb.StoreSlot]:
    return [pb.StoreSlot(key=key, slot=slot) for key, slot in stores]
