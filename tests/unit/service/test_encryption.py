"""A daemon with keys: what it stores is sealed, keys rotate, and one that is missing costs misses and nothing else."""

import asyncio
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from kvtier._pb import cache_pb2
from kvtier.config import DaemonConfig
from kvtier.discovery.namespace_traffic import ChangingPlace, NamespaceTraffic
from kvtier.discovery.saved_traffic import SavedTraffic
from kvtier.disk.packs.pack_tier import PackTier
from kvtier.errors import ConfigError, KeyMissingError, TierIOError
from kvtier.maintenance.offline import check_offline
from kvtier.service import cache as service_cache
from tests.fakes.gates import failing
from tests.fakes.keys import key_of_id, ring_of, seals_of, write_keys
from tests.fakes.operator import Stub, make_durable, pack_of, prompt_of, status_of, until
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key, config_in, running

KEYS = [chunk_key(number) for number in range(5)]
SALT = "saffron-and-salt"


def config_with(folder: Path, *key_ids: str) -> DaemonConfig:
    """The same folder each time, with these keys; without: off."""
    config = config_in(folder)
    if not key_ids:
        return config
    return replace(config, disk=replace(config.disk, key_file=write_keys(folder / "keys", *key_ids)))


async def stored(config: DaemonConfig) -> None:
    async with running(config) as stub, ScriptedEngine(config) as engine:
        await make_durable(stub, engine, KEYS)


async def served(config: DaemonConfig) -> list[int]:
    """Return which chunks an engine gets from disk, compared byte by byte."""
    async with running(config), ScriptedEngine(config) as engine:
        return await engine.verify(1, KEYS)


def keys_on_disk(config: DaemonConfig) -> set[str]:
    tier = PackTier(config.disk.disk_dir / "packs")
    return {tier.read_record(pack_id).sealed_by for pack_id in tier.list_packs()}


def in_files(config: DaemonConfig, secret: bytes) -> bool:
    return any(secret in path.read_bytes() for path in config.disk.disk_dir.rglob("*") if path.is_file())


def test_a_start_with_keys_names_what_was_set_aside_and_removes_what_a_crash_has_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Both stayed plain on a disk that was thought to be encrypted."""
    config = config_with(tmp_path, "k1")
    half = config.disk.disk_dir / "traffic" / f"{'a' * 32}.json.tmp"
    aside = [
        config.disk.disk_dir / "ledger.sqlite.damaged-20260101-000000",
        config.disk.disk_dir / "promises" / "x.json.damaged",
    ]
    for path in (half, *aside):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_bytes(b"You are a pirate.")

    async def start() -> None:
        async with running(config):
            pass

    asyncio.run(start())
    assert not half.exists()
    (said,) = (vars(each)["kvtier_fields"] for each in caplog.records if each.message == "damaged_files_may_be_plain")
    assert (said["num_files"], said["names"]) == (2, ",".join(path.name for path in aside))
    for path in aside:
        assert path.exists(), "for people to look at"
        path.unlink()
    caplog.clear()
    asyncio.run(start())
    assert "damaged_files_may_be_plain" not in caplog.text


def test_what_is_stored_is_sealed_and_served(tmp_path: Path) -> None:
    config = config_with(tmp_path, "k1")

    async def scenario() -> None:
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await make_durable(stub, engine, KEYS)
            payload = engine.payload(KEYS[0])
            assert not in_files(config, payload[100:132])
        assert await served(config) == [0, 1, 2, 3, 4]

    asyncio.run(scenario())
    assert keys_on_disk(config) == {key_of_id("k1").name}


def test_counts_of_prompts_that_were_plain_are_sealed_at_the_start(tmp_path: Path) -> None:
    """Of a model that no engine serves any longer, they stayed plain: words of prompts, for good."""
    config, counted = config_with(tmp_path, "k1"), NamespaceTraffic()
    place = ChangingPlace.checked(
        digest=b"x" * 16,
        num_stable_tokens=5,
        num_tokens=9,
        num_prompts=2,
        before="You are the parrot of",
        examples=["the minister"],
        seen_unix_s=1.0,
    )
    counted.put_place(place)
    plain = SavedTraffic(config.disk.disk_dir)
    plain.write("a" * 32, plain.encode(counted))
    assert in_files(config, b"parrot")

    async def start() -> None:
        async with running(config):
            assert not in_files(config, b"parrot")

    for _ in range(2):
        asyncio.run(start())
    assert SavedTraffic(config.disk.disk_dir, ring_of("k1")).load("a" * 32).places == counted.places


@pytest.mark.parametrize(
    "error", [OSError(5, "Input/output error"), TierIOError(Path("disk"), "work on", OSError(11, "no more threads"))]
)
def test_a_start_goes_on_if_counts_cannot_be_sealed_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """Without a thread for it the daemon did not start."""
    config = config_with(tmp_path, "k1")
    failing(monkeypatch, SavedTraffic, "seal", lambda: error, times=1)

    async def start() -> None:
        async with running(config) as stub:
            await status_of(stub)

    asyncio.run(start())
    assert "ledger_not_sealed" in caplog.text


@pytest.mark.parametrize(("before", "after"), [((), ("new",)), (("old",), ("new", "old")), (("a", "b"), ("b", "a"))])
def test_compaction_seals_with_the_key_that_writes(
    tmp_path: Path, before: tuple[str, ...], after: tuple[str, ...]
) -> None:
    """Encryption that is turned on for a folder, and a key that is replaced: both by a restart."""

    async def scenario() -> None:
        await stored(config_with(tmp_path, *before))
        config = config_with(tmp_path, *after)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            assert await engine.verify(1, KEYS) == [0, 1, 2, 3, 4]

            async def rewritten() -> bool:
                return keys_on_disk(config) == {key_of_id(after[0]).name}

            await until(rewritten)

            async def shown() -> bool:
                keys = (await status_of(stub)).disk_keys
                names = [(key.name, key.writes, key.is_missing) for key in keys if key.num_bytes]
                return names == [(key_of_id(after[0]).name, True, False)]

            await until(shown)
            assert await engine.verify(2, KEYS) == [0, 1, 2, 3, 4]
        only = config_with(tmp_path, after[0])
        assert await served(only) == [0, 1, 2, 3, 4], "the other key is not needed any longer"
        report = check_offline(only.disk.disk_dir, repair=False, deep=True, ring=ring_of(after[0]))
        assert [finding for finding in report.findings if not finding.is_note] == []

    asyncio.run(scenario())


async def has_problem(cache: service_cache.Cache, wanted: str) -> bool:
    """Say whether health and /readyz say so of the pins."""
    return cache.readiness.problem() == wanted


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> list[service_cache.Cache]:
    """Every cache that begins from now on."""
    made, init = list[service_cache.Cache](), service_cache.Cache.__init__

    def remembered(self: service_cache.Cache, *args: object) -> None:
        init(self, *args)  # type: ignore[arg-type]
        made.append(self)

    monkeypatch.setattr(service_cache.Cache, "__init__", remembered)
    return made


def test_packs_without_their_key_stay_and_are_misses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, caches: list[service_cache.Cache]
) -> None:
    async def scenario() -> None:
        plain = config_with(tmp_path)
        async with running(plain) as stub, ScriptedEngine(plain) as engine:
            await make_durable(stub, engine, KEYS)  # the ledger stays plain: no promise needs the key
        tier = PackTier(plain.disk.disk_dir / "packs", seals=seals_of("lost"))
        await reseal_as(plain, tier)
        before = tier.list_packs()
        async with running(plain) as stub, ScriptedEngine(plain) as engine:
            for number in range(5):  # more than open the circuit breaker of the disk
                assert await engine.verify(number, KEYS) == []
            assert not (await status_of(stub)).disk.breaker_open_reason
            assert (await prompt_of(stub)).state == cache_pb2.PromptStatus.DURABLE
            waits = await stub.CheckReady(cache_pb2.ReadyRequest())
            why = "chunks are sealed with a key that is not in disk.key_file"
            assert [(each.name, each.why) for each in waits.waiting] == [("p", why)], "no request can have it"
            await until(partial(has_problem, caches[-1], why))
        assert tier.list_packs() == before
        assert await served(plain) == []
        back = config_with(tmp_path, "lost")
        async with running(back) as stub, ScriptedEngine(back) as engine:
            assert (await stub.CheckReady(cache_pb2.ReadyRequest())).ready
            assert await engine.verify(1, KEYS) == [0, 1, 2, 3, 4]
            await until(partial(has_problem, caches[-1], ""))

    asyncio.run(scenario())
    (said,) = {record.message for record in caplog.records if record.message == "key_missing"}
    assert said
    assert not [record for record in caplog.records if record.message in ("disk_breaker_opened", "chunk_unreadable")]


async def reseal_as(config: DaemonConfig, tier: PackTier) -> None:
    """Have every pack of a folder copied into one of another tier, as a compaction does."""
    from kvtier.ledger import Ledger

    ledger = Ledger.open(config.disk.disk_dir / "ledger.sqlite")
    for pack_id, record in ledger.load().packs.items():
        copy = tier.rewrite_pack(record.namespace_id, record.chunks)
        ledger.packs.move_chunks(copy, {chunk.key: pack_id for chunk in record.chunks})
        tier.delete_pack(pack_id)
    ledger.close()


def test_a_promise_without_its_key_refuses_the_start(tmp_path: Path) -> None:
    async def scenario() -> None:
        await stored(config_with(tmp_path, "k1"))
        for key_ids in ((), ("k2",)):
            with pytest.raises(KeyMissingError, match=r"prompt 'p' is sealed with key 'k1\..*; put back the line"):
                await served(config_with(tmp_path, *key_ids))
        assert await served(config_with(tmp_path, "k2", "k1")) == [0, 1, 2, 3, 4]

    asyncio.run(scenario())


def test_a_file_of_keys_that_cannot_be_used_refuses_the_start(tmp_path: Path) -> None:
    config = config_with(tmp_path, "k1")
    (tmp_path / "keys").chmod(0o644)
    with pytest.raises(ConfigError, match=r"disk\.key_file.*chmod 600"):
        asyncio.run(served(config))


def test_tampering_is_a_counted_miss_and_damage(tmp_path: Path, caches: list[service_cache.Cache]) -> None:
    config = config_with(tmp_path, "k1")

    async def scenario() -> None:
        await stored(config)
        pack, tier = pack_of(config, KEYS[0]), PackTier(config.disk.disk_dir / "packs")
        (damaged,) = (chunk for chunk in tier.read_record(pack.stem).chunks if chunk.key == KEYS[0])
        data = bytearray(pack.read_bytes())
        data[damaged.offset + 5] ^= 1
        pack.write_bytes(data)
        assert 0 not in await served(config)

    asyncio.run(scenario())
    counted = [cache.resources.counters for cache in caches]
    assert sum(each.tampered_chunks for each in counted) == sum(each.damaged_chunks_disk for each in counted) == 1
    assert sum(each.key_missing_reads for each in counted) == 0


def test_nothing_of_an_export_or_import_is_plain_on_disk_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scratch file was the whole bundle: text, tokens and KV."""
    from kvtier.bundles.spool import Spool

    written: list[bytes] = []
    remove = Spool.remove

    def look(self: Spool) -> None:
        written.append(self.path.read_bytes())
        remove(self)

    monkeypatch.setattr(Spool, "remove", look)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    here, there = config_with(tmp_path / "a", "k1"), config_with(tmp_path / "b", "k2")

    async def bundle(stub: Stub) -> bytes:
        return b"".join([piece.data async for piece in stub.Export(cache_pb2.ExportRequest(name="p"))])

    async def scenario() -> bytes:
        async with running(here) as stub, ScriptedEngine(here) as engine:
            await make_durable(stub, engine, KEYS)
            data = await bundle(stub)
        async with running(there) as stub, ScriptedEngine(there) as engine:

            async def messages() -> object:
                yield cache_pb2.ImportMessage(start=cache_pb2.ImportStart())
                yield cache_pb2.ImportMessage(piece=cache_pb2.BundlePiece(data=data))

            await stub.Import(messages())
            assert await engine.verify(1, KEYS) == [0, 1, 2, 3, 4]
        return data

    data = asyncio.run(scenario())
    assert len(written) == 2
    for content in written:
        assert len(content) == len(data)
        assert b"kvtier" not in content
        assert data[-32:] not in content
    assert keys_on_disk(there) == {key_of_id("k2").name}


def test_the_log_names_keys_and_never_shows_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    async def scenario() -> None:
        await stored(config_with(tmp_path, "old"))
        await served(config_with(tmp_path, "new", "old"))

    asyncio.run(scenario())
    text = "".join(str(vars(record)) for record in caplog.records)
    assert "ledger_sealed" in text
    for key_id in ("old", "new"):
        assert repr(key_of_id(key_id).secret)[2:18] not in text
