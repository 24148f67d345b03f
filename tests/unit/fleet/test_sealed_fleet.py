"""Hosts that share a file of keys: the store gets nothing plain of prompts and KV, and a host without them says so."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import RemoteDamagedError, RemoteSealedError
from kvtier.fleet.fleet import Fleet
from kvtier.fleet.manifest import KV, PROMPTS
from kvtier.fleet.restoring import RestoreOutcome
from kvtier.remote.base import one_piece
from kvtier.remote.sealed_store import SealedStore
from tests.fakes.chunks import noise
from tests.fakes.keys import ring_of, write_keys
from tests.fakes.kv_hosts import KVHost, kv_host, payload_of
from tests.fakes.memory_store import Bucket, MemoryStore
from tests.fakes.rig import eventually

KV_KEY = "kv/ns/object.safetensors"


def sealed_store(bucket: Bucket, *key_ids: str) -> SealedStore:
    return SealedStore(MemoryStore(bucket), ring_of(*key_ids) if key_ids else None, sealed=(KV, PROMPTS))


async def content_of(bucket: Bucket) -> dict[str, bytes]:
    """Return every object as the store has it."""
    store = MemoryStore(bucket)
    return {info.key: await store.get_range(info.key, 0, 1 << 30) async for info in store.list("")}


def test_objects_are_sealed_and_read_in_any_part_by_who_has_the_key() -> None:
    async def run() -> None:
        bucket, data = Bucket(), noise(3 * 1024**2 + 7)
        writer = sealed_store(bucket, "old")
        await writer.put_stream(KV_KEY, one_piece(data))
        await writer.put_stream("prompts/p.json", one_piece(b"secret words"))
        await writer.put_stream("hosts/a.json", one_piece(b"a host"))
        objects = await content_of(bucket)
        assert data[1000:1032] not in objects[KV_KEY]
        assert b"secret" not in objects["prompts/p.json"]
        assert objects["hosts/a.json"] == b"a host"
        reader = sealed_store(bucket, "new", "old")
        for start, end in (
            (0, 10),
            (5, 2 * 1024**2),
            (1024**2, 1024**2 + 1),
            (3 * 1024**2, 1 << 30),
            (1 << 29, 1 << 30),
        ):
            assert await reader.get_range(KV_KEY, start, end) == data[start:end]
        found = await reader.get("prompts/p.json")
        assert found is not None
        assert found.data == b"secret words"
        for other in (sealed_store(bucket, "new"), sealed_store(bucket)):
            with pytest.raises(RemoteSealedError, match=r"'old\..*all hosts of a fleet need the keys"):
                await other.get_range(KV_KEY, 0, 5)
            with pytest.raises(RemoteSealedError):
                await other.get("prompts/p.json")

    asyncio.run(run())


def test_plain_objects_of_other_hosts_are_read() -> None:
    async def run() -> None:
        bucket, reader = Bucket(), None
        await sealed_store(bucket).put_stream(KV_KEY, one_piece(b"plain" * 100))
        reader = sealed_store(bucket, "k1")
        assert await reader.get_range(KV_KEY, 5, 10) == b"plain"

    asyncio.run(run())


@pytest.mark.parametrize("place", [0, 10, 45, 75, 90, 1024**2, -1])
def test_a_changed_byte_is_a_damaged_object(place: int) -> None:
    async def run() -> None:
        bucket, data = Bucket(), noise(2 * 1024**2)
        await sealed_store(bucket, "k1").put_stream(KV_KEY, one_piece(data))
        content = bytearray((await content_of(bucket))[KV_KEY])
        content[place] ^= 1
        await MemoryStore(bucket).put_stream(KV_KEY, one_piece(bytes(content)))
        store = sealed_store(bucket, "k1")
        if place == 0:  # no sealed object any longer: what is read is no bundle
            assert await store.get_range(KV_KEY, 0, 50) == bytes(content[:50])
            return
        with pytest.raises(RemoteDamagedError):
            await store.get_range(KV_KEY, 0, len(data))

    asyncio.run(run())


async def uploaded(a: KVHost, bucket: Bucket) -> Any:
    made = await a.pin(num_tokens=96)
    await a.compute(made.keys)
    await eventually(lambda: a.is_durable(made.keys))
    from kvtier.fleet.uploading import upload_prompt

    store = SealedStore(MemoryStore(bucket), a.cache.resources.ledger.ring, sealed=(KV, PROMPTS))
    return made, await upload_prompt(a.cache, store, "p", a.namespace.namespace_id, host="a")


def test_a_head_that_was_spoiled_on_its_way_is_not_remembered_as_that_of_a_plain_object() -> None:
    """Each later read gave the sealed bytes, and the object was taken for damaged."""

    async def run() -> None:
        bucket, data = Bucket(), noise(5000)
        await sealed_store(bucket, "key").put_stream(KV_KEY, one_piece(data))
        store, num_spoiled = MemoryStore(bucket), list[str]()

        def spoil(key: str, found: bytes) -> bytes:
            if num_spoiled:
                return found
            num_spoiled.append(key)
            return bytes(len(found))

        store.spoil = spoil
        reader = SealedStore(store, ring_of("key"), sealed=(KV, PROMPTS))
        assert await reader.get_range(KV_KEY, 0, 5000) == data
        assert num_spoiled

    asyncio.run(run())


@pytest.mark.parametrize("spoil", [lambda data: data[:-1], lambda data: data[:-1] + bytes([data[-1] ^ 1])])
def test_wrong_bytes_of_one_read_do_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[bytes], bytes]
) -> None:
    """One read that went wrong on its way dropped the KV from the manifest, so all hosts lost it: what is not sealed
    was read again."""
    monkeypatch.setattr("kvtier.fleet.remote_bundle._FIRST_BYTES", 0)
    monkeypatch.setattr("kvtier.fleet.remote_bundle.MAX_GAP_BYTES", -1)

    async def run() -> None:
        bucket, keys = Bucket(), write_keys(tmp_path / "keys", "shared")
        async with (
            kv_host(tmp_path / "a", bucket, key_file=keys) as a,
            kv_host(tmp_path / "b", bucket, key_file=keys) as b,
        ):
            made, stored = await uploaded(a, bucket)
            pinned = await b.pin(num_tokens=96)
            inner, num_reads = MemoryStore(bucket), [0]

            def spoil_last(key: str, data: bytes) -> bytes:
                num_reads[0] += 1
                return spoil(data) if num_reads[0] == 6 else data

            inner.spoil = spoil_last
            store = SealedStore(inner, b.cache.resources.ledger.ring, sealed=(KV, PROMPTS))
            result = await b.restore(pinned, stored, store=store)
            assert result.outcome is RestoreOutcome.RESTORED, result.problem
            assert num_reads[0] > 6
            assert b.held(pinned.keys) == list(made.keys)

    asyncio.run(run())


@pytest.mark.parametrize("key_ids", [("shared",), ("mine", "shared"), ("mine",), ()])
def test_a_host_restores_what_another_has_sealed_if_it_has_the_key(tmp_path: Path, key_ids: tuple[str, ...]) -> None:
    async def run() -> None:
        bucket = Bucket()
        settings: dict[str, Any] = {"key_file": write_keys(tmp_path / "b-keys", *key_ids)} if key_ids else {}
        async with (
            kv_host(tmp_path / "a", bucket, key_file=write_keys(tmp_path / "a-keys", "shared")) as a,
            kv_host(tmp_path / "b", bucket, **settings) as b,
        ):
            made, stored = await uploaded(a, bucket)
            pinned = await b.pin(num_tokens=96)
            (content,) = (await content_of(bucket)).values()
            assert payload_of(a.layout, made.keys[0])[64:96] not in content
            store = SealedStore(MemoryStore(bucket), b.cache.resources.ledger.ring, sealed=(KV, PROMPTS))
            result = await b.restore(pinned, stored, store=store)
            if "shared" in key_ids:
                assert result.outcome is RestoreOutcome.RESTORED
                assert b.held(pinned.keys) == list(pinned.keys)
            else:
                assert result.outcome is RestoreOutcome.TOO_NEW, "not damage: no host may give the object up for that"
                assert "shared." in result.problem
                assert b.held(pinned.keys) == []
                assert b.cache.resources.counters.remote_damaged_objects == 0

    asyncio.run(run())


def test_a_daemon_with_keys_seals_what_its_fleet_gets(tmp_path: Path) -> None:
    """Two whole daemons with one file of keys, and a third without: its operator reads why a pin is not taken."""

    async def run() -> None:
        from kvtier.prompts.book import RequestedPin
        from kvtier.service.cache import Cache
        from tests.fakes.fleet_hosts import tokens_of
        from tests.fakes.scripted_engine import config_in
        from tests.unit.fleet.test_fleet import CONFIG, until

        bucket, keys = Bucket(), write_keys(tmp_path / "keys", "shared")
        fleets = []
        for name in "abc":
            (tmp_path / name).mkdir()
            config = config_in(tmp_path / name, key_file=keys if name != "c" else None)
            fleet = Fleet(await Cache.open(config), CONFIG, MemoryStore(bucket), host=name)
            fleet.start()
            fleets.append(fleet)
        a, b, c = fleets
        await until(lambda: all(fleet.looked_unix_s for fleet in fleets), "all to read the store")
        secret = RequestedPin(name="one", tokens=tokens_of(1), cache_salt="saffron", recipe_json='{"kind": "tokens"}')
        await a.cache.pins.pin(secret)
        await until(lambda: b.cache.prompts.find("one") is not None, "the pin to travel")
        assert b.cache.prompts.get("one").cache_salt == "saffron"
        await until(lambda: c.pins.refused, "the host without keys to say so")
        assert "shared." in str(c.pins.refused)
        assert c.cache.prompts.find("one") is None
        objects = await content_of(bucket)
        assert [key for key, content in objects.items() if b"saffron" in content] == []
        assert any(key.startswith(PROMPTS) for key in objects)
        for fleet in fleets:
            await fleet.close()
            await fleet.cache.close()

    asyncio.run(run())


def test_a_sealed_prompt_whose_object_is_damaged_is_written_again(tmp_path: Path) -> None:
    """It was taken for one that others can open: no new host ever got the pin."""

    async def run() -> None:
        from kvtier.prompts.book import RequestedPin
        from kvtier.service.cache import Cache
        from tests.fakes.fleet_hosts import tokens_of
        from tests.fakes.scripted_engine import config_in
        from tests.unit.fleet.test_fleet import CONFIG, until

        bucket, keys, fleets = Bucket(), write_keys(tmp_path / "keys", "shared"), list[Fleet]()

        async def member(name: str) -> Fleet:
            (tmp_path / name).mkdir()
            cache = await Cache.open(config_in(tmp_path / name, key_file=keys))
            fleets.append(Fleet(cache, CONFIG, MemoryStore(bucket), host=name))
            fleets[-1].start()
            return fleets[-1]

        a = await member("a")
        await until(lambda: a.looked_unix_s, "the store to be read")
        await a.cache.pins.pin(RequestedPin(name="one", tokens=tokens_of(1)))
        await until(lambda: a.pins.is_shared("one"), "the pin to be shared")
        (key,) = (key for key in bucket.objects if key.startswith(PROMPTS))
        data, version, written_s = bucket.objects[key]
        bucket.objects[key] = data[:-1] + bytes([data[-1] ^ 1]), version, written_s
        b = await member("b")
        await until(lambda: b.cache.prompts.find("one") is not None, "the content to be written again")
        for fleet in fleets:
            await fleet.close()
            await fleet.cache.close()

    asyncio.run(run())
