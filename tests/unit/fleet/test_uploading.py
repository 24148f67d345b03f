"""KV goes up as a bundle that `kvtier import` reads, under a key of its own, and nothing stays on disk here."""

import asyncio
import errno
import hashlib
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvtier.bundles import RequestedImport, import_bundle
from kvtier.bundles.exporting import export_bundle
from kvtier.bundles.spool import Spool
from kvtier.errors import (
    NamespaceQuarantinedError,
    PromptNotDurableError,
    PromptNotFoundError,
    RemoteUnavailableError,
)
from kvtier.fleet.manifest import KV
from tests.fakes.bundles import read_bundle
from tests.fakes.gates import gated
from tests.fakes.kv_hosts import KVHost, Pinned, kv_host
from tests.fakes.memory_store import Bucket
from tests.fakes.operator import reached


async def durable(host: KVHost, **fields: object) -> Pinned:
    pinned = await host.pin(**fields)  # type: ignore[arg-type]
    await host.compute(pinned.keys)
    return pinned


async def assert_nothing_left(host: KVHost) -> None:
    """Nothing is left of an upload."""
    await host.join_and_check()
    assert host.scratch == []
    usage = host.cache.resources.disk_usage
    assert (usage.kept_bytes, usage.promised_bytes) == (0, 0)


def test_what_goes_up_is_the_prompts_bundle(tmp_path: Path) -> None:
    async def run() -> None:
        bucket = Bucket()
        async with kv_host(tmp_path / "a", bucket) as a, kv_host(tmp_path / "b", bucket) as b:
            pinned = await durable(a, cache_salt="s")
            stored = await a.upload()
            ((key, (data, _, _)),) = bucket.objects.items()
            assert key == stored.key
            assert key.startswith(f"{KV}{a.namespace.namespace_id}/{hashlib.sha256(data).hexdigest()}-")
            assert key.endswith(".safetensors")
            assert (stored.namespace_id, stored.host) == (a.namespace.namespace_id, "a")
            assert (stored.num_bytes, stored.num_chunks) == (len(data), len(pinned.keys))
            assert stored.tokens_digest == pinned.prompt.token_ids.digest
            exported = b"".join([piece async for piece in export_bundle(a.cache, "p", "")])
            assert data == exported
            assert read_bundle(data, tmp_path).keys == pinned.keys
            counters = a.cache.resources.counters
            assert (counters.remote_uploaded_prompts, counters.remote_uploaded_bytes) == (1, len(data))
            assert (await a.upload()).key != key, "a key is never used again"

            async def pieces() -> AsyncIterator[bytes]:
                yield data

            await import_bundle(b.cache, RequestedImport(name="q"), pieces())
            assert b.held(pinned.keys) == list(pinned.keys)
            await assert_nothing_left(a)
            await assert_nothing_left(b)

    asyncio.run(run())


def test_what_is_not_whole_or_not_to_be_trusted_does_not_go_up(tmp_path: Path) -> None:
    async def run() -> None:
        bucket = Bucket()
        async with kv_host(tmp_path / "a", bucket) as a:
            with pytest.raises(PromptNotFoundError):
                await a.upload("x")
            pinned = await a.pin()
            await a.compute(pinned.keys[1:])
            with pytest.raises(PromptNotDurableError):
                await a.upload()
            await a.compute(pinned.keys[:1])
            await a.cache.quarantines.begin(a.namespace.namespace_id, "a test")
            with pytest.raises(NamespaceQuarantinedError):
                await a.upload()
            assert not bucket.objects
            await assert_nothing_left(a)

    asyncio.run(run())


def test_a_namespace_that_is_quarantined_meanwhile_leaves_no_object(tmp_path: Path) -> None:
    async def run() -> None:
        bucket = Bucket()
        async with kv_host(tmp_path / "a", bucket) as a:
            await durable(a)
            put = a.store.put_stream

            async def quarantine_then_put(key: str, pieces: AsyncIterator[bytes]) -> None:
                await a.cache.quarantines.begin(a.namespace.namespace_id, "a test")
                await put(key, pieces)

            a.store.put_stream = quarantine_then_put  # type: ignore[method-assign]
            with pytest.raises(NamespaceQuarantinedError):
                await a.upload()
            assert not bucket.objects
            assert a.cache.resources.counters.remote_uploaded_prompts == 0
            await assert_nothing_left(a)

    asyncio.run(run())


@pytest.mark.parametrize("is_carried_out", [True, False])
def test_a_store_that_fails_leaves_nothing_here(tmp_path: Path, is_carried_out: bool) -> None:
    async def run() -> None:
        bucket = Bucket()
        async with kv_host(tmp_path / "a", bucket) as a:
            await durable(a)
            if is_carried_out:
                a.store.lose = lambda operation, key: True
            else:
                a.store.down = True
            with pytest.raises(RemoteUnavailableError):
                await a.upload()
            assert len(bucket.objects) == is_carried_out
            assert a.cache.resources.counters.remote_uploaded_prompts == 0
            await assert_nothing_left(a)

    asyncio.run(run())


def test_a_bundle_that_changes_on_the_way_to_the_scratch_file_is_made_of_what_is_on_disk_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pack went away while it was copied, and the second try is shorter than the first."""

    async def run() -> None:
        bucket = Bucket()
        async with kv_host(tmp_path / "a", bucket) as a:
            pinned = await durable(a)
            copy, calls = Spool.copy_chunk, list[int]()

            def torn(spool: Spool, packs: Path, chunk: object, offset: int) -> object:
                calls.append(offset)
                if len(calls) == 3:
                    spool.write(bytes(10**6), offset)
                    raise FileNotFoundError
                return copy(spool, packs, chunk, offset)  # type: ignore[arg-type]

            monkeypatch.setattr(Spool, "copy_chunk", torn)
            stored = await a.upload()
            data = bucket.objects[stored.key][0]
            assert len(data) == stored.num_bytes < 10**6
            assert read_bundle(data, tmp_path).keys == pinned.keys
            await assert_nothing_left(a)

    asyncio.run(run())


@pytest.mark.parametrize("step", ["of_disk", "copy_chunk", "verify", "read"])
def test_an_upload_that_is_cancelled_leaves_nothing_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    async def run() -> None:
        bucket = Bucket()
        async with kv_host(tmp_path / "a", bucket) as a:
            await durable(a)
            with gated(monkeypatch, Spool, step) as gate:
                task = asyncio.create_task(a.upload())
                await reached(gate.reached)
                task.cancel()
                gate.open()
                await asyncio.wait({task})
                assert task.cancelled()
            assert not bucket.objects
            await assert_nothing_left(a)

    asyncio.run(run())


def test_an_import_that_is_cancelled_while_its_file_is_made_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async def none() -> AsyncIterator[bytes]:
            raise AssertionError
            yield b""

        async with kv_host(tmp_path / "a", Bucket()) as a:
            with gated(monkeypatch, Spool, "of_disk") as gate:
                task = asyncio.create_task(import_bundle(a.cache, RequestedImport(), none()))
                await reached(gate.reached)
                task.cancel()
                gate.open()
                await asyncio.wait({task})
            await assert_nothing_left(a)

    asyncio.run(run())


def test_an_upload_waits_for_requests_that_read_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with kv_host(tmp_path / "a", Bucket()) as a:
            await durable(a)
            monkeypatch.setattr("kvtier.bundles.exporting.MAX_YIELD_S", 30.0)
            traffic = a.cache.resources.request_reads
            traffic.began()
            task = asyncio.create_task(a.upload())
            for _ in range(100):
                await asyncio.sleep(0)
            assert a.scratch == []
            exported = b"".join([piece async for piece in export_bundle(a.cache, "p", "")])
            traffic.ended()
            assert (await task).num_bytes == len(exported), "an operator's export waits for nothing"
            await assert_nothing_left(a)

    asyncio.run(run())


def test_a_scratch_file_that_the_system_keeps_undoes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that had turned read-only ended all uploads until a restart, by an error on the loop."""
    threads = list[str]()

    def refuse(path: Path, missing_ok: bool = False) -> None:
        threads.append(threading.current_thread().name)
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    async def run() -> None:
        bucket = Bucket()
        async with kv_host(tmp_path / "a", bucket) as a, kv_host(tmp_path / "b", bucket) as b:
            await durable(a)
            with monkeypatch.context() as patch:
                patch.setattr(Path, "unlink", refuse)
                stored = await a.upload()
                exported = b"".join([piece async for piece in export_bundle(a.cache, "p", "", decoded=True)])
                data = bucket.objects[stored.key][0]

                async def pieces() -> AsyncIterator[bytes]:
                    yield data

                await import_bundle(b.cache, RequestedImport(name="q"), pieces())
            assert exported
            assert (len(a.scratch), len(b.scratch)) == (3, 1)

    asyncio.run(run())
    assert len(threads) == 4
    assert threading.main_thread().name not in threads
    assert caplog.text.count("scratch_file_left") == 4
