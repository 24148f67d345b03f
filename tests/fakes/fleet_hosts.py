"""Hosts of a fleet without engines: the real service and ledger of each, and one bucket."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from kvtier.fleet.local_pins import LocalPins
from kvtier.fleet.manifest import Manifest
from kvtier.fleet.pin_sync import PinSync
from kvtier.ledger import PromptRow
from kvtier.prompts.book import RequestedPin
from kvtier.service.cache import Cache
from tests.fakes.memory_store import Bucket, MemoryStore
from tests.fakes.scripted_engine import config_in


@dataclass
class FleetHost:
    """One host."""

    name: str
    cache: Cache
    store: MemoryStore
    sync: PinSync

    async def pin(self, name: str, content: int, **how: object) -> PromptRow:
        """Pin tokens that `content` stands for."""
        pin = RequestedPin(name=name, tokens=tokens_of(content), replace=True, **how)  # type: ignore[arg-type]
        (made,) = await self.cache.pins.apply([pin])
        return made

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
    return [content, *range(40)]


@asynccontextmanager
async def fleet_host(folder: Path, bucket: Bucket, name: str, *, seed: int = 0) -> AsyncIterator[FleetHost]:
    """Run a host; its ledger stays in the folder."""
    folder.mkdir(exist_ok=True)  # noqa: ASYNC240
    cache = await Cache.open(config_in(folder))
    try:
        store = MemoryStore(bucket, seed=seed)
        sync = PinSync(cache.resources, LocalPins(cache), store, host=name, now_unix_s=bucket.clock)
        await sync.load()
        yield FleetHost(name, cache, store, sync)
    finally:
        await cache.close()
