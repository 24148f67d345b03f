"""Export from one daemon, import into another: the chunks' bytes are equal, and after an error nothing is left."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvtier._pb import cache_pb2
from kvtier._pb import engine_pb2 as pb
from kvtier.config import DaemonConfig
from kvtier.disk.packs.pack_tier import PackTier
from kvtier.errors import LedgerError, TierIOError
from kvtier.ledger.pack_rows import PackRows
from kvtier.ledger.promises import Promises
from tests.fakes.fsck import assert_clean, assert_clean_online
from tests.fakes.gates import failing, gated
from tests.fakes.operator import Stub, evict, pin, prompt_of, reached, status_of, store_last_apart, unpin, until
from tests.fakes.scripted_engine import DEADLINE_S, ScriptedEngine, chunk_key, config_in, running, wait_durable

KEYS = [chunk_key(n) for n in range(5)]
Status = grpc.StatusCode


def home(tmp_path: Path, name: str, **settings: Any) -> DaemonConfig:
    (tmp_path / name).mkdir()
    return config_in(tmp_path / name, **settings)


async def export(stub: Stub, name: str = "p", namespace_id: str = "") -> bytes:
    request = cache_pb2.ExportRequest(name=name, namespace_id=namespace_id)
    pieces = [piece.data async for piece in stub.Export(request)]
    assert all(len(piece) <= 1024**2 for piece in pieces)
    return b"".join(pieces)


async def import_(stub: Stub, data: bytes, *, piece_bytes: int = 5000, **start: Any) -> cache_pb2.PromptStatus:
    def messages() -> Iterable[cache_pb2.ImportMessage]:
        yield cache_pb2.ImportMessage(start=cache_pb2.ImportStart(**start))
        for offset in range(0, len(data), piece_bytes):
            piece = cache_pb2.BundlePiece(data=data[offset : offset + piece_bytes])
            yield cache_pb2.ImportMessage(piece=piece)

    status: cache_pb2.PromptStatus = await stub.Import(messages())
    return status


async def refused(stub: Stub, data: bytes, code: Status, match: str, **start: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=match) as caught:
        await import_(stub, data, **start)
    assert caught.value.code() == code


async def bundle_of(config: DaemonConfig, **hello: Any) -> bytes:
    """Pin, store and export in a daemon of its own."""
    async with running(config) as stub, ScriptedEngine(config, **hello) as engine:
        await engine.bind(await pin(stub, cache_salt="s", priority=4, recipe_json='{"kind": "text"}'), KEYS)
        await store_last_apart(stub, engine, KEYS)
        return await export(stub)


async def attach_once(config: DaemonConfig, **hello: Any) -> None:
    """Let the daemon know the namespace."""
    async with running(config), ScriptedEngine(config, **hello):
        pass


async def files_of(config: DaemonConfig) -> list[str]:
    return sorted(path.name for folder in ("packs", "tmp") for path in (config.disk.disk_dir / folder).glob("*"))


async def assert_nothing_left(config: DaemonConfig, stub: Stub) -> None:
    async def tidy() -> bool:
        return await files_of(config) == []

    await until(tidy)
    assert (await stub.ListPrompts(cache_pb2.ListPromptsRequest())).prompts == []
    assert (await status_of(stub)).disk.used_bytes == 0
    await assert_clean_online(stub)


async def assert_serves(config: DaemonConfig, name: str = "p") -> None:
    """A fresh daemon and engine read the very bytes."""
    async with running(config) as stub, ScriptedEngine(config) as engine:
        (wanted,) = (one for one in engine.welcome.pins if one.name == name)
        assert list(wanted.tokens) == list(range(80))
        assert (wanted.cache_salt, wanted.pinned) == ("s", True)
        await engine.bind(wanted.pin_id, KEYS)
        leased = await engine.acquire(1, KEYS)
        assert [engine.read(KEYS[i], leased[i]) for i in range(5)] == [engine.payload(key) for key in KEYS]
        assert (await prompt_of(stub, name)).state == cache_pb2.PromptStatus.DURABLE
    assert_clean(config.disk.disk_dir)


def test_a_bundle_travels(tmp_path: Path) -> None:
    async def scenario() -> None:
        there = home(tmp_path, "b")
        data = await bundle_of(home(tmp_path, "a"))
        await attach_once(there)
        async with running(there) as stub:  # no engine attached
            status = await import_(stub, data, ttl_s=3600)
            assert (status.name, status.state) == ("p", cache_pb2.PromptStatus.DURABLE)
            assert status.bindings[0].covered_tokens == 80
            assert 0 < status.expires_unix_s - status.created_unix_s <= 3601
            assert status.recipe_json == '{"kind": "text"}'
            assert status.priority == 4
            assert await export(stub) == data, "what was imported exports to the same bytes"
            await assert_clean_online(stub)
            assert not list((there.disk.disk_dir / "tmp").iterdir())
        await assert_serves(there)

    asyncio.run(scenario())


def test_who_shares_a_prompt_is_decided_where_it_is_imported(tmp_path: Path) -> None:
    """A file that someone made does not open a prompt to all tenants."""

    async def scenario() -> None:
        here, there = home(tmp_path, "a"), home(tmp_path, "b")
        async with running(here) as stub, ScriptedEngine(here) as engine:
            await engine.bind(await pin(stub, public=True), KEYS)
            await store_last_apart(stub, engine, KEYS)
            assert (await prompt_of(stub)).public
            data = await export(stub)
        await attach_once(there)
        async with running(there) as stub:
            assert not (await import_(stub, data)).public
            assert (await import_(stub, data, public=True)).public
        async with running(there), ScriptedEngine(there) as engine:
            assert [(one.name, one.public) for one in engine.welcome.pins] == [("p", True)]
        async with running(here) as stub:
            salted = await bundle_of(home(tmp_path, "c"))
            await refused(stub, salted, Status.INVALID_ARGUMENT, "a public prompt has no cache_salt", public=True)

    asyncio.run(scenario())


def test_a_bundle_may_come_in_small_pieces_and_must_come_whole(tmp_path: Path) -> None:
    async def scenario() -> None:
        there = home(tmp_path, "b")
        data = await bundle_of(home(tmp_path, "a"))
        header_end = 8 + int.from_bytes(data[:8], "little")
        async with running(there) as stub, ScriptedEngine(there):
            for length in (0, 5, 8, 9, header_end - 1, header_end, header_end + 100, header_end + 1000, len(data) - 1):
                await refused(stub, data[:length], Status.INVALID_ARGUMENT, "cut short", piece_bytes=100)
            await assert_nothing_left(there, stub)
            await import_(stub, data, piece_bytes=100)
        await assert_serves(there)

    asyncio.run(scenario())


def test_attached_engines_are_notified(tmp_path: Path) -> None:
    async def scenario() -> None:
        there = home(tmp_path, "b")
        data = await bundle_of(home(tmp_path, "a"))
        async with running(there) as stub, ScriptedEngine(there) as engine:
            await import_(stub, data, name="q")
            added = (await engine.receive("pin_added")).pin_added.pin
            assert added.name == "q"
            await engine.wait_held(KEYS)
            await engine.bind(added.pin_id, KEYS)
            assert all(engine.held[key] for key in KEYS)
            leased = await engine.acquire(1, KEYS)
            assert [engine.read(KEYS[i], leased[i]) for i in range(5)] == [engine.payload(key) for key in KEYS]
        await assert_serves(there, "q")

    asyncio.run(scenario())


def test_a_mismatch_names_the_field(tmp_path: Path) -> None:
    async def scenario() -> None:
        there = home(tmp_path, "b")
        data = await bundle_of(home(tmp_path, "a"), fingerprint={"weights": '"1"', "dtype": '"bf16"'})
        async with running(there) as stub:
            await refused(stub, data, Status.FAILED_PRECONDITION, "no engine has attached to this daemon yet")
        await attach_once(there, fingerprint={"weights": '"2"', "dtype": '"fp8"'})
        await attach_once(there, fingerprint={"weights": '"1"', "dtype": '"fp8"'})
        async with running(there) as stub:
            match = r'differs in dtype \("bf16" in the bundle, "fp8" here\)'
            await refused(stub, data, Status.FAILED_PRECONDITION, match)
            await assert_nothing_left(there, stub)

    asyncio.run(scenario())


def test_names_follow_the_rules_of_pin(tmp_path: Path) -> None:
    async def scenario() -> None:
        there = home(tmp_path, "b")
        data = await bundle_of(home(tmp_path, "a"))
        async with running(there) as stub, ScriptedEngine(there):
            await pin(stub, tokens=16)
            await refused(stub, data, Status.ALREADY_EXISTS, "exists and differs in tokens")
            await refused(stub, data, Status.INVALID_ARGUMENT, "name", name="no spaces")
            assert (await import_(stub, data, replace=True)).num_tokens == 80
            again = await import_(stub, data)
            assert again.expires_unix_s == 0
            await unpin(stub)
            assert (await import_(stub, data)).pinned
            await assert_clean_online(stub)
        await assert_serves(there)

    asyncio.run(scenario())


def test_an_import_over_what_is_held_writes_nothing_twice(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = home(tmp_path, "a")
        data = await bundle_of(config)
        async with running(config) as stub, ScriptedEngine(config):
            before = await files_of(config)
            await import_(stub, data, name="q")
            assert await files_of(config) == before
            await evict(stub, "p", force=True)
            assert (await prompt_of(stub, "q")).state == cache_pb2.PromptStatus.DURABLE, "shared chunks are kept"
            await evict(stub, "q", force=True)
            await import_(stub, data, name="q")
            await unpin(stub, "q")
            assert (await evict(stub, "q")).num_shared_chunks == 5
        await assert_serves(config)

    asyncio.run(scenario())


@pytest.mark.parametrize("position", [3, 40, 3000, 4100, -1])
def test_a_damaged_bundle_leaves_nothing(tmp_path: Path, position: int) -> None:
    async def scenario() -> None:
        there = home(tmp_path, "b")
        data = bytearray(await bundle_of(home(tmp_path, "a")))
        data[position] ^= 16
        async with running(there) as stub, ScriptedEngine(there):
            await refused(stub, bytes(data), Status.INVALID_ARGUMENT, "the bundle cannot be taken in")
            await refused(stub, bytes(data[:-100]), Status.INVALID_ARGUMENT, "the bundle cannot be taken in")
            await refused(stub, b"", Status.INVALID_ARGUMENT, "has 0 bytes")
            await assert_nothing_left(there, stub)

    asyncio.run(scenario())


def test_the_quota_holds(tmp_path: Path) -> None:
    async def scenario() -> None:
        data = await bundle_of(home(tmp_path, "a"))
        small, full = home(tmp_path, "b", disk_bytes=20_000), home(tmp_path, "c", disk_bytes=len(data) + 9_000)
        async with running(small) as stub, ScriptedEngine(small):
            await refused(stub, data, Status.RESOURCE_EXHAUSTED, "needs about")
            await assert_nothing_left(small, stub)
        async with running(full) as stub, ScriptedEngine(full) as engine:
            keys = [chunk_key("other"), chunk_key("another")]
            await engine.bind(await pin(stub, "other", tokens=32), keys)
            await engine.store(keys)
            await wait_durable(stub, "other")
            await refused(stub, data, Status.RESOURCE_EXHAUSTED, "unpin and evict a prompt")
            await unpin(stub, "other")
            assert (await import_(stub, data)).state == cache_pb2.PromptStatus.DURABLE
            assert (await prompt_of(stub, "other")).bindings[0].num_durable_chunks == 0, "unpinned chunks are evicted"

    asyncio.run(scenario())


def disk_full() -> TierIOError:
    return TierIOError(Path("x"), "write", OSError(28, "No space left on device"))


@pytest.mark.parametrize(
    ("owner", "method", "error"),
    [
        (PackTier, "write_stored", disk_full),
        (Promises, "put_prompt", lambda: LedgerError("database or disk is full")),
        (Promises, "put_binding", lambda: LedgerError("database or disk is full")),
        (PackRows, "commit_pack", lambda: LedgerError("database or disk is full")),
    ],
)
def test_an_import_that_fails_half_way_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, method: str, error: type
) -> None:
    async def scenario() -> None:
        there = home(tmp_path, "b", pack_bytes=8192)
        data = await bundle_of(home(tmp_path, "a"))
        async with running(there) as stub, ScriptedEngine(there):
            failing(monkeypatch, owner, method, error, times=1)
            await refused(stub, data, Status.INTERNAL, "full|No space")
            await assert_nothing_left(there, stub)
            await import_(stub, data)
        await assert_serves(there)

    asyncio.run(scenario())


@pytest.mark.parametrize("method", ["delete_prompt", "put_prompt"])
def test_an_import_that_cannot_end_a_replacement_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """It failed, and had replaced the pin all the same: by one whose chunks were evicted like any cache."""

    async def scenario() -> None:
        data = await bundle_of(home(tmp_path, "a"))
        there, others = home(tmp_path, "b"), [chunk_key(n) for n in range(10, 15)]
        async with running(there) as stub, ScriptedEngine(there) as engine:
            pin_id = await pin(stub, first=500)
            await engine.bind(pin_id, others)
            await engine.store(others)
            await wait_durable(stub, "p")
            await pin(stub, first=700, replace=True)
            failing(monkeypatch, Promises, method, lambda: LedgerError("database or disk is full"), times=1)
            await refused(stub, data, Status.INTERNAL, "full", replace=True)
            kept = await prompt_of(stub)
            assert (kept.pin_id, kept.replacement, kept.state) == (pin_id, "p@2", cache_pb2.PromptStatus.DURABLE)
            await evict(stub, "")
            assert (await prompt_of(stub)).state == cache_pb2.PromptStatus.DURABLE
            assert not (await import_(stub, data, replace=True)).replacement
            assert [each.name for each in (await stub.ListPrompts(cache_pb2.ListPromptsRequest())).prompts] == ["p"]
            await assert_clean_online(stub)
        await assert_serves(there)

    asyncio.run(scenario())


def test_an_import_whose_caller_leaves_happens_or_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        there = home(tmp_path, "b")
        data = await bundle_of(home(tmp_path, "a"))
        async with running(there) as stub, ScriptedEngine(there):

            async def half() -> AsyncIterator[cache_pb2.ImportMessage]:
                yield cache_pb2.ImportMessage(start=cache_pb2.ImportStart())
                yield cache_pb2.ImportMessage(piece=cache_pb2.BundlePiece(data=data[:5000]))
                await asyncio.sleep(DEADLINE_S)

            call = stub.Import(half())

            async def spooled() -> bool:
                return any(path.stat().st_size == 5000 for path in (there.disk.disk_dir / "tmp").glob("*"))

            await until(spooled)
            call.cancel()
            await assert_nothing_left(there, stub)
            with gated(monkeypatch, PackTier, "write_stored") as gate:
                importing = asyncio.create_task(import_(stub, data))
                await reached(gate.reached)
                importing.cancel()
                await asyncio.wait({importing})
            await wait_durable_listed(stub)
        await assert_serves(there)

    async def wait_durable_listed(stub: Stub) -> None:
        async def there_now() -> bool:
            listed = (await stub.ListPrompts(cache_pb2.ListPromptsRequest())).prompts
            return [status.state for status in listed] == [cache_pb2.PromptStatus.DURABLE]

        await until(there_now)

    asyncio.run(scenario())


def test_export_refuses_what_is_not_whole(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = home(tmp_path, "a")
        async with running(config) as stub, ScriptedEngine(config) as engine:
            with pytest.raises(grpc.aio.AioRpcError, match="no prompt named") as caught:
                await export(stub, "x")
            assert caught.value.code() == Status.NOT_FOUND
            await engine.bind(await pin(stub), KEYS)
            await engine.store(KEYS[:3])
            with pytest.raises(grpc.aio.AioRpcError, match="not all of it is on disk yet") as caught:
                await export(stub)
            assert caught.value.code() == Status.FAILED_PRECONDITION
            await engine.store(KEYS[3:])
            await wait_durable(stub, "p")
            async with ScriptedEngine(config, fingerprint={"weights": "2"}) as other:
                await other.bind(other.welcome.pins[0].pin_id, KEYS)
                await other.store(KEYS)
                await wait_durable(stub, "p")
                with pytest.raises(grpc.aio.AioRpcError, match="in several namespaces"):
                    await export(stub)
                assert await export(stub, namespace_id=other.welcome.namespace_id[:8])
            for pack in (config.disk.disk_dir / "packs").iterdir():
                data = bytearray(pack.read_bytes())
                data[-5] ^= 1
                pack.write_bytes(data)
            with pytest.raises(grpc.aio.AioRpcError, match="fsck --deep") as caught:
                await export(stub, namespace_id=engine.welcome.namespace_id)
            assert caught.value.code() == Status.DATA_LOSS
            assert not list((config.disk.disk_dir / "tmp").iterdir())

    asyncio.run(scenario())


def test_an_import_into_an_ephemeral_namespace_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        there = home(tmp_path, "b")
        data = await bundle_of(home(tmp_path, "a"))
        async with running(there) as stub, ScriptedEngine(there, ephemeral=True) as engine:
            assert isinstance(engine.welcome, pb.Welcome)
            await refused(stub, data, Status.FAILED_PRECONDITION, "no engine has attached")

    asyncio.run(scenario())
