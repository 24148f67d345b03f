"""The outgoing half of an engine's session: makes messages, and queues them for the stream."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvtier._pb import engine_pb2 as pb
from kvtier.concurrency.turns import slices
from kvtier.core.chunks.chunk import Chunk
from kvtier.core.chunks.resident_runs import ResidentRun
from kvtier.core.layout import ChunkKey
from kvtier.core.requests.request_outcomes import RequestOutcome
from kvtier.core.slots import SlotRef
from kvtier.core.tokens import TokenIds
from kvtier.ledger import PromptRow
from kvtier.rpc.convert import in_turns_of, pin_fields
from kvtier.sessions.engine_peer import EnginePeer, KnownPin, PinResult, PromotionForecast

MAX_QUEUED_BYTES = 256 * 1024**2
"""Of messages that an engine has yet to read; all that a namespace of a million chunks holds is named in 40 MB."""
MAX_TOGETHER_BYTES = 64 * 1024
"""Of messages that are sent to an engine at once: more saves nothing, and the first of them would wait for the last."""
_HOST, _PROMOTING = pb.ChunkResidency.HOST, pb.ChunkResidency.PROMOTING  # looked up once, not per chunk

_Sent = pb.DaemonMessage | PromptRow | Sequence[KnownPin]
"""A message, or the pins of one that is yet to be made."""
_Residency = Mapping[str, Any]
"""A ChunkResidency by field names: one nested mapping becomes a message in a third of the time that objects take."""


def about_bytes(*, num_chunks: int = 0, num_tokens: int = 0) -> int:
    """Return about how long a message is: its exact size would cost as much as sending it."""
    return 64 + 40 * num_chunks + 3 * num_tokens


class StreamPeer(EnginePeer):
    """Outgoing half of a session: makes messages and queues them for the stream.

    If more than `MAX_QUEUED_BYTES` wait, the engine does not read (a stopped process): the queue is dropped, and the
    stream ends. Without one of the messages, the engine would not know what is held.

    Args:
        on_full: Called once, soon after that.
    """

    def __init__(self, on_full: Callable[[], None]) -> None:
        self._on_full = on_full
        self._queue: deque[tuple[_Sent, int]] = deque()
        self._changed = asyncio.Event()  # the queue, or `_is_finished`
        self._queued_bytes = 0
        self._is_finished = False
        self._answer: pb.DaemonMessage | None = None  # to an acquire; what there is of it so far

    def send(self, message: _Sent, about_bytes: int = 64) -> None:
        """Queue a message of about this many bytes.

        Prompts become a message when its turn comes: that of a million tokens takes 40 ms to make.
        """
        if self._is_finished:
            return
        self._queued_bytes += about_bytes
        self._queue.append((message, about_bytes))
        self._changed.set()
        if self._queued_bytes > MAX_QUEUED_BYTES:
            self._queue.clear()
            self.finish()
            asyncio.get_running_loop().call_soon(self._on_full)  # not here: the service is in the middle of something

    def finish(self) -> None:
        """End the stream after what is queued."""
        self._is_finished = True
        self._changed.set()

    async def next(self) -> pb.DaemonMessages | None:
        """Return what to send next: all that is queued, as far as it goes together; None at the end."""
        while not self._queue:
            if self._is_finished:
                return None
            self._changed.clear()
            await self._changed.wait()
        message, num_bytes = self._queue.popleft()
        self._queued_bytes -= num_bytes
        if not isinstance(message, pb.DaemonMessage):
            return pb.DaemonMessages(messages=[await _of_pins(message)])
        together = [message]
        while self._queue:
            message, more_bytes = self._queue[0]
            num_bytes += more_bytes
            if not isinstance(message, pb.DaemonMessage) or num_bytes > MAX_TOGETHER_BYTES:
                break
            together.append(message)
            self._queue.popleft()
            self._queued_bytes -= more_bytes
        return pb.DaemonMessages(messages=together)

    def acquire_answered(
        self,
        acquire_id: int,
        leased: Mapping[int, Chunk],
        forecast: PromotionForecast,
        *,
        more: bool = False,
        missed: RequestOutcome | None = None,
    ) -> None:
        if isinstance(leased, ResidentRun):
            self.send(_answer_of(acquire_id, leased), about_bytes(num_chunks=len(leased)))
            return
        resident = [
            (index, host.slot)
            for index, chunk in leased.items()
            if (host := chunk.host) is not None and not host.promoting
        ]
        promoting: list[_Residency] = []
        if len(resident) < len(leased):
            promoting = [
                {"index": index, "state": _PROMOTING, "slot": _slot(host.slot)}
                for index, chunk in leased.items()
                if (host := chunk.host) is not None and host.promoting
            ]
        message = _update_message(acquire_id, promoting, forecast, resident)
        if missed is not None:
            message.acquire_update.MergeFrom(pb.AcquireUpdate(miss_reason=missed.name))
        if self._answer is not None:
            self._answer.MergeFrom(message)
            message = self._answer
        self._answer = message if more else None
        if not more:
            update = message.acquire_update
            self.send(message, about_bytes(num_chunks=len(update.chunks) + len(update.resident.indexes)))

    def promotion_advanced(
        self, acquire_id: int, ready: Sequence[tuple[int, SlotRef]], failed: Sequence[int], forecast: PromotionForecast
    ) -> None:
        chunks: list[_Residency] = [
            {"index": index, "state": _HOST, "slot": _slot(ref), "from_disk": True} for index, ref in ready
        ]
        chunks += [{"index": index, "state": pb.ChunkResidency.MISS} for index in failed]
        self.send(_update_message(acquire_id, chunks, forecast), about_bytes(num_chunks=len(chunks)))

    def credits_granted(self, slots: Sequence[SlotRef]) -> None:
        self.send(pb.DaemonMessage(store_credits=pb.StoreCredits(slots=[_slot(ref) for ref in slots])))

    def pin_added(self, prompt: PromptRow) -> None:
        self.send(prompt, about_bytes(num_tokens=len(prompt.tokens)))

    def pins_added(self, pins: Sequence[KnownPin]) -> None:
        self.send(pins, sum(pin.about_bytes for pin in pins))

    def pin_removed(self, pin_id: str) -> None:
        self.send(pb.DaemonMessage(pin_removed=pb.PinRemoved(pin_id=pin_id)))

    def chunks_held(self, keys: Sequence[ChunkKey], held: bool, *, complete: bool = False) -> None:
        message = pb.DaemonMessage(chunks_held=pb.ChunksHeld(keys=keys, held=held, complete=complete))
        self.send(message, about_bytes(num_chunks=len(keys)))

    def pins_held(self, pin_ids: Sequence[str]) -> None:
        self.send(
            pb.DaemonMessage(chunks_held=pb.ChunksHeld(pin_ids=pin_ids, held=True)),
            about_bytes(num_chunks=len(pin_ids)),
        )

    def prefixes_wanted(self, digests: Sequence[bytes]) -> None:
        self.send(pb.DaemonMessage(prefixes_wanted=pb.PrefixesWanted(digests=digests)))

    def request_pins_answered(self, ask_id: int, results: Sequence[PinResult], problem: str) -> None:
        answer = pb.RequestPinsAnswer(
            id=ask_id,
            results=[pb.RequestPinResult(state=result.outcome.name, ends_in_s=result.ends_in_s) for result in results],
            problem=problem,
        )
        self.send(pb.DaemonMessage(request_pins_answer=answer))

    def device_blocks_wanted(self, ask_id: int, pin_ids: Sequence[str]) -> None:
        wanted = pb.DeviceBlocksWanted(id=ask_id, pin_ids=pin_ids)
        self.send(pb.DaemonMessage(device_blocks_wanted=wanted), about_bytes(num_chunks=len(pin_ids)))

    def pins_resident(self, nums_host_chunks: Mapping[str, int]) -> None:
        message = pb.PinResidency(pin_ids=nums_host_chunks.keys(), num_host_chunks=nums_host_chunks.values())
        self.send(pb.DaemonMessage(pin_residency=message), about_bytes(num_chunks=len(nums_host_chunks)))

    def ponged(self, ping_id: int) -> None:
        self.send(pb.DaemonMessage(pong=pb.Pong(id=ping_id)))


def _answer_of(acquire_id: int, run: ResidentRun) -> pb.DaemonMessage:
    """Return the first update for an acquire of a run; the bytes of its slots are made once."""
    if run.answer is None:
        slots = [(index, host.slot) for index, host in zip(run, run.copies, strict=True)]
        run.answer = _update_message(0, (), PromotionForecast(), slots).acquire_update.SerializeToString()
    message = pb.DaemonMessage()
    message.acquire_update.MergeFromString(run.answer)
    message.acquire_update.acquire_id = acquire_id
    return message


def _update_message(
    acquire_id: int,
    chunks: Sequence[_Residency],
    forecast: PromotionForecast,
    resident: Sequence[tuple[int, SlotRef]] = (),
) -> pb.DaemonMessage:
    indexes, refs = zip(*resident, strict=True) if resident else ((), ())
    slots, generations = zip(*refs, strict=True) if refs else ((), ())
    update = {
        "acquire_id": acquire_id,
        "resident": {"indexes": indexes, "slots": slots, "generations": generations},
        "chunks": chunks,
        "pending_bytes": forecast.pending_bytes,
        "promote_bytes_per_s": forecast.bytes_per_s,
        "ready_in_s": forecast.ready_in_s,
    }
    return pb.DaemonMessage(acquire_update=update)


async def _of_pins(pins: PromptRow | Sequence[KnownPin]) -> pb.DaemonMessage:
    """Make the message, of a pin that is alone in it in several turns of the loop: it may be long."""
    if isinstance(pins, PromptRow):
        message = pb.DaemonMessage(pin_added={"pin": pin_fields(replace(pins, tokens=TokenIds()))})
        await _add_long_fields(message.pin_added.pin, KnownPin(pins))
    elif len(pins) == 1 and not pins[0].are_joined:
        message = pb.DaemonMessage(pins_added={"pins": [pin_fields(replace(pins[0].prompt, tokens=TokenIds()))]})
        await _add_long_fields(message.pins_added.pins[0], pins[0])
    else:
        message = pb.DaemonMessage(pins_added={"pins": [pin_fields(*pin) for pin in pins]})
    return message


async def _add_long_fields(message: pb.Pin, pin: KnownPin) -> None:
    async for tokens in in_turns_of(pin.prompt.token_ids):
        message.tokens.extend(tokens)
    for keys in slices(pin.keys):
        message.keys.extend(keys)
        await asyncio.sleep(0)


def _slot(ref: SlotRef) -> Mapping[str, int]:
    return {"slot": ref.slot, "generation": ref.generation}
