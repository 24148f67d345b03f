"""EngineService: what an engine says goes to its session, and what the session says goes to the engine."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any

from kvtier._pb import engine_pb2 as pb
from kvtier._pb import engine_pb2_grpc
from kvtier.concurrency import turns
from kvtier.concurrency.backlog import Backlog
from kvtier.core import limits
from kvtier.core.chunks.resident_runs import MAX_RUN_CHUNKS
from kvtier.core.slots import SlotRef
from kvtier.errors import HelloTimeoutError, InvalidArgumentError, KvtierError
from kvtier.ledger import PromptRow
from kvtier.obs.log import log_event
from kvtier.printable import shortened
from kvtier.rpc.convert import (
    changing_place,
    ended_request,
    in_turns_of,
    listed,
    message_of,
    parse_hello,
    parse_request_pins,
    pin_fields,
    prefix_of,
    seen_request,
)
from kvtier.rpc.error_statuses import Context
from kvtier.rpc.stream_peer import StreamPeer
from kvtier.service import Cache
from kvtier.sessions.engine_peer import MAX_PIN_BATCH_BYTES, KnownPin
from kvtier.sessions.session import Session, SessionEnd
from kvtier.sessions.stores import StoreList

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 10.0
"""An engine has its Hello before it opens a stream, so it comes at once, unless the machine is overloaded."""
MAX_WAITING_BYTES = 64 * 1024**2
"""Of messages of a session that wait for changes before them: binding 50,000 prompts of 512 tokens. Beyond that the
stream waits, and lookups with it."""
_CAN_WAIT = frozenset(("bind_pin", "confirm_pins", "prefix_tokens", "demote"))
"""They wait for the change lock, or send a lot: no request waits for them."""
_COMES_AFTER = frozenset(("store_begin", "store_done", "store_abort", "request_pins", "prefetch"))
"""They overtake none of those: only chunks of pins that are bound are kept, and a Demote undoes only what came before
it."""


class EngineServicer(engine_pb2_grpc.EngineServiceServicer):
    """`Attach` of proto/kvtier/v1/engine.proto: one stream, one session."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._peers: set[StreamPeer] = set()

    async def Attach(
        self, request_iterator: AsyncIterator[pb.EngineMessages], context: Context
    ) -> AsyncIterator[pb.DaemonMessages]:
        """Serve one session until either side ends the stream, or the engine stops reading."""

        def cut_off() -> None:
            log_event(logger, "session_not_reading", level=logging.WARNING, session=session.session_id)
            reader.cancel()
            self._cache.end(session, SessionEnd.CUT)

        hello = parse_hello(await _first_message(request_iterator))
        peer = StreamPeer(on_full=cut_off)
        session = await self._cache.attach(hello, peer)
        self._peers.add(peer)
        how: SessionEnd | None = None
        try:
            reader = asyncio.create_task(self._read(session, peer, request_iterator), name="session-reader")
            try:
                prompts = self._cache.pins_for(session)
                welcome, num_named = self._welcome(session, prompts)
                yield pb.DaemonMessages(messages=[welcome])
                pin_ids = [prompt.pin_id for prompt in prompts[num_named:]]
                find_pin = partial(self._cache.known_pin, session)
                session.start_task("pins", session.send_pins(find_pin, pin_ids))
                session.stores.top_up()
                self._cache.auto_pins.attached(session)
                if self._cache.resources.stores_all:
                    session.start_task("held", session.send_inventory())
                while (messages := await peer.next()) is not None:
                    yield messages
            finally:
                reader.cancel()
                (outcome,) = await asyncio.gather(reader, return_exceptions=True)
            how = _how_it_ended(outcome)
            if isinstance(outcome, Exception):  # KvtierError, or a defect
                raise outcome
        finally:
            self._peers.discard(peer)
            broken = SessionEnd.CUT if session.is_busy else SessionEnd.GONE
            self._cache.end(session, how or broken)

    def finish_all(self) -> None:
        """The daemon stops: end every stream."""
        for peer in list(self._peers):
            peer.finish()

    async def _read(self, session: Session, peer: StreamPeer, received: AsyncIterator[pb.EngineMessages]) -> bool:
        """Deal with what the engine sends; return whether it said goodbye before the stream ended.

        Messages are dealt with in their order, but for those that can wait, and what comes after these: they have an
        order of their own, and lookups overtake them. All that came before the end of the stream is dealt with.
        """
        has_skipped = False

        async def deal_with(waiting: bytes) -> None:
            await self._dispatch(session, pb.EngineMessage.FromString(waiting))

        try:
            async with Backlog(deal_with, MAX_WAITING_BYTES, on_error=peer.finish) as backlog:
                async for together in received:
                    limits.check_count("messages", len(together.messages), limits.MAX_MESSAGES)
                    breather = turns.Breather(is_urgent=True)
                    for message in together.messages:
                        kind = message.WhichOneof("kind")
                        if kind == "goodbye":
                            return True
                        if kind is None:  # of a newer connector, which does without an answer
                            if not has_skipped:
                                of = session.session_id
                                log_event(logger, "engine_message_skipped", level=logging.WARNING, session=of)
                            has_skipped = True
                        elif _waits(message, backlog):
                            await backlog.put(message.SerializeToString())  # it would keep all that came together
                        else:
                            await self._dispatch(session, message)
                        await breather.pause()
            return False
        finally:
            peer.finish()

    async def _dispatch(self, session: Session, message: pb.EngineMessage) -> None:
        match message.WhichOneof("kind"):
            case "acquire":
                await _acquire(session, message.acquire)
            case "release":
                release = message.release
                indexes = None if release.all else await listed("release.indexes", release.indexes)
                await turns.in_turns(session.loads.release(release.acquire_id, indexes))
            case "touch":
                keys = await listed("touch.keys", message.touch.keys)
                await turns.in_turns(session.stores.touch(keys, stored=message.touch.stored))
            case "store_begin":
                async for part in _slices(session, "store_begin.stores", message.store_begin.stores):
                    session.stores.begin(_store_list(part), [store.key for store in part if store.requested])
            case "store_done":
                async for part in _slices(session, "store_done.stores", message.store_done.stores):
                    session.stores.done(_store_list(part))
            case "store_abort":
                async for part in _slices(session, "store_abort.stores", message.store_abort.stores):
                    session.stores.abort(_store_list(part))
            case "bind_pin":
                bind = message.bind_pin
                keys = await listed("bind_pin.keys", bind.keys)
                await self._cache.bindings.bind(session, bind.pin_id, keys, bind.covered_tokens, shortened(bind.error))
            case "confirm_pins":
                pin_ids = await listed("confirm_pins.pin_ids", message.confirm_pins.pin_ids)
                unknown = await listed("confirm_pins.unknown_pin_ids", message.confirm_pins.unknown_pin_ids)
                await self._cache.confirm(session, pin_ids, unknown)
            case "engine_rates":
                session.measured(message.engine_rates.prefill_tokens_per_s)
            case "requests_seen":
                seen = message.requests_seen
                limits.check_count("requests_seen.requests", len(seen.requests), limits.MAX_SEEN_REQUESTS)
                await self._cache.auto_pins.observe(session, map(seen_request, seen.requests), seen.num_skipped)
            case "requests_ended":
                ended = message.requests_ended
                limits.check_count("requests_ended.requests", len(ended.requests), limits.MAX_ENDED_REQUESTS)
                requests = (ended_request(each, session.namespace_id) for each in ended.requests)
                await self._cache.outcomes.take(session, requests, ended.num_dropped)
            case "prefix_tokens":
                prefix = message.prefix_tokens
                limits.check_count("prefix_tokens.tokens", len(prefix.tokens), limits.MAX_TOKENS)
                await self._cache.auto_pins.take_tokens(session, await prefix_of(prefix))
            case "changing_middle":
                self._cache.auto_pins.report_place(session, changing_place(message.changing_middle))
            case "request_pins":
                self._cache.request_pins.ask(session, await parse_request_pins(message.request_pins))
            case "prefetch":
                session.namespace.prefetch(await listed("prefetch.keys", message.prefetch.keys))
            case "demote":
                demote = message.demote
                keys = await listed("demote.keys", demote.keys)
                digest = limits.check_digest("demote.digest", demote.digest)
                owner = limits.check_owner("demote.owner", demote.owner)
                await self._cache.request_pins.demote(session, keys, digest, owner)
            case "device_blocks":
                answer = message.device_blocks
                limits.check_count("device_blocks.num_blocks", len(answer.num_blocks), limits.MAX_ASKED_PINS)
                session.device_blocks.answered(
                    answer.id, answer.num_blocks, answer.num_cached_blocks, shortened(answer.problem)
                )
            case "ping":
                session.peer.ponged(message.ping.id)
            case kind:
                raise InvalidArgumentError("message", kind, "Hello comes once")

    def _welcome(self, session: Session, prompts: Sequence[PromptRow]) -> tuple[pb.DaemonMessage, int]:
        """Return the first message, and how many of the prompts it contains."""
        arena = session.tiers.host.arena
        differences = [
            pb.NamespaceDifference(
                namespace_id=other.namespace_id,
                fields=fields,
                num_prompts=self._cache.prompts.num_bound_in(other.namespace_id),
            )
            for other, fields in self._cache.differing_namespaces(session)
        ]
        pins, num_bytes = list[Mapping[str, Any]](), 0
        for prompt in prompts:
            pin = self._cache.known_pin(session, prompt.pin_id) or KnownPin(prompt)
            num_bytes += pin.about_bytes
            if num_bytes > MAX_PIN_BATCH_BYTES:
                break
            pins.append(pin_fields(*pin))
        welcome = pb.Welcome(
            session_id=session.session_id,
            namespace_id=session.namespace_id,
            arena=message_of(pb.ArenaInfo, arena.geometry, path=str(arena.path)),
            lock_path=str(session.lock.path),
            pins=pins,
            other_namespaces=differences,
            store_mode=pb.STORE_ALL if self._cache.resources.stores_all else pb.STORE_PINNED,
            pin_ids=[prompt.pin_id for prompt in prompts],
            report_requests=self._cache.auto_pins.is_on and not session.namespace.ephemeral,
        )
        return pb.DaemonMessage(welcome=welcome), len(pins)


def _waits(message: pb.EngineMessage, backlog: Backlog) -> bool:
    kind = message.WhichOneof("kind")
    if kind in _CAN_WAIT:
        return True
    return not backlog.is_empty and (kind in _COMES_AFTER or (kind == "touch" and message.touch.stored))


async def _first_message(received: AsyncIterator[pb.EngineMessages]) -> pb.EngineMessage | None:
    """Return the first message of a stream, None if it ended without one; no list of sessions shows a silent stream."""
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            together = await anext(received, None)
    except TimeoutError as exc:
        raise HelloTimeoutError(HELLO_TIMEOUT_S) from exc
    if together is None:
        return None
    if len(together.messages) != 1:
        raise InvalidArgumentError("messages", f"{len(together.messages)} of them", "Hello comes first, and alone")
    return together.messages[0]


def _how_it_ended(outcome: bool | BaseException) -> SessionEnd | None:
    """Return how a stream that we ended has ended, by the outcome of its reader; None: it broke."""
    match outcome:
        case True:
            return SessionEnd.CLOSED
        case asyncio.CancelledError():  # by us: the daemon stops
            return SessionEnd.DRAINED
        case KvtierError():
            return SessionEnd.REFUSED
    return None


async def _acquire(session: Session, message: pb.Acquire) -> None:
    limits.check_count("acquire.keys", len(message.keys), limits.MAX_KEYS)
    acquire_id, name = message.acquire_id, b""
    if len(message.keys) <= MAX_RUN_CHUNKS:
        message.acquire_id = 0
        name = message.SerializeToString()  # of its keys alone: no object has to be made of each
        if session.loads.acquire_again(acquire_id, name):
            return
    keys = await listed("acquire.keys", message.keys)
    await turns.in_turns(session.loads.acquire(acquire_id, keys, name))


async def _slices(
    session: Session, field: str, stores: Sequence[pb.StoreSlot]
) -> AsyncIterator[Sequence[pb.StoreSlot]]:
    """Yield a slice per turn of the loop, no more once the session has ended: that frees its slots."""
    limits.check_count(field, len(stores), limits.MAX_KEYS)
    async for part in in_turns_of(stores, turns.SLICE_KEYS):
        if session.ended:
            return
        yield part


def _store_list(stores: Sequence[pb.StoreSlot]) -> StoreList:
    return [(store.key, SlotRef(store.slot.slot, store.slot.generation)) for store in stores]
