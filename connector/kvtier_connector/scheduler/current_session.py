"""The session that the scheduler works with now: takes the daemon's events in and passes each to its owner."""

import logging
from dataclasses import dataclass

from kvtier._pb import engine_pb2 as pb
from kvtier.client.circuit_breaker import CircuitBreaker
from kvtier.client.engine_session import Attachment
from kvtier_connector.discovery import PromptObserver
from kvtier_connector.engine.transfer_job import ArenaChunk, ArenaSpec, Awaited
from kvtier_connector.gpu_pins import PinnedBlocks
from kvtier_connector.kv_events.host_events import HostEvents
from kvtier_connector.metrics.declared import ATTACHED
from kvtier_connector.metrics.engine_stats import ConnectorStats
from kvtier_connector.outcomes.outcome_reports import OutcomeReports
from kvtier_connector.requests.instructions import Instructions
from kvtier_connector.scheduler.chunk_mirror import ChunkMirror
from kvtier_connector.scheduler.lookups import Lookups
from kvtier_connector.scheduler.recurrent_state import MissingStates
from kvtier_connector.scheduler.stores import StorePlanner
from kvtier_connector.scheduler.touches import Touches
from kvtier_connector.session.daemon_events import (
    Attached,
    DaemonEvents,
    Detached,
    Event,
    PinBound,
    PinGone,
    Received,
)
from kvtier_connector.settings import Role

logger = logging.getLogger(__name__)

START_S = 5.0
"""How long an engine that has just started, and has no requests, steps until its first session is there."""


@dataclass(kw_only=True, eq=False)
class CurrentSession:
    """Scheduler thread only; never waits."""

    events: DaemonEvents  # what the session's threads have received
    useful_bytes: tuple[int, ...]  # per group, as announced to the daemon
    breaker: CircuitBreaker  # opened by lookups; a probe that the daemon answers closes it here
    mirror: ChunkMirror  # records which chunks are pinned and held
    pinned_blocks: PinnedBlocks  # records which of vLLM's blocks are pinned
    lookups: Lookups  # get answers; this one and the next three have the session to send in
    touches: Touches
    stores: StorePlanner  # get slots
    instructions: Instructions  # ask for pins in it
    outcomes: OutcomeReports  # report how requests ended
    missing: MissingStates  # forgets what it knew of the last session
    observer: PromptObserver | None  # reports what requests begin with; gets the session
    stats: ConnectorStats  # reports whether there is a session
    host_events: HostEvents | None = None  # announces pins in host memory to routers; None: nothing does
    role: Role = Role.BOTH  # which half of a pair of engines this one is
    attachment: Attachment | None = None  # the session; None while there is none
    _prepared: Attachment | None = None  # whose arena the workers prepare
    _starts_until_s: float | None = None  # None: vLLM has not asked yet
    _sent_rate: float | None = None

    def take_events(self, now_s: float) -> None:
        """Take in what the session's threads have received. Never between a lookup and its `prepare_load`."""
        for event in self.events.poll():
            try:
                self._take_event(event, now_s)
            except Exception:  # a cache failure never reaches vLLM, whatever a daemon sends
                logger.exception("kvtier: what the daemon sent makes no sense; the session ends, and another begins")
                self.end()
                self.events.reconnect()

    def _take_event(self, event: Event, now_s: float) -> None:
        match event:
            case Attached(attachment):
                self._begin(attachment)
            case _ if event.attachment is not self.attachment:
                pass
            case Detached():
                self.end()
            case PinBound(_, pin):
                self.mirror.add(pin)
                self.pinned_blocks.add(pin.pin_id, pin.gpu_keys if pin.pinned else (), pin.priority)
                if not pin.pinned:
                    self.instructions.asks.pin_gone()
                if self.host_events is not None:
                    self.host_events.bound(pin.pin_id, pin.announced)
            case PinGone(_, pin_id):
                self.mirror.remove(pin_id)
                self.pinned_blocks.remove(pin_id)
                self.instructions.asks.pin_gone()
                if self.host_events is not None:
                    self.host_events.gone(pin_id)
            case Received(_, message):
                self._take_message(message, now_s)

    def _take_message(self, message: pb.DaemonMessage, now_s: float) -> None:
        match message.WhichOneof("kind"):
            case "acquire_update":
                self.lookups.apply(message.acquire_update, now_s)
            case "store_credits":
                self.stores.add_credits(message.store_credits.slots)
            case "chunks_held":
                self._take_held(message.chunks_held)
            case "prefixes_wanted":
                if self.observer is not None:
                    self.observer.set_wanted(message.prefixes_wanted.digests)
            case "request_pins_answer":
                self.instructions.asks.answered(message.request_pins_answer, now_s)
            case "pin_residency" if self.host_events is not None:
                residency = message.pin_residency
                for pin_id, num_chunks in zip(residency.pin_ids, residency.num_host_chunks, strict=False):
                    self.host_events.resident(pin_id, num_chunks)
            case "pong":
                self._close_breaker()

    def _take_held(self, held: pb.ChunksHeld) -> None:
        self.mirror.set_held(held.keys, held.held)
        self.stores.commit_answered(held.keys)
        for pin_id in held.pin_ids:
            self.stores.commit_answered(self.mirror.hold_pin(pin_id))
        self.mirror.is_complete |= held.complete

    def _begin(self, attachment: Attachment) -> None:
        self.end()
        self._attach(attachment)
        welcome = attachment.welcome
        self.mirror.stores_all = welcome.store_mode == pb.STORE_ALL
        if self.role is not Role.BOTH and not self.mirror.stores_all:
            logger.warning(
                'kvtier: kv_role is "%s", and the daemon stores pinned prompts only: all others are computed by both '
                'engines of a pair; set cache.store = "all" for the daemon',
                self.role.value,
            )
        # Kept without a session too: what the daemon cannot bring back is worth the more in vLLM's prefix cache.
        self.pinned_blocks.retain({*welcome.pin_ids, *(pin.pin_id for pin in welcome.pins)})
        self._sent_rate = None
        self._close_breaker()

    def end(self) -> None:
        """Work without a session until the next one begins: every lookup is a MISS, nothing is stored."""
        self._attach(None)
        self.missing.clear()
        self.mirror.clear()
        if self.host_events is not None:
            self.host_events.session_ended()

    def _attach(self, attachment: Attachment | None) -> None:
        self.attachment = attachment
        self.stats.set(ATTACHED, int(attachment is not None))
        for each in (self.lookups, self.touches, self.stores, self.instructions, self.outcomes):
            each.attach(attachment)
        if self.observer is not None:
            self.observer.attach(attachment)

    def probe_daemon(self) -> None:
        """The breaker has opened: ping the daemon until it answers."""
        logger.warning("kvtier: no answer from the daemon in time; lookups are misses until it answers a probe")
        self.events.probe(True)

    def _close_breaker(self) -> None:
        if not self.breaker.is_closed:
            logger.info("kvtier: the daemon answers again")
        self.breaker.close()
        self.events.probe(False)

    def report_rate(self, tokens_per_s: float | None) -> None:
        """Send the daemon the measured prefill rate, if it differs from the last one sent by more than a fifth."""
        if self.attachment is None or tokens_per_s is None:
            return
        if self._sent_rate is None or abs(tokens_per_s - self._sent_rate) > self._sent_rate / 5:
            self._sent_rate = tokens_per_s
            self.attachment.send(pb.EngineMessage(engine_rates=pb.EngineRates(prefill_tokens_per_s=tokens_per_s)))

    def is_starting(self, now_s: float) -> bool:
        """Return whether the workers wait for an arena that may come at any moment.

        False while the daemon cannot be reached or refuses, and from `START_S` after the first call on: an idle vLLM
        must not step for ever, and is woken only where routers are to know of pins.
        """
        if self._starts_until_s is None:
            self._starts_until_s = now_s + START_S
        return self._prepared is None and now_s < self._starts_until_s and not self.events.is_failing

    def new_arena(self) -> ArenaSpec | None:
        """Return the session's arena, naming no chunks, for the workers to prepare; once for each session."""
        if self.attachment is self._prepared:
            return None
        self._prepared = self.attachment
        return None if self.attachment is None else self.arena_spec("", [])

    def arena_spec(self, req_id: str, chunks: list[ArenaChunk], awaited: Awaited | None = None) -> ArenaSpec:
        """Return the arena side of a job; without a session it names no arena, and the job fails."""
        welcome = self.attachment.welcome if self.attachment is not None else pb.Welcome()
        return ArenaSpec(
            req_id=req_id,
            arena_id=welcome.arena.arena_id,
            arena_path=welcome.arena.path,
            lock_path=welcome.lock_path,
            useful_bytes=self.useful_bytes,
            chunks=tuple(chunks),
            awaited=awaited,
        )
