"""KV of a shared pin: computed once, uploaded once, brought down byte for byte, and never what was not written."""

import asyncio
import random
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest

from kvtier.errors import RemoteUnavailableError
from kvtier.fleet.manifest import KV, Claim, Manifest
from kvtier.prompts.book import PinUpdate
from kvtier.remote.base import Version
from kvtier.sessions.session import Session
from tests.fakes.fleet_hosts import FleetHost, fleet_host
from tests.fakes.memory_store import Bucket
from tests.fakes.rig import content, eventually

NUMBERS, RETRAINED = range(12), range(100, 112)
NAME = "support"


async def uploaded(
    stack: AsyncExitStack, folder: Path, bucket: Bucket, **how: str
) -> tuple[FleetHost, FleetHost, Session]:
    """Return a host that has computed and uploaded a prompt, and one that has recognized it and holds nothing."""
    a = await stack.enter_async_context(fleet_host(folder / "a", bucket, "a", seed=1))
    engine = await a.engine()
    await a.pin(NAME, 1, priority=3, **how)
    await a.bind(engine, NAME, NUMBERS)
    await a.compute(engine, NUMBERS)
    await eventually(lambda: a.is_durable(NAME))
    await a.sync.look()
    assert await a.kv.upload_next()
    b = await stack.enter_async_context(fleet_host(folder / "b", bucket, "b", seed=2))
    other = await b.engine()
    await b.sync.look()
    await b.bind(other, NAME, NUMBERS)
    await b.look_at_pins()
    return a, b, other


def kv_keys(bucket: Bucket) -> list[str]:
    return [key for key in bucket.objects if key.startswith(KV)]


def conserved(session: Session) -> None:
    session.namespace.host.check()
    session.namespace.table.check()


def test_what_one_host_computed_another_restores(tmp_path: Path) -> None:
    async def run() -> None:
        bucket = Bucket()
        async with AsyncExitStack() as stack:
            a, b, engine = await uploaded(stack, tmp_path, bucket)
            assert len(kv_keys(bucket)) == 1
            assert not await a.kv.upload_next(), "once"
            assert b.kv.is_computed_elsewhere(b.cache.prompts.get(NAME)), "engines of b wait for it"
            assert await b.kv.restore_next()
            assert [b.in_host(engine, number) for number in NUMBERS] == [content(number) for number in NUMBERS]
            await eventually(lambda: b.is_durable(NAME))
            await b.look_at_pins()
            assert not await b.kv.restore_next()
            assert not await b.kv.upload_next(), "it is in the store already"
            assert b.cache.resources.counters.remote_restored_chunks == len(NUMBERS)
            conserved(engine)

    asyncio.run(run())


def test_only_what_is_missing_is_read(tmp_path: Path) -> None:
    async def run() -> None:
        async with AsyncExitStack() as stack:
            _, b, engine = await uploaded(stack, tmp_path, Bucket())
            await b.compute(engine, range(8))
            assert await b.kv.restore_next()
            assert b.cache.resources.counters.remote_restored_chunks == 4
            assert [b.in_host(engine, number) for number in NUMBERS] == [content(number) for number in NUMBERS]
            conserved(engine)

    asyncio.run(run())


def test_bytes_that_are_wrong_on_the_way_are_read_again(tmp_path: Path) -> None:
    async def run() -> None:
        async with AsyncExitStack() as stack:
            _, b, engine = await uploaded(stack, tmp_path, Bucket())
            left = [1]

            def spoil(key: str, data: bytes) -> bytes:
                if not key.startswith(KV) or not left[0]:
                    return data
                left[0] = 0
                return data[:-1] + bytes([data[-1] ^ 1])

            b.store.spoil = spoil
            assert await b.kv.restore_next()
            assert not left[0]
            assert [b.in_host(engine, number) for number in NUMBERS] == [content(number) for number in NUMBERS]
            assert not b.cache.resources.counters.remote_damaged_objects
            conserved(engine)

    asyncio.run(run())


def places(num_bytes: int) -> Iterator[int]:
    draw = random.Random(7)
    yield from (0, 7, 8, num_bytes // 2, num_bytes - 1)
    yield from (draw.randrange(num_bytes) for _ in range(15))


def test_an_object_with_any_wrong_byte_is_never_served_and_comes_back(tmp_path: Path) -> None:
    async def run() -> None:
        bucket = Bucket()
        async with AsyncExitStack() as stack:
            a, b, engine = await uploaded(stack, tmp_path, bucket)
            (key,) = kv_keys(bucket)
            whole = bucket.objects[key][0]
            for place in places(len(whole)):
                bucket.put(key, whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
                await engine.namespace.write_back.flush()  # or it is on disk for a moment after the eviction
                await b.cache.evictions.evict(NAME, force=True)
                await b.look_at_pins()
                b.kv._retries.clear()
                assert await b.kv.restore_next()
                for number in NUMBERS:
                    assert b.in_host(engine, number) in (None, content(number))
                manifest = b.sync.manifest(NAME)
                assert manifest is not None
                assert not manifest.stored, place
                await a.sync.look()
                a.kv._retries.clear()
                assert await a.kv.upload_next(), "who has it puts it there again"
                bucket.objects.pop(key)
                (key,) = kv_keys(bucket)
                whole = bucket.objects[key][0]
                await b.sync.look()
                conserved(engine)
            b.kv._retries.clear()
            await b.kv.restore_next()
            assert [b.in_host(engine, number) for number in NUMBERS] == [content(number) for number in NUMBERS]

    asyncio.run(run())


@pytest.mark.parametrize("length", [0, 4, 100, 5000])
def test_a_truncated_object_is_dropped_from_the_manifest(tmp_path: Path, length: int) -> None:
    async def run() -> None:
        bucket = Bucket()
        async with AsyncExitStack() as stack:
            _, b, engine = await uploaded(stack, tmp_path, bucket)
            (key,) = kv_keys(bucket)
            bucket.put(key, bucket.objects[key][0][:length])
            assert await b.kv.restore_next()
            manifest = b.sync.manifest(NAME)
            assert manifest is not None
            assert not manifest.stored
            conserved(engine)

    asyncio.run(run())


def test_an_object_that_is_gone_is_dropped_from_the_manifest(tmp_path: Path) -> None:
    async def run() -> None:
        bucket = Bucket()
        async with AsyncExitStack() as stack:
            _, b, _ = await uploaded(stack, tmp_path, bucket)
            for key in kv_keys(bucket):
                del bucket.objects[key]
            assert await b.kv.restore_next()
            manifest = b.sync.manifest(NAME)
            assert manifest is not None
            assert not manifest.stored

    asyncio.run(run())


@pytest.mark.parametrize("nth", range(1, 5))
def test_a_store_that_fails_at_any_call_leaves_no_row_taken(tmp_path: Path, nth: int) -> None:
    async def run() -> None:
        async with AsyncExitStack() as stack:
            _, b, engine = await uploaded(stack, tmp_path, Bucket())
            calls = [0]

            def fail(operation: str, key: str) -> bool:
                calls[0] += 1
                return calls[0] == nth

            b.store.fail = fail
            with suppress(RemoteUnavailableError):
                await b.kv.restore_next()
            held = sum(b.in_host(engine, number) is not None for number in NUMBERS)
            await eventually(lambda: engine.namespace.host.usage.num_owned == held + engine.stores.num_grants)
            conserved(engine)
            b.kv._retries.clear()
            b.store.fail = lambda operation, key: False
            await b.kv.restore_next()
            assert [b.in_host(engine, number) for number in NUMBERS] == [content(number) for number in NUMBERS]

    asyncio.run(run())


@pytest.mark.parametrize("num_turns", range(0, 120, 7))
def test_a_restore_that_is_cancelled_leaves_no_row_taken(tmp_path: Path, num_turns: int) -> None:
    async def run() -> None:
        async with AsyncExitStack() as stack:
            _, b, engine = await uploaded(stack, tmp_path, Bucket())
            task = asyncio.create_task(b.kv.restore_next())
            for _ in range(num_turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await engine.namespace.tasks.join()
            held = sum(b.in_host(engine, number) is not None for number in NUMBERS)
            await eventually(lambda: engine.namespace.host.usage.num_owned == held + engine.stores.num_grants)
            conserved(engine)

    asyncio.run(run())


def test_a_prompt_longer_than_host_memory_becomes_durable(tmp_path: Path) -> None:
    async def run() -> None:
        bucket = Bucket()
        async with AsyncExitStack() as stack:
            a = await stack.enter_async_context(fleet_host(tmp_path / "a", bucket, "a"))
            engine = await a.engine()
            row_bytes, numbers = engine.namespace.layout.row_bytes, range(40)
            await a.pin(NAME, 1)
            await a.bind(engine, NAME, numbers)
            await a.compute(engine, numbers)
            await eventually(lambda: a.is_durable(NAME))
            await a.sync.look()
            assert await a.kv.upload_next()
            small = fleet_host(tmp_path / "b", bucket, "b", host_bytes=16384 + 24 * row_bytes)
            b = await stack.enter_async_context(small)
            other = await b.engine()
            await b.sync.look()
            await b.bind(other, NAME, numbers)
            await b.look_at_pins()
            await b.kv.restore_next()
            await eventually(lambda: b.is_durable(NAME))
            conserved(other)

    asyncio.run(run())


def test_a_quarantined_namespace_gives_and_gets_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        bucket = Bucket()
        async with AsyncExitStack() as stack:
            _, b, engine = await uploaded(stack, tmp_path, bucket)
            await b.cache.quarantines.begin(engine.namespace.namespace_id, "a test")
            assert not await b.kv.restore_next()
            assert b.in_host(engine, 0) is None

    asyncio.run(run())


def test_other_weights_get_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        bucket = Bucket()
        async with AsyncExitStack() as stack:
            _, b, _ = await uploaded(stack, tmp_path, bucket)
            other = await b.engine(weights="2")
            await b.bind(other, NAME, NUMBERS)
            assert await b.kv.restore_next()
            assert b.in_host(other, 0) is None

    asyncio.run(run())


def test_kv_of_before_an_update_does_not_come_back(tmp_path: Path) -> None:
    """It did after each restart of the daemon, and took the space that had just come free for the pins of today."""

    async def run() -> None:
        async with AsyncExitStack() as stack:
            _, b, before = await uploaded(stack, tmp_path, Bucket())
            b.cache.end(before)
            await eventually(lambda: before not in b.cache.sessions)
            after = await b.engine(weights="2")
            await b.bind(after, NAME, NUMBERS)
            await b.look_at_pins()
            assert not await b.kv.restore_next()
            assert not before.namespace.holds_chunks

    asyncio.run(run())


ADAPTER = {"lora_name": "law", "lora_path": "/adapters/law"}


@pytest.mark.parametrize("how", [ADAPTER, {}], ids=["adapter", "none"])
def test_kv_by_other_keys_is_computed_uploaded_and_restored_again(tmp_path: Path, how: dict[str, str]) -> None:
    """An adapter was trained again under its name and path, so engines look for other keys. The KV of the old weights
    counted as that of the new ones: no host computed or uploaded it again, and none could restore it."""

    async def run() -> None:
        bucket = Bucket()
        async with AsyncExitStack() as stack:
            a, b, other = await uploaded(stack, tmp_path, bucket, **how)
            (old_key,) = kv_keys(bucket)
            assert b.kv.is_computed_elsewhere(b.cache.prompts.get(NAME))
            engine, prompt = a.cache.sessions[0], a.cache.prompts.get(NAME)
            await a.bind(engine, NAME, RETRAINED)
            await a.look_at_pins()
            assert not await a.kv.restore_next(), "what the store has is of no use here"
            assert a.kv.is_computed_elsewhere(prompt), "until this host's claim is in the store"
            await a.kv.claim_wanted()
            assert not a.kv.is_computed_elsewhere(prompt), "engines compute it"
            await a.compute(engine, RETRAINED)
            await eventually(lambda: a.is_durable(NAME))
            assert await a.kv.upload_next()
            assert not await a.kv.upload_next(), "once"
            assert len(kv_keys(bucket)) == 2
            await b.sync.look()
            assert await b.kv.restore_next(), "a host that has the old weights still"
            assert [b.in_host(other, number) for number in NUMBERS] == [content(number) for number in NUMBERS]
            await eventually(lambda: b.is_durable(NAME))
            assert not await b.kv.upload_next(), "both are there: hosts of either weights replace nothing"
            await b.bind(other, NAME, RETRAINED)
            await b.look_at_pins()
            assert b.kv.is_computed_elsewhere(b.cache.prompts.get(NAME))
            assert await b.kv.restore_next()
            assert [b.in_host(other, number) for number in RETRAINED] == [content(number) for number in RETRAINED]
            assert old_key in kv_keys(bucket), "until the collector comes"
            conserved(other)

    asyncio.run(run())


def test_two_hosts_upload_at_once_and_one_object_stays(tmp_path: Path) -> None:
    async def run() -> None:
        bucket = Bucket()
        async with AsyncExitStack() as stack:
            hosts = []
            for name in ("a", "b"):
                host = await stack.enter_async_context(fleet_host(tmp_path / name, bucket, name, seed=ord(name)))
                engine = await host.engine()
                await host.pin(NAME, 1)
                await host.bind(engine, NAME, NUMBERS)
                await host.compute(engine, NUMBERS)
                await eventually(lambda host=host: host.is_durable(NAME))  # type: ignore[misc]
                hosts.append(host)
            for host in hosts:
                await host.sync.look()
            await asyncio.gather(*(host.kv.upload_next() for host in hosts))
            assert len(kv_keys(bucket)) == 1
            assert sum(host.kv.num_uploaded for host in hosts) == 1

    asyncio.run(run())


def test_an_upload_whose_entry_was_written_without_an_answer_is_not_discarded(tmp_path: Path) -> None:
    """The entry was found in the manifest, taken for another host's, and the object that it names was deleted."""

    async def run() -> None:
        bucket = Bucket()
        async with AsyncExitStack() as stack:
            a, b, _ = await uploaded(stack, tmp_path, bucket)
            engine = await a.engine("2")  # another namespace, whose KV is to be uploaded too
            await a.bind(engine, NAME, RETRAINED)
            await a.compute(engine, RETRAINED)
            await eventually(lambda: engine.namespace.table.disk.num_chunks == len(RETRAINED))
            swap, num_lost = a.store.swap, list[str]()

            async def losing(key: str, data: bytes, replaces: Version) -> Version | None:
                version = await swap(key, data, replaces)
                if num_lost or len(Manifest.from_bytes(key, data).stored) < 2:
                    return version
                num_lost.append(key)
                await b.sync.look()
                await b.cache.pins.update(PinUpdate(name=NAME, priority=7))
                await b.sync.look()
                return None  # as a client says that asked again after an error

            a.store.swap = losing  # type: ignore[method-assign]
            assert await a.kv.upload_next()
            assert num_lost
            named = {each.key for each in a.stored()[NAME].stored}
            assert len(named) == 2
            assert named == {*kv_keys(bucket)}

    asyncio.run(run())


def test_a_claim_of_another_host_is_waited_for_until_it_ends(tmp_path: Path) -> None:
    async def run() -> None:
        now_s = [1_000_000.0]
        bucket = Bucket(clock=lambda: now_s[0])
        async with AsyncExitStack() as stack:
            a = await stack.enter_async_context(fleet_host(tmp_path / "a", bucket, "a"))
            engine = await a.engine()
            await a.pin(NAME, 1)
            await a.bind(engine, NAME, NUMBERS)
            await a.sync.look()
            prompt = a.cache.prompts.get(NAME)
            claim = Claim(
                namespace_id=engine.namespace.namespace_id,
                tokens_digest=prompt.token_ids.digest,
                host="dead",
                ends_unix_s=now_s[0] + 300,
            )
            await a.sync.change(NAME, lambda manifest: manifest.with_claim(claim))
            assert a.kv.is_computed_elsewhere(prompt)
            now_s[0] += 301
            assert a.kv.is_computed_elsewhere(prompt), "until this host's own claim is in the store"
            await a.kv.claim_wanted()
            assert not a.kv.is_computed_elsewhere(prompt)
            manifest = a.sync.manifest(NAME)
            assert manifest is not None
            assert [each.host for each in manifest.claims] == ["a"]

    asyncio.run(run())


def test_a_prompt_whose_claim_is_wanted_no_longer_ends_no_task(tmp_path: Path) -> None:
    """Two prompts wait for claims. The second is stored, and an engine asks, while the first one's claim is entered:
    the second was then looked up in what no longer had it, and the task that restores ended until the next start."""

    async def run() -> None:
        bucket = Bucket()
        async with AsyncExitStack() as stack:
            a = await stack.enter_async_context(fleet_host(tmp_path / "a", bucket, "a"))
            engine = await a.engine()
            for number, (name, numbers) in enumerate({"first": range(6), "second": range(20, 26)}.items()):
                await a.pin(name, number)
                await a.bind(engine, name, numbers)
            await a.sync.look()
            first, second = (a.cache.prompts.get(name) for name in ("first", "second"))
            for prompt in (first, second):
                assert a.kv.is_computed_elsewhere(prompt), "until the claim is in the store"
            await a.compute(engine, range(20, 26))
            await eventually(lambda: a.is_durable("second"))

            def asked(operation: str, key: str) -> bool:
                if operation == "swap":
                    a.kv.is_computed_elsewhere(second)
                return False

            a.store.fail = asked
            await a.kv.claim_wanted()
            manifest = a.sync.manifest("first")
            assert manifest is not None
            assert [each.host for each in manifest.claims] == ["a"]

    asyncio.run(run())


def test_a_full_disk_delays_an_upload_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The bundle is written to a scratch file first."""

    async def run() -> None:
        bucket = Bucket()
        async with AsyncExitStack() as stack:
            a = await stack.enter_async_context(fleet_host(tmp_path / "a", bucket, "a"))
            engine = await a.engine()
            await a.pin(NAME, 1)
            await a.bind(engine, NAME, NUMBERS)
            await a.compute(engine, NUMBERS)
            await eventually(lambda: a.is_durable(NAME))
            with monkeypatch.context() as patch:
                patch.setattr("kvtier.tiering.resources._free_bytes", lambda _: 0)
                await a.sync.look()
                assert await a.kv.upload_next()
                assert kv_keys(bucket) == []
                assert a.sync.is_shared(NAME)
                assert "bytes" in caplog.records[-1].__dict__["kvtier_fields"]["problem"]
            a.kv._retries.clear()
            assert await a.kv.upload_next()
            assert len(kv_keys(bucket)) == 1
            conserved(engine)

    asyncio.run(run())


def test_a_label_that_another_host_has_removed_goes_from_a_replacement_under_way_too(tmp_path: Path) -> None:
    """It stayed at what is to replace the pin, whose own labels alone were looked at, and went back to all hosts."""

    async def run() -> None:
        async with AsyncExitStack() as stack:
            a, b, _ = await uploaded(stack, tmp_path, Bucket())
            await a.pin(NAME, 2, labels={"team": "x", "app": "y"})
            assert NAME in a.cache.prompts.replacements
            await a.sync.look()
            await b.sync.look()
            assert dict(b.cache.prompts.get(NAME).labels) == {"team": "x", "app": "y"}
            await b.cache.pins.update(PinUpdate(name=NAME, removed_labels=["team"]))
            for host in (b, a, b, a):
                await host.sync.look()
            assert a.cache.prompts.replacements[NAME].labels == (("app", "y"),)
            assert b.cache.prompts.get(NAME).labels == (("app", "y"),)

    asyncio.run(run())


@pytest.mark.parametrize("is_away", [True, False])
def test_engines_compute_what_the_store_has_and_does_not_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_away: bool
) -> None:
    """KV that cannot come (the store is away, or refuses to read it, or a newer kvtier wrote it) was waited for for
    ever: the prompt stayed cold until a user asked for it."""
    monkeypatch.setattr("kvtier.fleet.kv_sync._UNCLAIMED_S", 0.0)

    async def run() -> None:
        async with AsyncExitStack() as stack:
            _, b, _ = await uploaded(stack, tmp_path, Bucket())
            prompt = b.cache.prompts.get(NAME)
            assert b.kv.is_computed_elsewhere(prompt)
            if is_away:
                b.kv.is_away = lambda: True
            else:
                b.store.fail = lambda operation, key: operation == "get_range"
                with pytest.raises(RemoteUnavailableError):
                    await b.kv.restore_next()
            assert not b.kv.is_computed_elsewhere(prompt)
            await b.kv.claim_wanted()
            assert not b.kv.is_computed_elsewhere(prompt)
            b.kv.is_away, b.store.fail = (lambda: False), (lambda operation, key: False)
            b.kv._retries.clear()
            assert await b.kv.restore_next()
            await eventually(lambda: b.is_durable(NAME))

    asyncio.run(run())
