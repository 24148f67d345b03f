"""EngineService: one stream, one session."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from kvtier._pb import engine_pb2 as pb
from kvtier._pb import engine_pb2_grpc
from kvtier.concurrency.turns import in_turns, slices
from kvtier.core import limits
from kvtier.core.chunks.chunk import Chunk
from kvtier.core.layout import ChunkKey
from kvtier.core.slots import SlotRef
from kvtier.core.stored import StoredChunk
from kvtier.core.tokens import TokenIds
from kvtier.errors import HelloTimeoutError, InvalidArgumentError, KvtierError
from kvtier.ledger import PromptRow
from kvtier.obs.log import log_event
from kvtier.printable import shortened
from kvtier.rpc.error_statuses import Context, translated
from kvtier.rpc.parsing import parse_hello, parse_stores
from kvtier.service import Cache
from kvtier.sessions.engine_peer import PromotionForecast
from kvtier.sessions.session import Session, SessionEnd
from kvtier.sessions.stores import StoreList

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_QUEUED_BYTES = 256 * 1024**2
"""Of messages that an engine has yet to read; all that a namespace of a million chunks holds is named in 40 MB."""
HELLO_TIMEOUT_S = 10.0
"""An engine has its Hello before it opens a stream, so it comes at once; the rest is for a machine that is far behind.
One that is stopped (SIGSTOP) in that moment attaches again."""
_SMALL_BYTES = 64
_CHUNK_BYTES = 40
_TOKEN_BYTES = 3
MAX_WELCOME_PIN_BYTES = 256 * 1024
"""Of pins in the Welcome; making and sending more at once would hold up every other engine."""
_KEYS_LISTED_IN_A_TURN = 32_768
_TOKENS_IN_A_TURN = 65_536
_HOST, _PROMOTING = pb.ChunkResidency.HOST, pb.ChunkResidency.PROMOTING  # looked up once, not per chunk

# A ChunkResidency by field names: one nested mapping becomes a message in a third of the time that objects take.
_Residency = Mapping[str, Any]


class StreamPeer:
    """Outgoing half of a session: turns the service's words into messages and queues them for the stream.

    When more than `MAX_QUEUED_BYTES` wait, the engine does not read (a stopped process): they are forgotten, and the
    stream ends where they stood. A message left out would leave the engine with a wrong idea of what is held.

    Args:
        on_full: Called once, soon after, when that happens.
    """

    def __init__(self, on_full: Callable[[], None]) -> None:
        self._on_full = on_full
        self._queue: asyncio.Queue[tuple[pb.DaemonMessage | PromptRow, int] | None] = asyncio.Queue()
        self._queued_bytes = 0
        self._is_full = False
        self._answer: pb.DaemonMessage | None = None  # to an acquire; what there is of it so far

    def send(self, message: pb.DaemonMessage | PromptRow, about_bytes: int = _SMALL_BYTES) -> None:
        """Queue a message of about this many bytes; its exact size would cost as much as sending it.

        A prompt becomes its PinAdded when its turn comes: the message of a million tokens takes 40 ms to make.
        """
        if self._is_full:
            return
        self._queued_bytes += about_bytes
        self._queue.put_nowait((message, about_bytes))
        if self._queued_bytes > MAX_QUEUED_BYTES:
            self._is_full = True
            while not self._queue.empty():
                self._queue.get_nowait()
            self.finish()
            asyncio.get_running_loop().call_soon(self._on_full)  # not here: the service is in the middle of something

    def finish(self) -> None:
        """End the stream after what is queued."""
        self._queue.put_nowait(None)

    async def next(self) -> pb.DaemonMessage | None:
        """Return the next message to send, None at the end."""
        queued = await self._queue.get()
        if queued is None:
            return None
        message, about_bytes = queued
        self._queued_bytes -= about_bytes
        return await _pin_added(message) if isinstance(message, PromptRow) else message

    def acquire_answered(
        self,
        acquire_id: int,
        leased: Mapping[int, Chunk[StoredChunk]],
        forecast: PromotionForecast,
        *,
        more: bool = False,
    ) -> None:
        """See EnginePeer."""
        chunks: list[_Residency] = [
            {
                "index": index,
                "state": _PROMOTING if host.promoting else _HOST,
                "slot": {"slot": host.slot.slot, "generation": host.slot.generation},
            }
            for index, chunk in leased.items()
            if (host := chunk.host) is not None
        ]
        message = _update_message(acquire_id, chunks, forecast)
        if self._answer is not None:
            self._answer.MergeFrom(message)
            message = self._answer
        self._answer = message if more else None
        if not more:
            self.send(message, _SMALL_BYTES + _CHUNK_BYTES * len(message.acquire_update.chunks))

    def promotion_advanced(
        self,
        acquire_id: int,
        ready: Sequence[tuple[int, SlotRef]],
        failed: Sequence[int],
        forecast: PromotionForecast,
    ) -> None:
        """See EnginePeer."""
        chunks: list[_Residency] = [
            {
                "index": index,
                "state": _HOST,
                "slot": {"slot": ref.slot, "generation": ref.generation},
                "from_disk": True,
            }
            for index, ref in ready
        ]
        chunks += [{"index": index, "state": pb.ChunkResidency.MISS} for index in failed]
        self.send(_update_message(acquire_id, chunks, forecast), _SMALL_BYTES + _CHUNK_BYTES * len(chunks))

    def credits_granted(self, slots: Sequence[SlotRef]) -> None:
        """See EnginePeer."""
        self.send(pb.DaemonMessage(store_credits=pb.StoreCredits(slots=[_slot(ref) for ref in slots])))

    def pin_added(self, prompt: PromptRow) -> None:
        """See EnginePeer."""
        self.send(prompt, _SMALL_BYTES + _TOKEN_BYTES * len(prompt.tokens))

    def pin_removed(self, pin_id: str) -> None:
        """See EnginePeer."""
        self.send(pb.DaemonMessage(pin_removed=pb.PinRemoved(pin_id=pin_id)))

    def chunks_held(self, keys: Sequence[ChunkKey], held: bool, *, complete: bool = False) -> None:
        """See EnginePeer."""
        message = pb.DaemonMessage(chunks_held=pb.ChunksHeld(keys=keys, held=held, complete=complete))
        self.send(message, _SMALL_BYTES + _CHUNK_BYTES * len(keys))

    def ponged(self, ping_id: int) -> None:
        """See EnginePeer."""
        self.send(pb.DaemonMessage(pong=pb.Pong(id=ping_id)))


class EngineServicer(engine_pb2_grpc.EngineServiceServicer):
    """Attach of proto/kvtier/v1/engine.proto."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._peers: set[StreamPeer] = set()

    async def Attach(
        self,
        request_iterator: AsyncIterator[pb.EngineMessage],
        context: Context,
    ) -> AsyncIterator[pb.DaemonMessage]:
        """Serve one session until either side ends the stream, or the engine stops reading."""

        def give_up() -> None:
            log_event(logger, "session_not_reading", level=logging.WARNING, session=session.session_id)
            reader.cancel()
            self._cache.end(session, SessionEnd.CUT)

        async with translated(context):
            hello = parse_hello(await _first_message(request_iterator))
            peer = StreamPeer(on_full=give_up)
            session = await self._cache.attach(hello, peer)
        self._peers.add(peer)
        how: SessionEnd | None = None
        try:
            reader = asyncio.create_task(self._read(session, peer, request_iterator), name="session-reader")
            try:
                prompts = self._cache.pins_for(session)
                welcome, num_named = self._welcome(session, prompts)
                yield welcome
                session.send_pins(self._cache.prompts.by_pin_id, [prompt.pin_id for prompt in prompts[num_named:]])
                session.stores.top_up()
                if self._cache.resources.stores_all:
                    session.send_inventory()
                while (message := await peer.next()) is not None:
                    yield message
            finally:
                reader.cancel()
                (outcome,) = await asyncio.gather(reader, return_exceptions=True)
            how = _how_it_ended(session, outcome)
            if isinstance(outcome, KvtierError):
                async with translated(context):
                    raise outcome
        finally:
            self._peers.discard(peer)
            self._cache.end(session, how or _how_it_broke(session))

    def finish_all(self) -> None:
        """The daemon stops: end every stream."""
        for peer in list(self._peers):
            peer.finish()

    async def _read(self, session: Session, peer: StreamPeer, messages: AsyncIterator[pb.EngineMessage]) -> bool:
        """Take in what the engine says; return whether it said goodbye before the stream ended."""
        try:
            async for message in messages:
                if message.WhichOneof("kind") == "goodbye":
                    return True
                await self._dispatch(session, message)
            return False
        finally:
            peer.finish()

    async def _dispatch(self, session: Session, message: pb.EngineMessage) -> None:
        match message.WhichOneof("kind"):
            case "acquire":
                keys = await _in_list("acquire.keys", message.acquire.keys)
                await in_turns(session.loads.acquiring(message.acquire.acquire_id, keys))
            case "release":
                release = message.release
                indexes = None if release.all else await _in_list("release.indexes", release.indexes)
                await in_turns(session.loads.releasing(release.acquire_id, indexes))
            case "touch":
                keys = await _in_list("touch.keys", message.touch.keys)
                await in_turns(session.stores.touching(keys, stored=message.touch.stored))
            case "store_begin":
                await _in_slices(session, session.stores.begin, "store_begin.stores", message.store_begin.stores)
            case "store_done":
                await _in_slices(session, session.stores.done, "store_done.stores", message.store_done.stores)
            case "store_abort":
                await _in_slices(session, session.stores.abort, "store_abort.stores", message.store_abort.stores)
            case "bind_pin":
                bind = message.bind_pin
                keys = await _in_list("bind_pin.keys", bind.keys)
                await self._cache.bind(session, bind.pin_id, keys, bind.covered_tokens, shortened(bind.error))
            case "engine_rates":
                session.measured(message.engine_rates.prefill_tokens_per_s)
            case "ping":
                session.peer.ponged(message.ping.id)
            case kind:
                raise InvalidArgumentError("message", kind, "Hello comes once; this kvtier knows no other message here")

    def _welcome(self, session: Session, prompts: Sequence[PromptRow]) -> tuple[pb.DaemonMessage, int]:
        """Return the first message, and for how many of the prompts it has room."""
        arena = session.tiers.host.arena
        differences = [
            pb.NamespaceDifference(namespace_id=d.namespace_id, fields=d.fields, num_prompts=d.num_prompts)
            for d in self._cache.differing_namespaces(session)
        ]
        pins, num_bytes = list[pb.Pin](), 0
        for prompt in prompts:
            num_bytes += _SMALL_BYTES + _TOKEN_BYTES * len(prompt.tokens)
            if num_bytes > MAX_WELCOME_PIN_BYTES:
                break
            pins.append(pin_message(prompt))
        welcome = pb.Welcome(
            session_id=session.session_id,
            namespace_id=session.namespace_id,
            arena=pb.ArenaInfo(
                arena_id=arena.geometry.arena_id,
                path=str(arena.path),
                num_slots=arena.geometry.num_slots,
                row_bytes=arena.geometry.row_bytes,
            ),
            lock_path=str(session.lock.path),
            pins=pins,
            other_namespaces=differences,
            store_mode=pb.STORE_ALL if self._cache.resources.stores_all else pb.STORE_PINNED,
            pin_ids=[prompt.pin_id for prompt in prompts],
        )
        return pb.DaemonMessage(welcome=welcome), len(pins)


async def _first_message(messages: AsyncIterator[pb.EngineMessage]) -> pb.EngineMessage | None:
    """Return the first message of a stream, None when it ended without one.

    Raises:
        HelloTimeoutError: Nothing came: such a stream would be held for ever, and nobody would know of it.
    """
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            return await anext(messages, None)
    except TimeoutError as exc:
        raise HelloTimeoutError(HELLO_TIMEOUT_S) from exc


def _how_it_ended(session: Session, outcome: bool | BaseException) -> SessionEnd:
    """Tell how a stream that was not cut off ended, by the outcome of its reader."""
    match outcome:
        case True:
            return SessionEnd.CLOSED
        case asyncio.CancelledError():  # ours: nothing more was to be sent
            return SessionEnd.DRAINED
        case KvtierError():
            return SessionEnd.REFUSED
    return _how_it_broke(session)


def _how_it_broke(session: Session) -> SessionEnd:
    return SessionEnd.CUT if session.is_busy else SessionEnd.GONE


def _update_message(acquire_id: int, chunks: Sequence[_Residency], forecast: PromotionForecast) -> pb.DaemonMessage:
    update = {
        "acquire_id": acquire_id,
        "chunks": chunks,
        "pending_bytes": forecast.pending_bytes,
        "promote_bytes_per_s": forecast.bytes_per_s,
        "ready_in_s": forecast.ready_in_s,
    }
    return pb.DaemonMessage(acquire_update=update)


async def _pin_added(prompt: PromptRow) -> pb.DaemonMessage:
    """Make the message, of a long prompt in several turns of the loop."""
    message = pb.DaemonMessage(pin_added=pb.PinAdded(pin=pin_message(replace(prompt, tokens=TokenIds()))))
    for start in range(0, len(prompt.tokens), _TOKENS_IN_A_TURN):
        if start:
            await asyncio.sleep(0)
        message.pin_added.pin.tokens.extend(prompt.token_ids[start : start + _TOKENS_IN_A_TURN].to_list())
    return message


def pin_message(prompt: PromptRow) -> pb.Pin:
    """Return a prompt as engines get it."""
    return pb.Pin(
        pin_id=prompt.pin_id,
        name=prompt.name,
        tokens=prompt.token_ids.to_list(),
        model=prompt.model,
        lora_name=prompt.lora_name,
        lora_path=prompt.lora_path,
        cache_salt=prompt.cache_salt,
        pinned=prompt.pinned,
        priority=prompt.priority,
    )


async def _in_list(field: str, items: Sequence[T]) -> list[T]:
    """Return a message's items; there may be a quarter of a million.

    Raises:
        InvalidArgumentError: There are more.
    """
    limits.check_count(field, len(items), limits.MAX_KEYS)
    listed: list[T] = []
    for number, part in enumerate(slices(items, _KEYS_LISTED_IN_A_TURN)):
        if number:
            await asyncio.sleep(0)
        listed += part
    return listed


async def _in_slices(
    session: Session, change: Callable[[StoreList], None], field: str, stores: Sequence[pb.StoreSlot]
) -> None:
    """Change the state of stores, a slice per turn of the loop; a session that ends in between frees its slots."""
    for number, part in enumerate(parse_stores(field, stores)):
        if number:
            await asyncio.sleep(0)
        if session.ended:
            return
        change(part)


def _slot(ref: SlotRef) -> pb.SlotRef:
    return pb.SlotRef(slot=ref.slot, generation=ref.generation)
