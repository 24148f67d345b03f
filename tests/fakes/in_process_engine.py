"""An engine beside the service in one process: a real session and the real arena and lock, without gRPC and vLLM."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.client.arena_map import ArenaMap, SessionLockHolder
from kvtier.concurrency.turns import in_turns
from kvtier.core.arena_format import key_tag_of
from kvtier.core.chunks.chunk import Chunk
from kvtier.core.layout import ChunkKey, KVLayout, group_idx_of
from kvtier.core.requests.request_outcomes import RequestOutcome
from kvtier.core.slots import SlotRef
from kvtier.ledger import PromptRow
from kvtier.service.cache import Cache
from kvtier.sessions.engine_peer import EngineHello, KnownPin, PinResult, PromotionForecast
from kvtier.sessions.session import Session
from kvtier_connector.engine.chunk_keys import GroupShape
from kvtier_connector.scheduler.chunk_mirror import ChunkMirror
from kvtier_connector.session.pin_binder import BoundPin
from tests.fakes.rig import at_once


@dataclass
class Asked:
    """One acquire: its keys, slots that were said to be readable, indexes that are waited for."""

    keys: Sequence[ChunkKey]
    readable: dict[int, SlotRef] = field(default_factory=dict)
    promoting: set[int] = field(default_factory=set)
    num_parts: int = 0


class InProcessEngine:
    """One engine: what it was sent (it is its session's peer), and what it does to the arena.

    It checks every byte that it may read, at once and whenever `check` is called: a row whose generation is
    the one of the lease holds the chunk's bytes, even when the lease has ended.

    Attributes:
        asked: Acquires that were not released, by id.
        space: Which of the test's kinds of engine it is.
        mirror: The connector's own.
        credits: Slots to write into.
        writing: Resources begun.
        pinned: Prompts that it shall recognize, by pin id: whether they are pinned.
        num_read: Chunks whose bytes were looked at.
    """

    def __init__(self, hello: EngineHello, space: int) -> None:
        self.hello, self.space = hello, space
        self.asked: dict[int, Asked] = {}
        groups = hello.layout.groups
        self.mirror = ChunkMirror(
            [
                GroupShape(
                    group_idx=group.group_idx,
                    chunk_tokens=group.chunk_tokens,
                    hashes_per_chunk=1,
                    window_chunks=group.window_chunks,
                )
                for group in groups
            ]
        )
        self.credits: list[SlotRef] = []
        self.writing: list[tuple[ChunkKey, SlotRef]] = []
        self.pinned: dict[str, bool] = {}
        self.num_read = 0
        self._seen: dict[SlotRef, ChunkKey] = {}
        self._num_acquires = 0

    async def attach(self, cache: Cache) -> None:
        """Begin a session, as the servicer and the connector do it together."""
        self.session: Session = await cache.attach(self.hello, self)
        self.namespace = cache.namespaces[self.session.namespace_id]
        self.mirror.stores_all = cache.resources.stores_all
        self.pinned = {prompt.pin_id: prompt.pinned for prompt in cache.pins_for(self.session)}
        arena = self.namespace.host.arena
        self.arena = ArenaMap(arena.path, arena.geometry.arena_id)
        self.lock = SessionLockHolder(self.session.lock.path)
        self.lock.acquire()
        self.session.stores.top_up()
        if cache.resources.stores_all:
            self.session.start_task("held", self.session.send_inventory())

    def move(self, arena_dir: Path) -> None:
        """Its files have another folder now: those of a daemon that died."""
        self.end_processes()
        self.arena = ArenaMap(arena_dir / self.arena.path.name, self.arena.arena_id)
        self.lock = SessionLockHolder(arena_dir / self.lock.path.name)
        self.lock.acquire()

    def end_processes(self) -> None:
        """Its processes end."""
        self.lock.release()
        self.arena.close()

    # What it does

    @property
    def layout(self) -> KVLayout:
        """Of its rows."""
        return self.hello.layout

    def content(self, key: ChunkKey) -> bytes:
        """Return the chunk's payload; that of one key in four compresses."""
        num_bytes = self.layout.payload_bytes(group_idx_of(key))
        data = hashlib.shake_128(repr(sorted(self.hello.fingerprint.items())).encode() + key).digest(num_bytes)
        return data if key[0] % 4 else (data[:64] * (num_bytes // 64 + 1))[:num_bytes]

    def begin_store(self, keys: Sequence[ChunkKey]) -> None:
        """Take slots for as many of these as there are credits."""
        begun = [(key, self.credits.pop(0)) for key in keys[: len(self.credits)]]
        self.writing += begun
        self.session.stores.begin(begun)

    def write(self, key: ChunkKey, ref: SlotRef, *, stamp: int = 1, num_stamps: int | None = None) -> None:
        """Fill a row; stamped wrong when `stamp` is 0, and by fewer ranks than write it with `num_stamps`."""
        content, useful_bytes = self.content(key), self.layout.group(group_idx_of(key)).useful_bytes
        row = memoryview(self.arena._mapping)[self.arena.geometry.row_offset(ref.slot) :]
        for rank in range(self.layout.num_writers):
            start = rank * self.layout.rank_bytes
            part = content[rank * useful_bytes : (rank + 1) * useful_bytes]
            row[start : start + useful_bytes] = part if stamp else bytes(useful_bytes)
            if num_stamps is None or rank < num_stamps:
                self.arena.stamp(ref.slot, rank, key_tag_of(key) + 1 - stamp, ref.generation, useful_bytes)
        row.release()

    async def acquire(self, keys: Sequence[ChunkKey]) -> int:
        """Ask for chunks; the first answer has come when this returns."""
        self._num_acquires += 1
        self.asked[self._num_acquires] = Asked(keys)
        name = b"".join(keys)  # they have one length
        if not self.session.loads.acquire_again(self._num_acquires, name):
            await in_turns(self.session.loads.acquire(self._num_acquires, keys, name))
        return self._num_acquires

    def release(self, acquire_id: int, indexes: Sequence[int] | None) -> None:
        """Release all, or some."""
        asked = self.asked[acquire_id]
        for index in list(range(len(asked.keys))) if indexes is None else indexes:
            asked.readable.pop(index, None)
            asked.promoting.discard(index)
        if not asked.readable and not asked.promoting:
            del self.asked[acquire_id]
        at_once(self.session.loads.release(acquire_id, indexes))

    def check(self) -> None:
        """Fail if a row that it was allowed to read holds anything else at the same generation."""
        for ref, key in list(self._seen.items()):
            if self.arena.generation(ref.slot) == ref.generation:
                assert self._row(key, ref.slot) == self.content(key), "wrong bytes"
            else:
                del self._seen[ref]
        for asked in self.asked.values():
            for index, ref in asked.readable.items():
                assert self._seen.get(ref) == asked.keys[index], "a leased row was given away"

    def _row(self, key: ChunkKey, slot: int) -> bytes:
        row = memoryview(self.arena._mapping)[self.arena.geometry.row_offset(slot) :]
        data = b"".join(row[start : start + size] for start, size in self.layout.segments(group_idx_of(key)))
        row.release()
        return data

    # What it is sent

    def acquire_answered(
        self,
        acquire_id: int,
        leased: Mapping[int, Chunk],
        forecast: PromotionForecast,
        *,
        more: bool = False,
        missed: RequestOutcome | None = None,
    ) -> None:
        """See EnginePeer."""
        asked = self.asked[acquire_id]
        for index, chunk in leased.items():
            assert asked.keys[index] == chunk.key
            assert chunk.host is not None
            if chunk.host.promoting:
                asked.promoting.add(index)
            else:
                self._may_read(asked, index, chunk.host.slot)
        asked.num_parts += 1
        if asked.num_parts == 1 and not more:
            self._check_forecast(asked, forecast)
        # A part named earlier may have changed since: an update about it follows.
        assert more or asked.promoting or not forecast.pending_bytes

    def promotion_advanced(
        self,
        acquire_id: int,
        ready: Sequence[tuple[int, SlotRef]],
        failed: Sequence[int],
        forecast: PromotionForecast,
    ) -> None:
        """See EnginePeer."""
        asked = self.asked[acquire_id]
        for index, ref in ready:
            asked.promoting.remove(index)
            self._may_read(asked, index, ref)
        for index in failed:
            asked.promoting.remove(index)
        self._check_forecast(asked, forecast)
        if not asked.readable and not asked.promoting:
            del self.asked[acquire_id]

    def _check_forecast(self, asked: Asked, forecast: PromotionForecast) -> None:
        waited_for = [group_idx_of(asked.keys[index]) for index in asked.promoting]
        assert forecast.pending_bytes == sum(map(self.layout.payload_bytes, waited_for))

    def _may_read(self, asked: Asked, index: int, ref: SlotRef) -> None:
        asked.readable[index], self._seen[ref] = ref, asked.keys[index]
        assert self.arena.generation(ref.slot) == ref.generation
        assert self._row(asked.keys[index], ref.slot) == self.content(asked.keys[index]), "wrong bytes"
        self.num_read += 1

    def chunks_held(self, keys: Sequence[ChunkKey], held: bool, *, complete: bool = False) -> None:
        """See EnginePeer."""
        self.mirror.set_held(keys, held)
        if complete:
            self.mirror.is_complete = True

    def pins_held(self, pin_ids: Sequence[str]) -> None:
        """See EnginePeer."""
        for pin_id in pin_ids:
            self.mirror.hold_pin(pin_id)

    def credits_granted(self, slots: Sequence[SlotRef]) -> None:
        """See EnginePeer."""
        self.credits += slots

    def pin_added(self, prompt: PromptRow) -> None:
        """See EnginePeer."""
        self.pinned[prompt.pin_id] = prompt.pinned

    def pins_added(self, pins: Sequence[KnownPin]) -> None:
        """See EnginePeer."""
        for pin in pins:
            self.pin_added(pin.prompt)

    def pin_removed(self, pin_id: str) -> None:
        """See EnginePeer."""
        self.pinned.pop(pin_id, None)  # or one that it does not know
        self.mirror.remove(pin_id)

    def prefixes_wanted(self, digests: Sequence[bytes]) -> None:
        """See EnginePeer."""

    def request_pins_answered(self, ask_id: int, results: Sequence[PinResult], problem: str) -> None:
        """See EnginePeer."""

    def device_blocks_wanted(self, ask_id: int, pin_ids: Sequence[str]) -> None:
        """See EnginePeer."""

    def pins_resident(self, nums_host_chunks: Mapping[str, int]) -> None:
        """See EnginePeer."""

    def ponged(self, ping_id: int) -> None:
        """See EnginePeer."""

    async def bind(self, cache: Cache, prompt: PromptRow, keys: Sequence[ChunkKey]) -> None:
        """Recognize a prompt."""
        self.mirror.add(BoundPin(pin_id=prompt.pin_id, keys=tuple(keys), pinned=prompt.pinned))
        await cache.bindings.bind(self.session, prompt.pin_id, keys, len(prompt.tokens), "")
