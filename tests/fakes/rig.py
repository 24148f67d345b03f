"""The service without gRPC: a cache over a tier in memory, a real ledger and arena, and sessions that keep a list."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.core.chunks.chunk import Chunk
from kvtier.core.layout import ChunkKey, KVLayout
from kvtier.core.requests.request_outcomes import RequestOutcome
from kvtier.core.slots import SlotRef, SlotState
from kvtier.disk.base import ChunkPayload, DiskTier, StoredChunk, checksum_of
from kvtier.ledger import Ledger, PromptRow
from kvtier.service.cache import Cache
from kvtier.sessions.engine_peer import EngineHello, KnownPin, PinResult, PromotionForecast
from kvtier.sessions.session import Session
from kvtier.tiering.namespace import Namespace
from kvtier.tiering.resources import Resources
from tests.fakes.chunks import noise
from tests.fakes.scripted_engine import DEADLINE_S, ONE_GROUP, chunk_key, config_in
from tests.fakes.stepped_tier import SteppedTier


def at_once(steps: Iterator[None]) -> None:
    """Go through a long call without a turn of the loop in between."""
    for _ in steps:
        pass


class LeasedChunk(NamedTuple):
    """A chunk of an acquire's first answer, as it was then: its index, and whether it was not readable yet."""

    index: int  # type: ignore[assignment]  # tuple.index is not wanted of it
    promoting: bool


@dataclass(eq=False)  # an engine, not a value: the inventory removes one of two
class ListPeer:
    """What a session was sent.

    Attributes:
        answers: Chunks of each acquire's first answer, and its forecast.
        ready: Indexes that became readable, one list per update, by acquire.
        missed: Indexes that will not, by acquire.
        forecasts: Of the updates, in order.
        held: Last word on each key.
        held_pins: Ids of pins that were said to be held whole.
        pin_answers: Results and problem of each request for pins.
        resident: Last word on how many chunks of each pin are in host memory.
    """

    answers: dict[int, tuple[Sequence[LeasedChunk], PromotionForecast]] = field(default_factory=dict)
    ready: dict[int, list[list[int]]] = field(default_factory=dict)
    missed: dict[int, list[int]] = field(default_factory=dict)
    forecasts: list[PromotionForecast] = field(default_factory=list)
    held: dict[ChunkKey, bool] = field(default_factory=dict)
    held_pins: list[str] = field(default_factory=list)
    pin_answers: dict[int, tuple[Sequence[PinResult], str]] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)
    resident: dict[str, int] = field(default_factory=dict)
    _part: list[LeasedChunk] = field(default_factory=list)

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
        self._part += [LeasedChunk(index, chunk.promoting) for index, chunk in leased.items()]
        if not more:
            self.answers[acquire_id], self._part = (self._part, forecast), []

    def promotion_advanced(
        self,
        acquire_id: int,
        ready: Sequence[tuple[int, SlotRef]],
        failed: Sequence[int],
        forecast: PromotionForecast,
    ) -> None:
        """See EnginePeer."""
        self.ready.setdefault(acquire_id, []).append([index for index, _ in ready])
        self.missed.setdefault(acquire_id, []).extend(failed)
        self.forecasts.append(forecast)
        self.words += ["missed"] * len(failed)

    def chunks_held(self, keys: Sequence[ChunkKey], held: bool, *, complete: bool = False) -> None:
        """See EnginePeer."""
        self.held |= dict.fromkeys(keys, held)
        self.words += ["held" if held else "wanted"] * len(keys)

    def pins_held(self, pin_ids: Sequence[str]) -> None:
        """See EnginePeer."""
        self.held_pins += pin_ids

    def credits_granted(self, slots: Sequence[SlotRef]) -> None:
        """See EnginePeer."""

    def pin_added(self, prompt: PromptRow) -> None:
        """See EnginePeer."""

    def pins_added(self, pins: Sequence[KnownPin]) -> None:
        """See EnginePeer."""

    def pin_removed(self, pin_id: str) -> None:
        """See EnginePeer."""

    def prefixes_wanted(self, digests: Sequence[bytes]) -> None:
        """See EnginePeer."""

    def request_pins_answered(self, ask_id: int, results: Sequence[PinResult], problem: str) -> None:
        """See EnginePeer."""
        self.pin_answers[ask_id] = (results, problem)

    def device_blocks_wanted(self, ask_id: int, pin_ids: Sequence[str]) -> None:
        """See EnginePeer."""

    def pins_resident(self, nums_host_chunks: Mapping[str, int]) -> None:
        """See EnginePeer."""
        self.resident.update(nums_host_chunks)

    def ponged(self, ping_id: int) -> None:
        """See EnginePeer."""

    def all_ready(self, acquire_id: int = 1) -> list[int]:
        """Return the chunks of an acquire that became readable after its first answer, in order."""
        return [index for group in self.ready.get(acquire_id, []) for index in group]

    def num_ready(self, acquire_id: int = 1) -> int:
        """Return how many those are."""
        return len(self.all_ready(acquire_id))


class Rig:
    """One namespace; its keys are `chunk_key(n)`, the bytes of each are `content(n)`."""

    def __init__(self, cache: Cache, tier: SteppedTier, namespace: Namespace) -> None:
        self.cache, self.tier, self.namespace = cache, tier, namespace
        self.resources, self.table = cache.resources, namespace.table
        self.counters = cache.resources.counters
        self._num_sessions = 0

    async def session(self) -> tuple[Session, ListPeer]:
        """Attach an engine."""
        peer = ListPeer()
        self._num_sessions += 1
        return await self.cache.attach(hello_of(f"engine-{self._num_sessions}"), peer), peer

    def chunk(self, number: int) -> Chunk:
        """Return a chunk that is known."""
        chunk = self.table.get(chunk_key(number))
        assert chunk is not None
        return chunk

    def location(self, number: int) -> StoredChunk | None:
        """Return where a chunk lies on disk."""
        chunk = self.table.get(chunk_key(number))
        return None if chunk is None else chunk.location

    async def on_disk(self, numbers: Iterable[int]) -> str:
        """Put chunks into one pack; returns its id."""
        payloads = [_payload(number) for number in numbers]
        record = await self.resources.in_write(self.tier.write_pack, self.namespace.namespace_id, payloads)
        await self.namespace.index.record(record)
        return record.pack_id

    def in_host(self, numbers: Iterable[int]) -> list[ChunkKey]:
        """Commit chunks to host memory, as a store would; they are not on disk yet."""
        keys = []
        for number in numbers:
            slots = self.namespace.host.slots
            ref = slots.take_unbacked(SlotState.GRANTED)
            assert ref is not None
            self.namespace.host.back([ref], mapped=False)
            key = chunk_key(number)
            (view,) = self.namespace.host.payload(ref, key)
            view[:] = content(number)
            assert self.namespace.host.seal(ref)
            assert self.table.host.commit_store(key, ref, checksum_of([view]))
            keys.append(key)
        return keys

    def in_arena(self, number: int) -> bytes:
        """Return what is in a readable chunk's slot."""
        chunk = self.chunk(number)
        assert chunk.readable
        assert chunk.slot is not None
        return b"".join(self.namespace.host.payload(chunk.slot, chunk.key))

    def check(self) -> None:
        """Raise AssertionError unless table, index, usage, tier and ledger say the same."""
        self.table.check()
        check_disk(self.namespace, self.resources, self.tier)


def check_disk(namespace: Namespace, stores: Resources, tier: DiskTier) -> None:
    """Raise AssertionError unless index, usage and the tier's files agree."""
    files = tier.list_packs()
    assert stores.disk_usage.used_bytes == sum(files.values())
    live: dict[str, list[int]] = {}
    for chunk in namespace.table:
        if chunk.location is not None:
            live.setdefault(chunk.location.pack_id, []).append(chunk.location.stored_bytes)
    assert {pack_id: (len(sizes), sum(sizes)) for pack_id, sizes in live.items()} == {
        pack_id: (namespace.index.packs.num_chunks(pack_id), namespace.index.packs.live_bytes(pack_id))
        for pack_id in namespace.index.packs
    }
    assert set(live) <= set(files)


@asynccontextmanager
async def rig(folder: Path, **settings: Any) -> AsyncIterator[Rig]:
    """Open a cache with one namespace that has an arena; nothing runs in the background but what a test starts."""
    tier = SteppedTier()
    config = config_in(folder, **settings)
    cache = Cache(config, Resources(config, tier, Ledger.open(folder / "disk" / "ledger.sqlite")))
    try:
        session = await cache.attach(hello_of("first"), ListPeer())
        yield Rig(cache, tier, cache.namespaces[session.namespace_id])
    finally:
        await cache.close()


async def eventually(condition: Callable[[], bool]) -> None:
    """Return when a condition holds."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - it changes in worker threads too
            await asyncio.sleep(0.002)


def content(number: int) -> bytes:
    """Return a chunk's payload."""
    return noise(6000, number)


def keys_of(numbers: Iterable[int]) -> list[ChunkKey]:
    """Return the keys of chunks."""
    return [chunk_key(number) for number in numbers]


def _payload(number: int) -> ChunkPayload:
    segments = [memoryview(content(number))]
    return ChunkPayload(key=chunk_key(number), segments=segments, checksum=checksum_of(segments))


def hello_of(engine_id: str, layout: KVLayout = ONE_GROUP, weights: str = "1") -> EngineHello:
    """Return the Hello of an engine of the one namespace, or with other weights of another."""
    return EngineHello(
        engine_id=engine_id,
        pid=1,
        vllm_version="0",
        model_names=("model",),
        fingerprint={"weights": weights},
        layout=layout,
        store_credits=1,
        ephemeral=False,
    )
