"""What every store of a fleet promises: in memory, in a folder, and on real S3 servers, also behind a proxy."""

import asyncio
import errno
import fcntl
import os
import secrets
import shutil
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from kvtier.config.model import RemoteConfig
from kvtier.errors import RemoteDamagedError, RemoteMissingError, RemoteRefusedError, RemoteUnavailableError
from kvtier.obs.counters import Counters
from kvtier.remote.base import RemoteStore, Version
from kvtier.remote.folder_store import FolderStore
from kvtier.remote.metered_store import MeteredStore, dollars
from kvtier.remote.opening import check_conditional_writes, open_store
from kvtier.remote.pooled_store import PooledStore
from kvtier.remote.sealed_store import SealedStore
from kvtier.sealing.sealed_stream import sealed_length
from tests.fakes.fault_proxy import FaultProxy, fault_proxy
from tests.fakes.keys import ring_of
from tests.fakes.memory_pool import MemoryPool
from tests.fakes.memory_store import MemoryStore
from tests.fakes.rig import eventually
from tests.fakes.s3_server import CREDENTIALS, make_bucket
from tests.fakes.s3_servers import running_server

Test = Callable[[RemoteStore], Awaitable[None]]


@pytest.fixture(scope="module")
def s3_url() -> Iterator[str]:
    pytest.importorskip("moto", reason="moto is not installed")
    with running_server("moto") as url:
        yield url


@pytest.fixture(scope="module")
def ceph_url() -> Iterator[str]:
    with running_server("ceph") as url:
        yield url


@pytest.fixture(scope="module")
def proxy(s3_url: str) -> Iterator[FaultProxy]:
    with fault_proxy(s3_url) as proxy:
        yield proxy


STORES = ["memory", "folder", "s3", "s3 behind a proxy", "metered", "pooled", "sealed"]


@pytest.fixture(params=[*STORES, pytest.param("ceph", marks=pytest.mark.fleet)])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RemoteStore:
    if request.param == "folder":
        return open_store(f"file://{tmp_path}")
    if request.param == "metered":
        return MeteredStore(open_store(f"file://{tmp_path}"), Counters())
    if request.param == "pooled":
        return PooledStore(MemoryStore(), MemoryPool(), Counters(), pooled="kv/")
    if request.param == "sealed":
        return SealedStore(MemoryStore(), ring_of("k1"), sealed=("kv/",))
    if request.param == "memory":
        return MemoryStore()
    if request.param == "s3 behind a proxy":
        url = request.getfixturevalue("proxy").url
    else:
        url = request.getfixturevalue("ceph_url" if request.param == "ceph" else "s3_url")
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": url}.items():
        monkeypatch.setenv(name, value)
    return open_store(f"s3://fleet/{secrets.token_hex(4)}")


def run(test: Awaitable[None]) -> None:
    async def call() -> None:
        await test

    asyncio.run(call())


async def pieces(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


def test_a_new_object_is_written_once(store: RemoteStore) -> None:
    async def test() -> None:
        version = await store.put_new("pins/one.json", b"1")
        assert version is not None
        assert await store.put_new("pins/one.json", b"2") is None
        found = await store.get("pins/one.json")
        assert found is not None
        assert (found.data, found.version) == (b"1", version)
        assert await store.get("pins/two.json") is None
        assert await store.head("pins/two.json") is None

    run(test())


def test_a_swap_replaces_what_it_names_only(store: RemoteStore) -> None:
    async def test() -> None:
        first = await store.put_new("pins/one", b"1")
        assert first is not None
        second = await store.swap("pins/one", b"2", first)
        assert second is not None
        assert second != first
        assert await store.swap("pins/one", b"3", first) is None
        found = await store.get("pins/one")
        assert found is not None
        assert found.data == b"2"
        await store.delete("pins/one")
        assert await store.swap("pins/one", b"4", second) is None
        assert await store.get("pins/one") is None

    run(test())


def test_of_many_swaps_and_of_many_new_objects_one_wins(store: RemoteStore) -> None:
    async def test() -> None:
        version = await store.put_new("pins/one", b"0")
        for turn in range(10):
            assert version is not None
            wins = await asyncio.gather(*(store.swap("pins/one", b"%d %d" % (turn, n), version) for n in range(8)))
            (version,) = [each for each in wins if each is not None]
            found = await store.get("pins/one")
            assert found is not None
            assert found.version == version
            made = await asyncio.gather(*(store.put_new(f"pins/new-{turn}", b"%d" % n) for n in range(8)))
            assert len([each for each in made if each is not None]) == 1

    run(test())


def test_an_object_that_is_too_long_for_one_piece_is_damaged(
    store: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counted as a refusal of the store: one long prompt stopped the merging of all pins on every other host."""
    monkeypatch.setattr("kvtier.remote.base.MAX_SMALL_BYTES", 1000)

    async def test() -> None:
        for num_bytes in (1000, 1001):
            await store.put_stream("prompts/a", pieces(bytes(num_bytes)))
            if num_bytes == 1000:
                found = await store.get("prompts/a")
                assert found is not None
                assert found.data == bytes(num_bytes)
            else:
                with pytest.raises(RemoteDamagedError, match=r"prompts/a .* 1001 bytes, and at most 1000 are read"):
                    await store.get("prompts/a")

    run(test())


def test_a_large_object_is_read_by_ranges(store: RemoteStore) -> None:
    async def test() -> None:
        parts = [os.urandom(1024**2) for _ in range(11)]
        await store.put_stream("kv/ns/large", pieces(*parts))
        data = b"".join(parts)
        for start, end in ((0, 1), (0, len(data)), (5, 5 + 3 * 1024**2), (len(data) - 3, len(data) + 100)):
            assert await store.get_range("kv/ns/large", start, end) == data[start:end]
        info = await store.head("kv/ns/large")
        assert info is not None
        assert info.num_bytes in (len(data), sealed_length(len(data)))
        await store.put_stream("kv/ns/large", pieces(b"short"))
        found = await store.get("kv/ns/large")
        assert found is not None
        assert found.data == b"short"

    run(test())


def test_a_missing_object_has_no_ranges_and_is_deleted_again(store: RemoteStore) -> None:
    async def test() -> None:
        with pytest.raises(RemoteMissingError):
            await store.get_range("kv/ns/none", 0, 10)
        await store.delete("kv/ns/none")

    run(test())


def test_a_stream_that_breaks_leaves_nothing(store: RemoteStore) -> None:
    async def broken() -> AsyncIterator[bytes]:
        for _ in range(9):
            yield bytes(1024**2)
        raise ValueError("broken")

    async def test() -> None:
        with pytest.raises(ValueError, match="broken"):
            await store.put_stream("kv/ns/broken", broken())
        assert await store.head("kv/ns/broken") is None
        assert [info.key async for info in store.list("kv/")] == []

    run(test())


def test_every_object_is_listed_under_its_prefix(store: RemoteStore) -> None:
    async def test() -> None:
        keys = [f"pins/{n:04}.json" for n in range(1100)]
        versions: dict[str, Version | None] = {}
        for start in range(0, len(keys), 50):
            part = keys[start : start + 50]
            made = await asyncio.gather(*(store.put_new(key, b"x") for key in part))
            versions.update(zip(part, made, strict=True))
        await store.put_stream("kv/a/b/c.bin", pieces(b"y"))
        await store.put_stream("pins-not/a", pieces(b"z"))
        assert {info.key: info.version async for info in store.list("pins/")} == versions
        assert [info.key async for info in store.list("kv/")] == ["kv/a/b/c.bin"]
        assert [info.key async for info in store.list("none/")] == []

    run(test())


def test_every_store_here_writes_on_conditions(store: RemoteStore) -> None:
    async def test() -> None:
        await check_conditional_writes(store)
        assert [info.key async for info in store.list("checks/")] == []

    run(test())


def is_first_write(store: MemoryStore, operation: str) -> bool:
    return operation in ("put_new", "swap") and store.calls[operation] == 1


@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize("ignored", ["put_new", "swap"])
def test_a_store_that_ignores_conditions_is_refused(
    ignored: str, is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while answers to its writes that have conditions are lost."""
    store = MemoryStore()

    async def careless(key: str, data: bytes, *_: object) -> Version | None:
        return store.bucket.put(key, data)

    store.lose = lambda operation, key: is_lost and is_first_write(store, operation)

    monkeypatch.setattr(store, ignored, careless)
    with pytest.raises(RemoteRefusedError, match="PUT"):
        run(check_conditional_writes(store))
    assert not store.bucket.objects


def test_a_store_that_loses_answers_is_not_taken_for_one_that_ignores_conditions() -> None:
    """A daemon that started meanwhile refused a good store: the client's second try met its own write."""
    store = MemoryStore()
    store.lose = lambda operation, key: is_first_write(store, operation)
    run(check_conditional_writes(store))
    assert not store.bucket.objects


def test_a_store_that_refuses_every_write_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()

    async def refusing(*_: object) -> None:
        return None

    monkeypatch.setattr(store, "put_new", refusing)
    with pytest.raises(RemoteRefusedError, match="If-None-Match"):
        run(check_conditional_writes(store))


def test_a_bucket_that_is_not_there_is_refused(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": s3_url}.items():
        monkeypatch.setenv(name, value)
    store = open_store("s3://none/fleet")

    async def test() -> None:
        with pytest.raises(RemoteRefusedError, match=r"remote\.url"):
            await store.put_new("a", b"1")
        with pytest.raises(RemoteRefusedError):
            await store.get("a")
        with pytest.raises(RemoteRefusedError):
            _ = [info async for info in store.list("pins/")]

    run(test())


def test_a_list_has_the_versions_that_reads_and_writes_had_in_a_bucket_that_keeps_all(
    s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their ids are in no list: every look read every manifest again, on Google's store in any bucket."""
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": s3_url}.items():
        monkeypatch.setenv(name, value)
    make_bucket(s3_url, "kept", keeps_versions=True)
    store = open_store(f"s3://kept/{secrets.token_hex(4)}")

    async def test() -> None:
        first = await store.put_new("pins/a", b"1")
        assert first is not None
        second = await store.swap("pins/a", b"2", first)
        assert second not in (None, first)
        found = await store.get("pins/a")
        assert found is not None
        assert [info.version async for info in store.list("pins/")] == [second] == [found.version]
        assert await store.swap("pins/a", b"3", first) is None
        assert await store.swap("pins/a", b"3", found.version) is not None

    run(test())


def test_googles_store_swaps_by_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """It compares no ETag when it writes, and lists have nothing else."""
    meta = {"e_tag": '"1"', "version": "1700", "path": "pins/a", "size": 1, "last_modified": datetime.now(UTC)}
    modes: list[object] = []

    async def head(store: object, key: str) -> dict[str, object]:
        return meta

    async def put(store: object, key: str, data: bytes, *, mode: object, use_multipart: bool) -> dict[str, object]:
        modes.append(mode)
        return meta | {"e_tag": '"2"', "version": "1701"}

    monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
    store = open_store("gs://bucket/fleet")
    monkeypatch.setattr("obstore.head_async", head)
    monkeypatch.setattr("obstore.put_async", put)

    async def test() -> None:
        info = await store.head("pins/a")
        assert info is not None
        assert await store.swap("pins/a", b"2", Version('{"e_tag": "\\"0\\""}')) is None
        assert modes == []
        listed = Version('{"e_tag": "\\"1\\""}')
        assert listed == info.version
        assert await store.swap("pins/a", b"2", listed) is not None
        assert modes == [{"version": "1700"}]

    run(test())


@pytest.mark.parametrize("code", ["ExpiredToken", "InvalidToken", "AccessDenied"])
def test_credentials_that_have_ended_are_refused(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 answers them with status 400: it was logged as if the store were away."""
    body = f"<Error><Code>{code}</Code><Message>The provided token has expired.</Message></Error>".encode()

    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(400)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}"}.items():
            monkeypatch.setenv(name, value)
        store = open_store("s3://fleet/x")

        async def test() -> None:
            with pytest.raises(RemoteRefusedError, match="refuses to read pins/a"):
                await store.get("pins/a")

        run(test())
        server.shutdown()


@pytest.mark.parametrize("endpoint", ["http://10.0.0.1:9", "http://127.0.0.1.example.com", "http://localhost.example"])
@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"])
def test_a_server_without_tls_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, endpoint: str) -> None:
    """Names that begin as a loopback address does passed; others failed at each request, with "builder error"."""
    monkeypatch.setenv(name, endpoint)
    with pytest.raises(RemoteRefusedError, match=f"{name}={endpoint} .*TLS"):
        open_store("s3://fleet/x")


def test_a_server_that_is_gone_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}.items():
        monkeypatch.setenv(name, value)
    store = open_store("s3://fleet/x")

    async def test() -> None:
        with pytest.raises(RemoteUnavailableError) as caught:
            await store.get("a")
        assert "test" not in str(caught.value), "no credentials"

    run(test())


def test_requests_bytes_and_dollars_are_counted(tmp_path: Path) -> None:
    async def test() -> None:
        counters = Counters()
        store = MeteredStore(open_store(f"file://{tmp_path}"), counters)
        await store.put_new("pins/a", b"123")
        await store.put_stream("kv/a", pieces(b"1234", b"5"))
        await store.get("pins/a")
        await store.get_range("kv/a", 0, 5)
        assert [info.key async for info in store.list("pins/")] == ["pins/a"]
        assert (counters.remote_requests_write, counters.remote_requests_read, counters.remote_requests_list) == (
            2,
            2,
            1,
        )
        assert (counters.remote_transferred_bytes_up, counters.remote_transferred_bytes_down) == (8, 8)
        prices = RemoteConfig(
            dollars_per_1000_writes=1.0, dollars_per_1000_reads=0.5, dollars_per_gib_up=1024**3, dollars_per_gib_down=0
        )
        assert dollars(counters, prices) == pytest.approx(0.003 + 0.001 + 8)

    run(test())


def test_a_folder_that_is_full_is_unavailable_and_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def test() -> None:
        store = open_store(f"file://{tmp_path}")
        first = await store.put_new("pins/a", b"1")
        assert first is not None
        monkeypatch.setattr("kvtier.remote.folder_store._append", full)
        for write in (store.put_new("pins/b", b"2"), store.swap("pins/a", b"2", first)):
            with pytest.raises(RemoteUnavailableError, match="No space left"):
                await write
        with pytest.raises(RemoteUnavailableError, match="No space left"):
            await store.put_stream("kv/a", pieces(b"2"))
        assert [info.key async for info in store.list("pins/")] == ["pins/a"]
        assert [info.key async for info in store.list("kv/")] == []
        await eventually(lambda: list((tmp_path / ".tmp").iterdir()) == [])
        left = tmp_path / ".tmp" / "left"
        left.write_bytes(b"by a host that was killed")
        os.utime(left, (0, 0))
        monkeypatch.undo()
        assert await store.put_new("pins/b", b"2") is not None
        assert not left.exists()
        found = await store.get("pins/a")
        assert found is not None
        assert found.data == b"1"

    run(test())


def test_a_folder_that_goes_while_it_is_written_is_unavailable_and_used_again(tmp_path: Path) -> None:
    """Someone empties it under a daemon: the error was one of the system's, and ended the daemon's task for uploads."""
    store = open_store(f"file://{tmp_path}")

    async def emptied_meanwhile() -> AsyncIterator[bytes]:
        yield b"1"
        shutil.rmtree(tmp_path / ".tmp")
        yield b"2"

    async def test() -> None:
        with pytest.raises(RemoteUnavailableError, match="No such file"):
            await store.put_stream("kv/a", emptied_meanwhile())
        await store.put_stream("kv/a", pieces(b"1", b"2"))
        assert await store.get_range("kv/a", 0, 9) == b"12"

    run(test())


def test_a_folder_whose_lock_is_held_for_ever_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that hung while it wrote held up all others, which showed the store as reachable, and did not stop."""
    monkeypatch.setattr("kvtier.remote.folder_store._LOCK_S", 0.1)

    async def test() -> None:
        store = open_store(f"file://{tmp_path}")
        first = await store.put_new("pins/a", b"1")
        assert first is not None
        with (tmp_path / ".lock").open("rb") as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            with pytest.raises(RemoteUnavailableError, match=r"a host holds .*lock for more .* end its daemon"):
                await store.swap("pins/a", b"2", first)
            assert [info.key async for info in store.list("pins/")] == ["pins/a"]
        assert await store.swap("pins/a", b"2", first) is not None

    run(test())


@pytest.mark.parametrize("has_links", [True, False])
def test_a_host_that_sees_a_folder_as_it_was_overwrites_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    """NFS answers `stat` of a path from what the host has cached: the manifests of other hosts were overwritten."""
    cached: list[os.stat_result | None] = []
    stat, rename, path = Path.stat, Path.rename, tmp_path / "pins" / "one"

    def stale(which: Path, **how: bool) -> os.stat_result:
        if which != path or not cached:
            return stat(which, **how)
        if cached[0] is None:
            raise FileNotFoundError(errno.ENOENT, "the test says so")
        return cached[0]

    def known_then(which: Path, target: Path) -> Path:
        cached.clear()
        return rename(which, target)

    def no_links(*_: object) -> None:
        raise PermissionError(errno.EPERM, "the test says so")

    monkeypatch.setattr(Path, "stat", stale)
    monkeypatch.setattr(Path, "rename", known_then)
    if not has_links:
        monkeypatch.setattr(os, "link", no_links)

    async def test() -> None:
        store = open_store(f"file://{tmp_path}")
        first = await store.put_new("pins/one", b"1")
        assert first is not None
        cached.append(None)
        assert await store.put_new("pins/one", b"2") is None
        before = stat(path)
        cached.clear()
        second = await store.swap("pins/one", b"3", first)
        assert second not in (None, first)
        cached.append(before)
        assert await store.swap("pins/one", b"4", first) is None
        found = await store.get("pins/one")
        assert found is not None
        assert (found.data, found.version) == (b"3", second)
        assert list((tmp_path / ".tmp").iterdir()) == []

    run(test())


def test_of_two_new_files_of_one_name_the_file_server_takes_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That a name is not there is remembered by a host too, beyond an open: the link is what decides."""

    async def test() -> None:
        store = FolderStore(f"file://{tmp_path}")
        assert await store.put_new("pins/one", b"1") is not None
        monkeypatch.setattr(store, "_look", lambda key: None)
        assert await store.put_new("pins/one", b"2") is None
        monkeypatch.undo()
        found = await store.get("pins/one")
        assert found is not None
        assert found.data == b"1"
        assert list((tmp_path / ".tmp").iterdir()) == []

    run(test())
