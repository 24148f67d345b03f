"""A daemon's part in a fleet: what waits for the store, what does not, and what it says."""

import asyncio
import errno
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import kvtier.remote.metered_store
from kvtier.config.model import RemoteConfig
from kvtier.fleet.fleet import Fleet, open_fleet
from kvtier.fleet.manifest import KV, PINS, Manifest, StoredKV
from kvtier.ledger import SENT
from kvtier.prompts.book import RequestedPin
from kvtier.prompts.readiness import ReadyWhere
from kvtier.rpc import server
from kvtier.rpc.remote_message import remote_status
from kvtier.service.cache import Cache
from kvtier.tiering.pacing import Pace
from tests.fakes.fleet_hosts import tokens_of
from tests.fakes.memory_store import Bucket, MemoryStore
from tests.fakes.rig import ListPeer, hello_of
from tests.fakes.scripted_engine import DEADLINE_S, config_in

CONFIG = RemoteConfig(url="memory://fleet", poll="1s")


@asynccontextmanager
async def member(folder: Path, store: MemoryStore, host: str = "a") -> AsyncIterator[Fleet]:
    folder.mkdir(exist_ok=True)  # noqa: ASYNC240
    cache = await Cache.open(config_in(folder))
    fleet = Fleet(cache, CONFIG, store, host=host)
    try:
        fleet.start()
        yield fleet
    finally:
        await fleet.close()
        await cache.close()


async def until(condition: object, what: str) -> None:
    assert callable(condition)
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, what
        await asyncio.sleep(0.02)


def test_pins_travel_by_themselves(tmp_path: Path) -> None:
    async def run() -> None:
        bucket = Bucket()
        async with (
            member(tmp_path / "a", MemoryStore(bucket)) as a,
            member(tmp_path / "b", MemoryStore(bucket), "b") as b,
        ):
            await until(lambda: a.looked_unix_s and b.looked_unix_s, "both to read the store")
            await a.cache.pins.pin(RequestedPin(name="one", tokens=tokens_of(1)))
            await until(lambda: b.pins.is_shared("one"), "the pin to travel")
            status = await remote_status(b, await b.clock.hosts())
            assert (status.num_pins, status.num_waiting_pins, status.problem) == (1, 0, "")
            assert [each.host for each in status.hosts] == ["a", "b"]
            assert status.spending.num_lists > 0

    asyncio.run(run())


def test_up_and_down_have_each_its_own_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: dict[int, int] = {}

    class CountedPace(Pace):
        def __init__(self, bytes_per_s: int) -> None:
            super().__init__(0)
            self.rate = bytes_per_s

        def spent(self, num_bytes: int) -> None:
            moved[self.rate] = moved.get(self.rate, 0) + num_bytes

    async def pieces() -> AsyncIterator[bytes]:
        for piece in (b"1234", b"56"):
            yield piece

    monkeypatch.setattr(kvtier.remote.metered_store, "Pace", CountedPace)

    async def run() -> None:
        cache = await Cache.open(config_in(tmp_path))
        rates = replace(CONFIG, upload_bytes_per_s=11, download_bytes_per_s=22)
        fleet = Fleet(cache, rates, MemoryStore(), host="a")
        await fleet.store.put_stream("plain/x", pieces())
        assert moved == {11: 6}
        assert await fleet.store.get_range("plain/x", 1, 4) == b"234"
        assert moved == {11: 6, 22: 3}
        await fleet.close()
        await cache.close()

    asyncio.run(run())


def test_a_pin_looks_at_the_store_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a name that another host has pinned a moment ago is refused here."""
    monkeypatch.setattr("kvtier.fleet.fleet._CATCH_UP_S", DEADLINE_S)

    async def run() -> None:
        bucket = Bucket()
        slow = replace(CONFIG, poll="1h")
        async with member(tmp_path / "a", MemoryStore(bucket)) as a:
            (tmp_path / "b").mkdir()
            cache = await Cache.open(config_in(tmp_path / "b"))
            b = Fleet(cache, slow, MemoryStore(bucket), host="b")
            b.start()
            await until(lambda: b.looked_unix_s, "b to read the store")
            await a.cache.pins.pin(RequestedPin(name="one", tokens=tokens_of(1)))
            await until(lambda: a.pins.is_shared("one"), "the pin to be shared")
            assert cache.prompts.find("one") is None
            await cache.pins.pin(RequestedPin(name="two", tokens=tokens_of(2)))
            assert cache.prompts.find("one") is not None
            await b.close()
            await cache.close()

    asyncio.run(run())


def test_a_store_that_is_away_delays_no_pin_and_is_reported_once(tmp_path: Path) -> None:
    async def run() -> None:
        store = MemoryStore()
        store.down = True
        async with member(tmp_path / "a", store) as fleet:
            await until(lambda: fleet.problem, "the problem to be seen")
            await fleet.cache.pins.pin(RequestedPin(name="one", tokens=tokens_of(1)))
            assert fleet.cache.prompts.get("one").pinned
            store.down = False
            await until(lambda: fleet.pins.is_shared("one") and not fleet.problem, "the pin to be shared")

    asyncio.run(run())


def test_a_new_host_is_not_ready_before_it_knows_the_pins(tmp_path: Path) -> None:
    async def run() -> None:
        store = MemoryStore()
        store.down = True
        async with member(tmp_path / "a", store) as fleet:
            await until(lambda: fleet.problem, "the problem to be seen")
            readiness = await fleet.cache.readiness.check([], ReadyWhere.HOST)
            assert not readiness.ready
            assert "memory://fleet" in readiness.waiting[0].why
            assert fleet.cache.readiness.problem()
            store.down = False
            await until(lambda: fleet.looked_unix_s, "the store to be read")
            assert (await fleet.cache.readiness.check([], ReadyWhere.HOST)).ready
        store.down = True
        async with member(tmp_path / "a", store) as fleet:
            await until(lambda: fleet.problem, "the problem to be seen")

    asyncio.run(run())


def test_pins_of_other_hosts_are_waited_for_only_if_an_engine_here_serves_them(tmp_path: Path) -> None:
    async def run() -> None:
        bucket = Bucket()
        async with (
            member(tmp_path / "a", MemoryStore(bucket)) as a,
            member(tmp_path / "b", MemoryStore(bucket), "b") as b,
        ):
            await until(lambda: a.looked_unix_s and b.looked_unix_s, "both to read the store")
            await a.cache.pins.pin(RequestedPin(name="other", tokens=tokens_of(1), model="another-model"))
            await until(lambda: b.cache.prompts.find("other") is not None, "the pin to travel")
            assert not (await b.cache.readiness.check([], ReadyWhere.DISK)).ready, "no engine is here yet"
            await b.cache.attach(hello_of("engine"), ListPeer())
            assert (await b.cache.readiness.check([], ReadyWhere.DISK)).ready
            assert not (await b.cache.readiness.check(["other"], ReadyWhere.DISK)).ready, "asked for by name"

    asyncio.run(run())


def test_a_store_that_ignores_conditions_gets_no_pin(tmp_path: Path) -> None:
    async def run() -> None:
        store = MemoryStore()

        async def careless(key: str, data: bytes, *_: object) -> object:
            return store.bucket.put(key, data)

        store.swap = careless  # type: ignore[method-assign,assignment]
        async with member(tmp_path / "a", store) as fleet:
            await until(lambda: fleet.problem, "the refusal")
            await fleet.cache.pins.pin(RequestedPin(name="one", tokens=tokens_of(1)))
            await asyncio.sleep(0.5)
            assert "If-Match" in fleet.problem
            assert not store.bucket.objects

    asyncio.run(run())


def test_no_loop_of_a_fleet_ends_by_an_error_that_no_one_foresaw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One ended uploads until a restart, while the store was shown as well."""
    monkeypatch.setattr("kvtier.concurrency.tasks.RETRY_S", 0.05)
    monkeypatch.setattr("kvtier.fleet.fleet._KV_S", 0.05)

    async def run() -> None:
        async with member(tmp_path / "a", MemoryStore()) as a:
            await until(lambda: a.looked_unix_s, "a look at the store")
            calls = dict.fromkeys(("upload_next", "claim_wanted", "look"), 0)
            seen = set[str]()

            def breaking(owner: object, name: str) -> None:
                original = getattr(owner, name)

                async def call(*args: object, **kwargs: object) -> object:
                    calls[name] += 1
                    seen.add(a.problem)
                    if calls[name] < 3:
                        raise OSError(errno.EROFS, "Read-only file system")
                    return await original(*args, **kwargs)

                monkeypatch.setattr(owner, name, call)

            breaking(a.kv, "upload_next")
            breaking(a.kv, "claim_wanted")
            breaking(a.pins, "look")
            await until(lambda: min(calls.values()) > 3, "all to go on")
            await until(lambda: not a.problem, "the store to be used again")
            assert any("Read-only" in problem for problem in seen)

    asyncio.run(run())


def test_without_a_url_there_is_no_fleet(tmp_path: Path) -> None:
    async def run() -> None:
        cache = await Cache.open(config_in(tmp_path))
        assert open_fleet(cache, RemoteConfig()) is None
        found = open_fleet(cache, RemoteConfig(url=f"file://{tmp_path}/shared"))
        assert found is not None
        await cache.close()

    asyncio.run(run())


def test_a_pin_that_was_renamed_just_before_a_stop_has_its_old_name_on_no_host(tmp_path: Path) -> None:
    async def run() -> None:
        bucket = Bucket()
        store = MemoryStore(bucket)
        async with member(tmp_path / "b", MemoryStore(bucket), "b") as b:
            async with member(tmp_path / "a", store) as a:
                await a.cache.pins.pin(RequestedPin(name="old", tokens=tokens_of(1)))
                await until(lambda: b.pins.is_shared("old"), "the pin to travel")
                store.down = True
                await until(lambda: a.problem, "the problem to be seen")
                await a.cache.renames.rename("old", "new")
            async with member(tmp_path / "a", MemoryStore(bucket)) as a:
                await until(lambda: b.pins.is_shared("new") and not b.cache.prompts.get("old").pinned, "the rename")
                assert a.cache.prompts.find("old") is None

    asyncio.run(run())


def test_a_pin_stays_another_hosts_though_this_one_has_dropped_old_kv_from_its_manifest(tmp_path: Path) -> None:
    """Who wrote the manifest last counted as who had pinned: the host that had collected garbage was not ready until
    an engine came that served the pin."""

    def with_kv(manifest: Manifest, number: int) -> Manifest:
        kv = {"namespace_id": "ns", "tokens_digest": "t", "keys_digest": f"{number}", "stored_unix_s": 1000.0}
        key = f"{KV}ns/{number}.safetensors"
        return manifest.with_stored(StoredKV(key=key, num_bytes=1, num_chunks=1, host="a", **kv))  # type: ignore[arg-type]

    async def run() -> None:
        bucket = Bucket()
        async with member(tmp_path / "b", MemoryStore(bucket), "b") as b:
            async with member(tmp_path / "a", MemoryStore(bucket)) as a:
                await a.cache.pins.pin(RequestedPin(name="other", tokens=tokens_of(1), model="another-model"))
                await until(lambda: a.pins.is_shared("other"), "the pin to be shared")
                await a.garbage.collect_if_due()
                for number in range(2):
                    await a.pins.change("other", partial(with_kv, number=number))
                await until(lambda: b.pins.manifest("other") == a.pins.manifest("other"), "b to know it")
            await b.cache.attach(hello_of("engine"), ListPeer())
            assert (await b.cache.readiness.check([], ReadyWhere.DISK)).ready
            await b.garbage.collect()
            manifest = b.pins.manifest("other")
            assert manifest is not None
            assert len(manifest.stored) == 1
            assert (await b.cache.readiness.check([], ReadyWhere.DISK)).ready

    asyncio.run(run())


def test_a_rename_is_noted_while_the_store_does_not_answer(tmp_path: Path) -> None:
    """Only between two looks: who killed the daemon within a minute of a rename had the old name on all hosts again."""

    async def run() -> None:
        store, hangs = MemoryStore(), asyncio.Event()

        async def hang(operation: str, key: str) -> None:
            if (operation, key) == ("list", PINS):
                hangs.set()
                await asyncio.Event().wait()

        async with member(tmp_path / "a", store) as a:
            await a.cache.pins.pin(RequestedPin(name="old", tokens=tokens_of(1)))
            await until(lambda: a.pins.is_shared("old"), "the pin to be shared")
            store.meanwhile = hang
            await hangs.wait()
            await a.cache.renames.rename("old", "new")
            shared, resources = a.cache.resources.ledger.shared, a.cache.resources
            deadline_s = time.monotonic() + 20
            while all(
                row.version or row.key.endswith(SENT) for row in await resources.in_ledger(shared.load, store.url)
            ):
                assert time.monotonic() < deadline_s, "the note"
                await asyncio.sleep(0.05)

    asyncio.run(run())


def test_a_stop_notes_what_has_gone_before_the_ledger_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upload whose read took longer than a stop waits for left the note to be made in a ledger that was closed."""
    monkeypatch.setattr(server, "STUCK_AFTER_S", 0.05)

    async def run() -> None:
        bucket, is_closed = Bucket(), asyncio.Event()
        store = MemoryStore(bucket)
        cache = await Cache.open(config_in(tmp_path))
        fleet = Fleet(cache, CONFIG, store, host="a")
        fleet.start()
        await cache.pins.pin(RequestedPin(name="old", tokens=tokens_of(1)))
        await until(lambda: fleet.pins.is_shared("old"), "the pin to be shared")

        async def outlive() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await is_closed.wait()

        async def close(original: Callable[[], Awaitable[None]]) -> None:
            await original()
            is_closed.set()

        monkeypatch.setattr(cache, "close", partial(close, cache.close))
        fleet._tasks.start("upload", outlive())
        store.down = True
        await cache.pins.unpin("old", forget=True)
        await server.close_both(fleet, cache)
        async with member(tmp_path, MemoryStore(bucket)) as a:
            await until(lambda: a.pins.has_looked, "the store to be read")
            assert a.cache.prompts.find("old") is None

    asyncio.run(run())
