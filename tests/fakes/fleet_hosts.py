"""Hosts of a fleet without engines: the real service and ledger of each, and one bucket."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from kvtier.disk.base import checksum_of
from kvtier.fleet.kv_sync import KVSync
from kvtier.fleet.local_pins import LocalPins
from kvtier.fleet.manifest import Manifest
from kvtier.fleet.pin_sync import PinSync
from kvtier.fleet.store_clock import StoreClock
from kvtier.ledger import PromptRow
from kvtier.library.rendering.recipe import Recipe, SourceKind
from kvtier.prompts.book import RequestedPin
from kvtier.prompts.states.status import PromptState
from kvtier.service.cache import Cache
from kvtier.sessions.session import Session
from tests.fakes.memory_store import Bucket, MemoryStore
from tests.fakes.rig import ListPeer, content, hello_of, keys_of
from tests.fakes.scripted_engine import chunk_key, config_in

TOKENS_RECIPE = Recipe(kind=SourceKind.TOKENS).to_json()
"""What the command line says of prompts that are given as token ids."""


@dataclass
class FleetHost:
    """One host."""

    name: str
    cache: Cache
    store: MemoryStore
    sync: PinSync
    kv: KVSync

    async def pin(self, name: str, content: int, **how: object) -> PromptRow:
        """Pin tokens that `content` stands for."""
        how = {"recipe_json": TOKENS_RECIPE} | how
        pin = RequestedPin(name=name, tokens=tokens_of(content), replace=True, **how)  # type: ignore[arg-type]
        (made,) = await self.cache.pins.apply([pin])
        return made

    async def engine(self, weights: str = "1") -> Session:
        """Attach an engine."""
        return await self.cache.attach(hello_of(f"engine-{self.name}", weights=weights), ListPeer())

    async def bind(self, session: Session, name: str, numbers: Iterable[int]) -> None:
        """Have an engine recognize a prompt by the chunks with these numbers."""
        keys = keys_of(numbers)
        await self.cache.bindings.bind(session, self.cache.prompts.get(name).pin_id, keys, 16 * len(keys), "")

    async def compute(self, session: Session, numbers: Iterable[int]) -> None:
        """Commit chunks to host memory, as a store of an engine does."""
        namespace, keys = session.namespace, keys_of(numbers)
        for ref, key, number in zip(await namespace.host.allocate(len(keys)), keys, numbers, strict=True):
            (view,) = namespace.host.payload(ref, key)
            view[:] = content(number)
            assert namespace.host.seal(ref)
            assert namespace.table.host.commit_store(key, ref, checksum_of([view]))
        namespace.write_back.add(keys)

    def in_host(self, session: Session, number: int) -> bytes | None:
        """Return the bytes of a chunk in host memory."""
        chunk = session.namespace.table.get(chunk_key(number))
        if chunk is None or not chunk.readable or chunk.slot is None:
            return None
        return b"".join(session.namespace.host.payload(chunk.slot, chunk.key))

    def is_durable(self, name: str) -> bool:
        """Return whether every chunk of a prompt is on disk here."""
        return self.cache.pins.state_of(self.cache.prompts.get(name)) is PromptState.DURABLE

    async def look_at_pins(self) -> None:
        """Have it known how far each pin is durable; by itself a host looks at a durable one each half minute."""
        self.cache.pins.watch.look_again()
        await self.cache.pins.watch.look()

    def pinned(self) -> dict[str, int]:
        """Return the content of each pin, by name; a replacement under way counts as what it is to replace."""
        prompts = self.cache.prompts
        named = [prompt for prompt in prompts.pinned() if prompt.origin == "named"]
        return {each.name: prompts.replacements.get(each.name, each).tokens[0] for each in named}

    def stored(self) -> dict[str, Manifest]:
        """Return what this host has seen in the store, by name."""
        return {manifest.name: manifest for manifest in self.sync.manifests()}


def tokens_of(content: int) -> list[int]:
    """Return tokens of a prompt."""
    return [content, *range(800)]


@asynccontextmanager
async def fleet_host(
    folder: Path, bucket: Bucket, name: str, *, seed: int = 0, host_bytes: int = 1 << 20
) -> AsyncIterator[FleetHost]:
    """Run a host; its ledger stays in the folder."""
    folder.mkdir(exist_ok=True)  # noqa: ASYNC240
    cache = await Cache.open(config_in(folder, host_bytes=host_bytes))
    try:
        store = MemoryStore(bucket, seed=seed)
        cache.pins.now_unix_s = bucket.clock
        local = LocalPins(cache)
        sync = PinSync(cache.resources, local, store, host=name, now_unix_s=bucket.clock)
        await sync.load()
        clock = StoreClock(store, host_clock=bucket.clock)
        kv = KVSync(cache, store, local, sync, clock, host=name, max_upload_s=600, parallel=4)
        yield FleetHost(name, cache, store, sync, kv)
    finally:
        await cache.close()
