"""The same bundle twice is one promise: when it ends, nothing keeps the chunks."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

from kvtier._pb import cache_pb2
from kvtier.bundles import RequestedImport, import_bundle
from kvtier.config.model import OwnerQuota, OwnersConfig
from kvtier.core.tokens import TokenIds
from kvtier.errors import OwnerQuotaError
from kvtier.prompts.book import RequestedPin
from kvtier.service.cache import Cache
from tests.fakes.operator import evict, pin, status_of, store_last_apart, unpin
from tests.fakes.rig import ListPeer, hello_of
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key, running, wait_durable
from tests.unit.bundles.test_round_trip import KEYS, Status, bundle_of, export, home, import_, refused


def test_a_bundle_that_is_imported_again_is_pinned_once(tmp_path: Path) -> None:
    """Its chunks could count one pinned prompt for each import: none of them was ever evicted again."""

    async def scenario() -> None:
        data = await bundle_of(home(tmp_path, "a"))
        there = home(tmp_path, "b")
        async with running(there) as stub, ScriptedEngine(there):
            for _ in range(3):
                assert (await import_(stub, data)).state == cache_pb2.PromptStatus.DURABLE
            await unpin(stub)
            assert (await status_of(stub)).disk.pinned_bytes == 0
            assert (await import_(stub, data)).state == cache_pb2.PromptStatus.DURABLE
            await unpin(stub)
            done = await evict(stub)
            assert (done.num_chunks, done.num_shared_chunks) == (len(KEYS), 0)
            assert (await status_of(stub)).disk.used_bytes == 0

    asyncio.run(scenario())


def test_other_chunks_of_a_prompt_that_is_pinned_take_no_pin_from_its_own(tmp_path: Path) -> None:
    """Invented keys took them from their pin, and the prompt was durable by chunks that no request hits."""

    async def scenario() -> None:
        there, others = home(tmp_path, "b"), [chunk_key(number) for number in range(10, 15)]
        async with running(config := home(tmp_path, "d")) as stub, ScriptedEngine(config) as engine:
            await engine.bind(await pin(stub), others)
            await store_last_apart(stub, engine, others)
            data = await export(stub)
        async with running(there) as stub, ScriptedEngine(there) as engine:
            await engine.bind(await pin(stub), KEYS)
            await engine.store(KEYS)
            await wait_durable(stub, "p")
            for options in ({}, {"replace": True}):
                await refused(
                    stub, data, Status.INVALID_ARGUMENT, "it has other chunks than prompt 'p' has here", **options
                )
            before = (await status_of(stub)).disk
            assert before.num_chunks == len(KEYS)
            assert before.pinned_bytes > 0

    asyncio.run(scenario())


def test_imports_at_once_keep_to_their_owners_quota(tmp_path: Path) -> None:
    """Each was judged before the others were recorded: an owner of some tokens could get any number at once."""

    async def scenario() -> None:
        data = await bundle_of(home(tmp_path, "a"))

        async def pieces() -> AsyncIterator[bytes]:
            yield data

        config = replace(home(tmp_path, "b"), owners=OwnersConfig(default=OwnerQuota(tokens=150)))
        cache = await Cache.open(config)
        try:
            await cache.attach(hello_of("engine"), ListPeer())
            small = [RequestedPin(name=name, tokens=TokenIds([1]), owner="team") for name in "xyz"]
            await cache.pins.apply(small)
            imports = (import_bundle(cache, RequestedImport(name=name, replace=True), pieces()) for name in "xyz")
            results = await asyncio.gather(*imports, return_exceptions=True)
            assert sum(isinstance(result, OwnerQuotaError) for result in results) == 2
            assert sorted(len(prompt.tokens) for prompt in cache.prompts.pinned()) == [1, 1, 80]
            assert len(list((config.disk.disk_dir / "packs").iterdir())) == 1, "nothing is left of the others"
        finally:
            await cache.close()

    asyncio.run(scenario())
