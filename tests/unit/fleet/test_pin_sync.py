"""Pins of several hosts become the same by way of the store, and none is lost, whatever happens between."""

import asyncio
import gc
import json
import sqlite3
import weakref
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import LedgerError, RemoteUnavailableError
from kvtier.fleet import manifest as manifests
from kvtier.fleet.manifest import PROMPTS, manifest_key
from kvtier.prompts.book import PinUpdate
from kvtier.remote.base import Version
from tests.fakes.fleet_hosts import FleetHost, fleet_host, tokens_of
from tests.fakes.memory_store import Bucket


async def two(stack: AsyncExitStack, folder: Path, bucket: Bucket) -> tuple[FleetHost, FleetHost]:
    return (
        await stack.enter_async_context(fleet_host(folder / "a", bucket, "a", seed=1)),
        await stack.enter_async_context(fleet_host(folder / "b", bucket, "b", seed=2)),
    )


def play(folder: Path, scenario: Callable[[FleetHost, FleetHost], Awaitable[None]]) -> None:
    """Play a scenario on two hosts and a new bucket."""

    async def run() -> None:
        async with AsyncExitStack() as stack:
            await scenario(*await two(stack, folder, Bucket()))

    asyncio.run(run())


async def agree(*hosts: FleetHost) -> None:
    for _ in range(2):
        for host in hosts:
            await host.sync.look()


def test_a_pin_of_one_host_is_everybodys(tmp_path: Path) -> None:
    async def scenario(a: FleetHost, b: FleetHost) -> None:
        how = {"ttl_s": 3600, "sliding": True, "priority": 5, "owner": "team", "labels": {"app": "x"}}
        made = await a.pin("support", 1, **how)
        await agree(a, b)
        taken = b.cache.prompts.get("support")
        assert taken.tokens == made.tokens
        for name in ("expires_unix_s", "ttl_s", "sliding", "priority", "owner", "labels", "public"):
            assert getattr(taken, name) == getattr(made, name), name
        assert a.sync.is_shared("support")
        assert b.sync.is_shared("support")
        calls = b.store.calls.copy()
        await b.sync.look()
        assert b.store.calls - calls == {"list": 1}, "nothing new costs one request"

        await b.cache.pins.update(PinUpdate(name="support", priority=-3, removed_labels=["app"]))
        await agree(b, a)
        assert (a.cache.prompts.get("support").priority, a.cache.prompts.get("support").labels) == (-3, ())
        await a.cache.pins.unpin("support")
        await agree(a, b)
        assert not b.cache.prompts.get("support").pinned
        await b.pin("support", 1)
        await agree(b, a)
        assert a.pinned() == {"support": 1}

    play(tmp_path, scenario)


def test_both_change_how_a_pin_is_pinned(tmp_path: Path) -> None:
    async def scenario(a: FleetHost, b: FleetHost) -> None:
        await a.pin("support", 1, priority=1)
        await agree(a, b)
        await a.cache.pins.update(PinUpdate(name="support", priority=7))
        await b.cache.pins.update(PinUpdate(name="support", owner="team", set_labels={"k": "v"}))
        await agree(a, b)
        for host in (a, b):
            row = host.cache.prompts.get("support")
            assert (row.priority, row.owner, row.labels) == (7, "team", (("k", "v"),))

    play(tmp_path, scenario)


def test_two_hosts_pin_other_content_under_one_name_and_both_pins_stay(tmp_path: Path) -> None:
    async def scenario(a: FleetHost, b: FleetHost) -> None:
        await a.pin("support", 1)
        await b.pin("support", 2)
        await agree(a, b)
        await a.sync.look()
        assert a.pinned() == b.pinned()
        assert sorted(a.pinned().values()) == [1, 2]
        assert a.pinned()["support"] == 1, "who came first keeps the name"
        assert b.sync.num_conflicts == 1

    play(tmp_path, scenario)


def test_the_same_file_applied_on_two_hosts_at_once_is_no_conflict(tmp_path: Path) -> None:
    async def scenario(a: FleetHost, b: FleetHost) -> None:
        for host in (a, b):
            await host.pin("support", 1)
        await asyncio.gather(a.sync.look(), b.sync.look())
        await agree(a, b)
        for host in (a, b):
            await host.pin("support", 2)
        await asyncio.gather(a.sync.look(), b.sync.look())
        await agree(a, b)
        assert a.pinned() == b.pinned() == {"support": 2}
        assert a.sync.num_conflicts == b.sync.num_conflicts == 0

    play(tmp_path, scenario)


def test_an_unpin_ends_a_pin_that_slid_on_elsewhere_but_not_one_that_was_pinned_again(tmp_path: Path) -> None:
    async def scenario(a: FleetHost, b: FleetHost) -> None:
        await a.pin("sliding", 1, ttl_s=3600, sliding=True)
        await a.pin("again", 2)
        await agree(a, b)
        await a.cache.pins.unpin("sliding")
        row = b.cache.prompts.get("sliding")
        await b.cache.pins.extend(row, row.expires_unix_s + 100, row.priority)
        await a.cache.pins.unpin("again")
        await b.cache.pins.unpin("again")
        await b.sync.look()
        await b.pin("again", 2)
        await agree(b, a)
        assert a.pinned() == b.pinned() == {"again": 2}

    play(tmp_path, scenario)


def test_a_pin_that_ended_by_its_ttl_here_and_was_used_elsewhere_comes_back(tmp_path: Path) -> None:
    async def run() -> None:
        now_s = [1_000_000.0]
        async with AsyncExitStack() as stack:
            a, b = await two(stack, tmp_path, Bucket(clock=lambda: now_s[0]))
            made = await a.pin("sliding", 1, ttl_s=3600, sliding=True)
            await agree(a, b)
            await b.cache.pins.extend(b.cache.prompts.get("sliding"), made.expires_unix_s + 5000, 0)
            await b.sync.look()
            now_s[0] = made.expires_unix_s + 1
            await a.cache.pins.unpin_now(a.cache.prompts.get("sliding"), by_ttl=True)  # as Expiry does
            await agree(a, b)
            assert a.pinned() == b.pinned() == {"sliding": 1}

    asyncio.run(run())


@pytest.mark.parametrize("forget", [False, True])
def test_an_unpin_stands_though_its_host_was_cut_off_for_longer_than_the_ttl(tmp_path: Path, forget: bool) -> None:
    """What no one had used there was taken for ended by its TTL, and pinned again because another host had used it."""

    async def run() -> None:
        now_s = [1_000_000.0]
        async with AsyncExitStack() as stack:
            a, b = await two(stack, tmp_path, Bucket(clock=lambda: now_s[0]))
            made = await a.pin("sliding", 1, ttl_s=3600, sliding=True)
            await agree(a, b)
            a.store.down = True
            await a.cache.pins.unpin("sliding", forget=forget)
            await b.cache.pins.extend(b.cache.prompts.get("sliding"), made.expires_unix_s + 5000, 0)
            await b.sync.look()
            now_s[0] = made.expires_unix_s + 1
            a.store.down = False
            await agree(a, b)
            assert a.pinned() == b.pinned() == {}

    asyncio.run(run())


def test_a_partition_of_an_hour_loses_nothing(tmp_path: Path) -> None:
    async def scenario(a: FleetHost, b: FleetHost) -> None:
        await a.pin("kept", 1)
        await a.pin("ended", 2)
        await agree(a, b)
        b.store.down = True
        with pytest.raises(RemoteUnavailableError):
            await b.sync.look()
        await b.pin("of-b", 3)
        await b.cache.pins.unpin("ended")
        await a.pin("of-a", 4)
        await a.pin("kept", 5)
        await a.sync.look()
        b.store.down = False
        await agree(b, a)
        assert a.pinned() == b.pinned() == {"kept": 5, "of-b": 3, "of-a": 4}

    play(tmp_path, scenario)


def test_a_wiped_bucket_is_filled_again(tmp_path: Path) -> None:
    async def run() -> None:
        bucket = Bucket()
        async with AsyncExitStack() as stack:
            a, b = await two(stack, tmp_path, bucket)
            await a.pin("one", 1)
            await b.pin("two", 2)
            await agree(a, b)
            bucket.objects.clear()
            await agree(a, b)
            assert a.pinned() == b.pinned() == {"one": 1, "two": 2}
            assert {manifest_key("one"), manifest_key("two")} <= bucket.objects.keys()

    asyncio.run(run())


@pytest.mark.parametrize("damage", [lambda data: None, lambda data: data[:-1]])
def test_a_prompt_whose_object_is_gone_or_damaged_is_written_again(
    tmp_path: Path, damage: Callable[[bytes], bytes | None]
) -> None:
    """Objects of prompts only went (a host hung between the object and the manifest, until the object was collected; a
    rule of the bucket): other hosts never got the pin, and pinning it again, as the error said, changed nothing."""

    async def run() -> None:
        bucket = Bucket()
        async with AsyncExitStack() as stack:
            a, b = await two(stack, tmp_path, bucket)
            await a.pin("support", 1)
            await a.pin("other", 2)
            await a.sync.look()
            key = a.stored()["support"].prompt
            data, version, written_s = bucket.objects.pop(key)
            if (left := damage(data)) is not None:
                bucket.objects[key] = left, version, written_s
            await b.sync.look()
            assert b.pinned() == {"other": 2}
            assert "a host that has the prompt writes it again" in b.sync.refused["support"]
            await agree(a, b)
            assert a.pinned() == b.pinned() == {"support": 1, "other": 2}
            assert b.sync.refused == {}
            assert a.stored()["support"].prompt in bucket.objects
            calls = a.store.calls.copy()
            await a.sync.look()
            assert a.store.calls - calls == {"list": 1}, "once"

    asyncio.run(run())


def test_an_object_that_is_too_long_stops_no_other_pin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(a: FleetHost, b: FleetHost) -> None:
        await a.pin("long", 1, recipe_json='{"text":"' + 50_000 * "x" + '"}')
        await a.pin("short", 2)
        await a.pin("spoiled", 3)
        await a.sync.look()
        a.store.bucket.put(manifest_key("spoiled"), bytes(50_000))
        monkeypatch.setattr("kvtier.remote.base.MAX_SMALL_BYTES", 50_000 - 1)
        for _ in range(2):
            await b.sync.look()
        assert b.pinned() == {"short": 2}
        assert b.sync.has_looked
        assert b.sync.has_unreadable
        assert "and at most 49999 are read" in b.sync.refused["long"]
        assert b.stored()["long"].prompt, "it is left"
        monkeypatch.undo()
        await b.sync.look()
        assert b.pinned()["long"] == 1

    play(tmp_path, scenario)


def test_a_prompt_of_a_newer_kvtier_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(a: FleetHost, b: FleetHost) -> None:
        with monkeypatch.context() as newer:
            newer.setattr("kvtier.fleet.manifest.SharedPrompt.to_bytes", lambda prompt: b'{"kvtier.prompt":2}')
            await a.pin("support", 1)
            await a.sync.look()
        key = a.stored()["support"].prompt
        await agree(b, a)
        assert "upgrade kvtier" in b.sync.refused["support"]
        assert a.stored()["support"].prompt == key

    play(tmp_path, scenario)


def test_a_lost_ledger_or_an_old_backup_ends_no_pin(tmp_path: Path) -> None:
    async def run() -> None:
        bucket = Bucket()
        async with AsyncExitStack() as stack:
            a, b = await two(stack, tmp_path, bucket)
            await a.pin("one", 1)
            await agree(a, b)
        ledger, backup = tmp_path / "a" / "disk" / "ledger.sqlite", tmp_path / "backup"
        with closing(sqlite3.connect(ledger)) as source, closing(sqlite3.connect(backup)) as target:
            source.backup(target)
        async with AsyncExitStack() as stack:
            a, b = await two(stack, tmp_path, bucket)
            await a.pin("two", 2)
            await a.cache.pins.unpin("one")
            await agree(a, b)
        for path in (tmp_path / "a" / "disk" / "promises").iterdir():
            path.unlink()
        backup.rename(ledger)
        async with AsyncExitStack() as stack:
            a, b = await two(stack, tmp_path, bucket)
            await agree(a, b)
            assert a.pinned() == b.pinned() == {"two": 2}, "an old backup is brought up to date"
        for path in sorted((tmp_path / "a" / "disk").rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        async with AsyncExitStack() as stack:
            a, b = await two(stack, tmp_path, bucket)
            await agree(a, b)
            assert a.pinned() == b.pinned() == {"two": 2}, "an empty disk gets all pins"

    asyncio.run(run())


@pytest.mark.parametrize("operation", ["list", "get", "put_stream", "put_new", "swap"])
@pytest.mark.parametrize("is_lost", [False, True])
def test_a_call_that_fails_or_whose_answer_is_lost_is_made_up_for(
    tmp_path: Path, operation: str, is_lost: bool
) -> None:
    async def scenario(a: FleetHost, b: FleetHost) -> None:
        await a.pin("one", 1)
        await agree(a, b)
        for host in (a, b):
            left = [2]

            def fault(found: str, key: str, left: list[int] = left) -> bool:
                left[0] -= found == operation
                return found == operation and left[0] >= 0

            host.store.lose, host.store.fail = (fault, host.store.fail) if is_lost else (host.store.lose, fault)
        await a.pin("one", 3)
        await b.pin("two", 2)
        for _ in range(8):
            for host in (a, b):
                try:
                    await host.sync.look()
                except RemoteUnavailableError:
                    continue
        assert a.pinned() == b.pinned() == {"one": 3, "two": 2}
        assert a.sync.num_conflicts == b.sync.num_conflicts == 0

    play(tmp_path, scenario)


@pytest.mark.parametrize("problem", [LedgerError("the disk is full"), asyncio.CancelledError()])
def test_an_unpin_stands_after_the_ledger_has_not_recorded_what_was_agreed(
    tmp_path: Path, problem: BaseException
) -> None:
    """The name counted as merged before the ledger had the base, was not merged again after the ledger refused (or a
    look before a pin took too long), and without a base the next unpin was taken back as one that this host lost."""

    async def scenario(a: FleetHost, b: FleetHost) -> None:
        ledger = a.cache.resources.ledger.shared
        put, problems = ledger.put, [problem]

        def failing(*args: Any) -> None:
            if problems:
                raise problems.pop()
            put(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ledger, "put", failing)
            await a.pin("support", 1)
            with pytest.raises(type(problem)):
                await a.sync.look()
        assert not problems
        await agree(a, b)
        assert b.pinned() == {"support": 1}
        await a.cache.pins.unpin("support")
        await agree(a, b)
        assert a.pinned() == b.pinned() == {}

    play(tmp_path, scenario)


def test_a_change_while_the_store_is_asked_is_not_overwritten(tmp_path: Path) -> None:
    async def scenario(a: FleetHost, b: FleetHost) -> None:
        await a.pin("support", 1)
        await agree(a, b)
        await a.pin("support", 2)
        await a.sync.look()
        looking = asyncio.create_task(b.sync.look())
        b.store.turns = 50
        await asyncio.sleep(0)
        await b.pin("support", 3)
        await looking
        await agree(b, a)
        await b.sync.look()
        assert a.pinned() == b.pinned()
        assert {2, 3} <= set(a.pinned().values())

    play(tmp_path, scenario)


@pytest.mark.parametrize("answer", ["comes", "is lost", "is cancelled", "is lost at a stop"])
@pytest.mark.parametrize("on_other_host", ["nothing", "an update", "another pin"])
@pytest.mark.parametrize("change", ["unpin", "replace", "pin again"])
def test_a_hosts_own_write_is_no_other_hosts_change(
    tmp_path: Path, change: str, on_other_host: str, answer: str
) -> None:
    """A host took its own push for another host's change if an operator changed the pin meanwhile: the host pinned
    again what was unpinned, unpinned what was pinned again, and set a replacement aside as a conflict."""

    async def change_on(host: FleetHost) -> None:
        if change == "unpin":
            await host.cache.pins.unpin("one")
        else:
            await host.pin("one", 3 if change == "replace" else 1)

    async def run() -> None:
        bucket = Bucket()
        async with AsyncExitStack() as stack:
            a, b = await two(stack, tmp_path, bucket)
            await a.pin("one", 1)
            await a.sync.look()
            if change == "pin again":
                await a.cache.pins.unpin("one")
            else:
                await a.pin("one", 2)
            seen = bucket.objects[manifest_key("one")][1]

            async def meanwhile(operation: str, key: str) -> None:
                if operation == "swap" and bucket.objects[key][1] != seen:
                    a.store.meanwhile = nothing
                    if answer != "is lost at a stop":
                        await change_on(a)
                    if answer == "is cancelled":
                        raise asyncio.CancelledError
                    a.store.down = answer != "comes"

            nothing, a.store.meanwhile = a.store.meanwhile, meanwhile
            a.store.lose = lambda operation, key: operation == "swap" and answer != "comes"
            with suppress(RemoteUnavailableError, asyncio.CancelledError):
                await a.sync.look()
            assert a.store.meanwhile is nothing
            if on_other_host != "nothing" and answer != "comes":
                await b.sync.look()
                if on_other_host == "another pin":
                    await b.pin("one", 4)
                elif change != "pin again":
                    await b.cache.pins.update(PinUpdate(name="one", priority=7))
                await b.sync.look()
        async with AsyncExitStack() as stack:
            a, b = await two(stack, tmp_path, bucket)
            if answer == "is lost at a stop":
                await change_on(a)
            await agree(a, b)
            await agree(a, b)
            assert a.pinned() == b.pinned()
            mine = {"unpin": [], "replace": [3], "pin again": [1]}[change]
            is_pinned_there = on_other_host == "another pin" and answer != "comes"
            assert sorted(a.pinned().values()) == sorted([*mine, *([4] if is_pinned_there else [])])
            assert a.sync.num_conflicts == (is_pinned_there and bool(mine))

    asyncio.run(run())


def test_an_own_write_that_arrives_late_is_no_other_hosts_change(tmp_path: Path) -> None:
    """A look that took too long was cancelled, and its request was on the way still."""

    async def run() -> None:
        bucket, sent = Bucket(), list[tuple[str, bytes]]()
        async with AsyncExitStack() as stack:
            a, b = await two(stack, tmp_path, bucket)
            await a.pin("one", 1)
            await agree(a, b)
            await a.cache.pins.unpin("one")

            async def late(key: str, data: bytes, replaces: Version) -> Version | None:
                sent.append((key, data))
                raise asyncio.CancelledError

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(a.store, "swap", late)
                with pytest.raises(asyncio.CancelledError):
                    await a.sync.look()
            await a.pin("one", 1)
            await a.sync.look()
            bucket.put(*sent.pop())
            await agree(a, b)
            assert a.pinned() == b.pinned() == {"one": 1}

    asyncio.run(run())


def test_a_damaged_manifest_is_reported_and_left(tmp_path: Path) -> None:
    async def run() -> None:
        bucket = Bucket()
        async with AsyncExitStack() as stack:
            a, b = await two(stack, tmp_path, bucket)
            await a.pin("one", 1)
            await agree(a, b)
            data = bytearray(bucket.objects[manifest_key("one")][0])
            data[len(data) // 2] ^= 1
            bucket.put(manifest_key("one"), bytes(data))
            await agree(a, b)
            assert a.pinned() == b.pinned() == {"one": 1}
            assert a.sync.has_unreadable
            await a.cache.pins.update(PinUpdate(name="one", priority=3))
            await agree(a, b)
            assert not a.sync.has_unreadable
            assert b.cache.prompts.get("one").priority == 3

    asyncio.run(run())


def damaged(data: bytes) -> bytes:
    changed = bytearray(data)
    changed[len(data) // 2] ^= 1
    return bytes(changed)


def of_a_newer_kvtier(data: bytes) -> bytes:
    """Return a manifest with one field that this kvtier does not know, and the checksum that belongs to it."""
    fields = json.loads(data) | {"weather": "fine"}
    del fields["kvtier.manifest"], fields["xxh3_64"]
    return manifests._encode({"kvtier.manifest": 1, "xxh3_64": manifests._checksum(fields), **fields})


UNREADABLE = pytest.mark.parametrize("spoil", [damaged, of_a_newer_kvtier])


@UNREADABLE
@pytest.mark.parametrize("has_listed", [True, False])
def test_a_name_whose_manifest_cannot_be_read_is_left_on_a_host_that_pins_it_too(
    tmp_path: Path, spoil: Callable[[bytes], bytes], has_listed: bool
) -> None:
    """It wrote the prompt four times a second, ten times each, for ever: a manifest was there, and not known."""

    async def run() -> None:
        bucket, key = Bucket(), manifest_key("one")
        async with AsyncExitStack() as stack:
            a, b = await two(stack, tmp_path, bucket)
            await a.pin("one", 1)
            await a.sync.look()
            whole = bucket.objects[key][0]
            bucket.put(key, spoil(whole))
            await b.pin("one", 2)
            await b.pin("two", 3)
            for lists in (has_listed, False, True):
                await b.sync.look(lists=lists)
            assert bucket.objects[key][0] == spoil(whole)
            assert b.pinned() == {"one": 2, "two": 3}
            assert b.sync.refused.keys() == {"one"}
            assert b.sync.is_shared("two")
            assert not b.sync.is_behind
            assert not b.sync.is_shared("one")
            assert b.store.calls["put_stream"] == 2 - has_listed, "besides that of `two` at most one: it did not know"
            bucket.put(key, whole)
            await agree(b, a)
            assert a.pinned() == b.pinned()
            assert sorted(b.pinned().values()) == [1, 2, 3]
            assert not b.sync.refused

    asyncio.run(run())


@UNREADABLE
def test_an_unreadable_manifest_is_replaced_by_an_operators_change_alone(
    tmp_path: Path, spoil: Callable[[bytes], bytes]
) -> None:
    """A start of any host that had the pin replaced it, and took back what others had changed."""

    async def run() -> None:
        bucket, key = Bucket(), manifest_key("one")
        async with AsyncExitStack() as stack:
            a, b = await two(stack, tmp_path, bucket)
            await a.pin("one", 1, ttl_s=3600, sliding=True)
            await agree(a, b)
            await a.cache.pins.update(PinUpdate(name="one", priority=5))
            await a.sync.look()
            unreadable = spoil(bucket.objects[key][0])
            bucket.put(key, unreadable)
            await a.sync.look()
        async with AsyncExitStack() as stack:
            a, b = await two(stack, tmp_path, bucket)
            await agree(b, a)
            assert bucket.objects[key][0] == unreadable, "a start changes nothing"
            row = b.cache.prompts.get("one")
            await b.cache.pins.extend(row, row.expires_unix_s + 5000, row.priority)
            await agree(b, a)
            assert bucket.objects[key][0] == unreadable, "nor does a use"
            assert a.sync.refused.keys() == b.sync.refused.keys() == {"one"}
            await a.cache.pins.update(PinUpdate(name="one", owner="team"))
            assert not a.sync.is_behind, "until the next look at what the store has"
            await agree(a, b)
            if spoil is of_a_newer_kvtier:
                assert bucket.objects[key][0] == unreadable, "nor does an older kvtier"
                return
            for host in (a, b):
                found = host.cache.prompts.get("one")
                assert (found.priority, found.owner, found.expires_unix_s) == (5, "team", row.expires_unix_s + 5000)
                assert not host.sync.has_unreadable
                assert not host.sync.refused

    asyncio.run(run())


def test_an_unpin_stands_though_the_manifest_was_unreadable_meanwhile(tmp_path: Path) -> None:
    async def run() -> None:
        bucket, key = Bucket(), manifest_key("one")
        async with AsyncExitStack() as stack:
            a, b = await two(stack, tmp_path, bucket)
            await a.pin("one", 1)
            await agree(a, b)
            whole = bucket.objects[key][0]
            bucket.put(key, damaged(whole))
            await agree(a, b)
            await b.cache.pins.unpin("one")
            await agree(a, b)
            assert (a.pinned(), b.pinned()) == ({"one": 1}, {})
            bucket.put(key, whole)
            await agree(a, b)
            assert a.pinned() == b.pinned() == {}

    asyncio.run(run())


def test_an_unreadable_manifest_that_was_deleted_is_written_again(tmp_path: Path) -> None:
    async def run() -> None:
        bucket, key = Bucket(), manifest_key("one")
        async with AsyncExitStack() as stack:
            a, b = await two(stack, tmp_path, bucket)
            await a.pin("one", 1)
            await agree(a, b)
            bucket.put(key, b"{}")
            await agree(a, b)
            del bucket.objects[key]
            await agree(a, b)
            assert a.pinned() == b.pinned() == {"one": 1}
            assert a.sync.is_shared("one")
            assert b.sync.is_shared("one")
            assert not a.sync.has_unreadable

    asyncio.run(run())


def test_content_is_written_once_though_another_host_was_faster(tmp_path: Path) -> None:
    async def run() -> None:
        bucket = Bucket()
        async with AsyncExitStack() as stack:
            a, b = await two(stack, tmp_path, bucket)
            await a.pin("one", 1)
            await a.sync.look()
            await a.cache.pins.unpin("one")
            await a.sync.look()
            await b.pin("one", 2)
            await b.sync.look(lists=False)
            assert b.store.calls["put_stream"] == 1
            assert b.stored()["one"].prompt in bucket.objects
            assert sum(key.startswith(PROMPTS) for key in bucket.objects) == 2, "that of each host"
            await agree(a, b)
            assert a.pinned() == b.pinned() == {"one": 2}

    asyncio.run(run())


@pytest.mark.parametrize("num_spoiled", [1, 2, 5])
def test_a_manifest_that_is_spoiled_on_its_way_is_read_again(tmp_path: Path, num_spoiled: int) -> None:
    """It counted as damaged as long as its version stayed: the pin never came, and a change here replaced it."""

    async def run() -> None:
        async with AsyncExitStack() as stack:
            a, b = await two(stack, tmp_path, Bucket())
            await a.pin("one", 1)
            await a.sync.look()
            left = [num_spoiled]

            def spoil(key: str, data: bytes) -> bytes:
                left[0] -= key == manifest_key("one")
                return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:] if left[0] >= 0 else data

            b.store.spoil = spoil
            await b.sync.look()
            assert b.sync.has_unreadable == (num_spoiled > 3)
            await b.sync.look()
            assert not b.sync.has_unreadable
            assert b.pinned() == {"one": 1}

    asyncio.run(run())


def test_versions_of_a_pin_are_known_to_the_fleet(tmp_path: Path) -> None:
    async def scenario(a: FleetHost, b: FleetHost) -> None:
        for content in range(1, 7):
            await a.pin("support", content)
            await agree(a, b)
        manifest = b.sync.manifest("support")
        assert manifest is not None
        assert manifest.number == 6
        assert [each.number for each in manifest.versions] == [3, 4, 5]
        await b.pin("support", 4)
        await agree(b, a)
        again = a.sync.manifest("support")
        assert again is not None
        assert again.prompt == manifest.versions[1].prompt, "its content is in the store already"
        assert tokens_of(4) == list(a.cache.prompts.get("support").tokens)

    play(tmp_path, scenario)


def test_a_renamed_pin_and_one_that_was_unpinned_and_forgotten_do_not_come_back(tmp_path: Path) -> None:
    async def scenario(a: FleetHost, b: FleetHost) -> None:
        await a.pin("old", 1)
        await a.pin("gone", 2)
        await agree(a, b)
        await a.cache.renames.rename("old", "new")
        await a.cache.pins.unpin("gone")
        await a.cache.evictions.evict("gone", force=False)
        await agree(a, b)
        await a.sync.look()
        assert a.pinned() == b.pinned() == {"new": 1}
        assert not a.sync.is_behind

    play(tmp_path, scenario)


def test_a_pin_that_is_forgotten_after_its_content_was_lost_ends_everywhere(tmp_path: Path) -> None:
    """The host wanted to write the content again, which it had no longer: an AssertionError at each look, so that this
    host shared nothing from then on."""

    async def run() -> None:
        bucket = Bucket()
        async with AsyncExitStack() as stack:
            a, b = await two(stack, tmp_path, bucket)
            await a.pin("support", 1)
            await a.sync.look()
            del bucket.objects[a.stored()["support"].prompt]
            await b.sync.look()
            await a.cache.pins.unpin("support")
            await a.cache.evictions.evict("support", force=False)
            await a.pin("other", 2)
            await agree(a, b)
            assert a.pinned() == b.pinned() == {"other": 2}
            assert not b.stored()["support"].pinned
            assert not a.sync.is_behind
            await b.pin("support", 1)
            await agree(b, a)
            assert a.pinned() == b.pinned() == {"other": 2, "support": 1}

    asyncio.run(run())


@pytest.mark.parametrize("num_starts", [1, 2])
def test_a_pin_that_was_renamed_or_forgotten_while_the_store_was_away_does_not_come_back_by_a_start(
    tmp_path: Path, num_starts: int
) -> None:
    """Nothing was left of them but what the store said, so the next start took them for lost, and pinned them again."""

    async def run() -> None:
        bucket = Bucket()
        async with AsyncExitStack() as stack:
            a, b = await two(stack, tmp_path, bucket)
            for number, name in enumerate(("old", "gone", "again")):
                await a.pin(name, number)
            await agree(a, b)
            a.store.down = True
            await a.cache.renames.rename("old", "new")
            for name in ("gone", "again"):
                await a.cache.pins.unpin(name, forget=True)
            with pytest.raises(RemoteUnavailableError):
                await a.sync.look()
            await a.pin("again", 2)
        for number in range(num_starts):
            async with AsyncExitStack() as stack:
                a, b = await two(stack, tmp_path, bucket)
                a.store.down = number + 1 < num_starts
                with suppress(RemoteUnavailableError):
                    await a.sync.look()
                await agree(b)
                if not a.store.down:
                    await agree(a, b)
                    assert a.pinned() == b.pinned() == {"new": 0, "again": 2}
        with closing(sqlite3.connect(tmp_path / "a" / "disk" / "ledger.sqlite")) as ledger:
            ledger.execute("DELETE FROM prompts")
            ledger.commit()
        for path in (tmp_path / "a" / "disk" / "promises").iterdir():
            path.unlink()
        async with AsyncExitStack() as stack:
            a, b = await two(stack, tmp_path, bucket)
            await agree(a, b)
            assert a.pinned() == b.pinned() == {"new": 0, "again": 2}, "what is lost is no end"

    asyncio.run(run())


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("then", ["evicted", "unpinned", "applied", "nothing"])
def test_a_pin_that_ended_by_its_ttl_ends_for_others_by_an_unpin_alone(
    tmp_path: Path, then: str, is_restarted: bool
) -> None:
    """To evict its chunks ended it for the host that used it, and to unpin it was taken for no word at all."""

    async def run() -> None:
        now_s, bucket = [1_000_000.0], Bucket(clock=lambda: now_s[0])
        async with AsyncExitStack() as stack:
            a, b = await two(stack, tmp_path, bucket)
            made = await a.pin("sliding", 1, ttl_s=3600, sliding=True)
            await agree(a, b)
            await b.cache.pins.extend(b.cache.prompts.get("sliding"), made.expires_unix_s + 5000, 0)
            await b.sync.look()
            now_s[0] = made.expires_unix_s + 1
            await a.cache.pins.unpin_now(a.cache.prompts.get("sliding"), by_ttl=True)  # as Expiry does
            if then == "evicted":
                await a.cache.evictions.evict_all(force=False)
                assert a.cache.prompts.find("sliding") is None
            elif then == "unpinned":
                await a.cache.pins.unpin("sliding")
            elif then == "applied":
                await a.cache.pins.apply([], ["sliding"])
            if not is_restarted:
                await agree(a, b)
                assert a.pinned() == b.pinned() == ({} if then in ("unpinned", "applied") else {"sliding": 1})
        async with AsyncExitStack() as stack:
            a, b = await two(stack, tmp_path, bucket)
            await agree(a, b)
            assert a.pinned() == b.pinned() == ({} if then in ("unpinned", "applied") else {"sliding": 1})

    asyncio.run(run())


def test_a_kill_straight_after_a_pin_was_renamed_or_forgotten_brings_none_back(tmp_path: Path) -> None:
    """It was noted up to a second later, after the operator had the answer."""

    async def run() -> None:
        bucket = Bucket()
        async with AsyncExitStack() as stack:
            a, b = await two(stack, tmp_path, bucket)
            for number, name in enumerate(("old", "gone", "again", "ended")):
                await a.pin(name, number)
            await a.cache.pins.unpin("ended")
            await agree(a, b)
            await a.cache.renames.rename("old", "new")
            for name in ("gone", "again"):
                await a.cache.pins.unpin(name, forget=True)
            await a.cache.evictions.evict("ended", force=False)
            await a.pin("again", 2)
        async with AsyncExitStack() as stack:
            a, b = await two(stack, tmp_path, bucket)
            await agree(a, b)
            assert a.pinned() == b.pinned() == {"new": 0, "again": 2}
            assert not a.sync.is_behind

    asyncio.run(run())


def test_what_is_agreed_on_while_a_pin_is_forgotten_does_not_bring_it_back_by_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row was gone and noted as ended, the pin not yet forgotten in memory: what was agreed replaced the note."""

    async def run() -> None:
        bucket = Bucket()
        async with AsyncExitStack() as stack:
            a, b = await two(stack, tmp_path, bucket)
            await a.pin("one", 1)
            await agree(a, b)
            forgotten = a.cache.pins.forgotten

            async def agree_first(*args: Any, **how: Any) -> Any:
                await a.sync._agree(["one"])
                return await forgotten(*args, **how)

            monkeypatch.setattr(a.cache.pins, "forgotten", agree_first)
            await a.cache.pins.unpin("one", forget=True)
        async with AsyncExitStack() as stack:
            a, b = await two(stack, tmp_path, bucket)
            await agree(a, b)
            assert a.pinned() == b.pinned() == {}

    asyncio.run(run())


@pytest.mark.parametrize("num_looks", [0, 1, 2])
@pytest.mark.parametrize("has_arrived", [True, False])
@pytest.mark.parametrize("was_pinned_before", [True, False])
def test_a_pin_that_was_forgotten_before_its_push_was_answered_does_not_come_back_by_a_start(
    tmp_path: Path, was_pinned_before: bool, has_arrived: bool, num_looks: int
) -> None:
    """The two sides had never agreed on it, so nothing was noted: the next start took it for another host's pin."""

    async def run() -> None:
        bucket = Bucket()
        async with AsyncExitStack() as stack:
            a, b = await two(stack, tmp_path, bucket)
            await a.pin("other", 2)
            if was_pinned_before:
                await a.pin("one", 1)
                await agree(a, b)
                await a.cache.pins.unpin("one")
            await agree(a, b)
            await a.pin("one", 1)
            before = bucket.objects.get(manifest_key("one"))

            async def cut_off(operation: str, key: str) -> None:
                is_push = operation in ("put_new", "swap") and key == manifest_key("one")
                if is_push and has_arrived == (bucket.objects.get(key) is not before):
                    raise RemoteUnavailableError(a.store.url, operation, "the test says so")

            a.store.meanwhile = cut_off
            with pytest.raises(RemoteUnavailableError):
                await a.sync.look()
            await a.cache.pins.unpin("one", forget=True)
            a.store.down = True
            for _ in range(num_looks):
                with pytest.raises(RemoteUnavailableError):
                    await a.sync.look()
        async with AsyncExitStack() as stack:
            a, b = await two(stack, tmp_path, bucket)
            await agree(b)
            assert b.pinned() == {"other": 2} | ({"one": 1} if has_arrived else {})
            await agree(a, b)
            assert a.pinned() == b.pinned() == {"other": 2}
            await b.pin("one", 3)
            await agree(b, a)
            assert a.pinned() == b.pinned() == {"other": 2, "one": 3}, "another host's pin is one"

    asyncio.run(run())


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("is_pinned_again", [False, True])
@pytest.mark.parametrize("was_pinned_before", [True, False])
def test_a_push_that_arrives_after_its_pin_was_forgotten_does_not_bring_it_back(
    tmp_path: Path, was_pinned_before: bool, is_pinned_again: bool, is_restarted: bool
) -> None:
    """A look that did not find it yet took both sides for the same, and the next one took it for another host's pin."""

    bucket, on_its_way = Bucket(), list[tuple[Any, ...]]()
    write = "swap" if was_pinned_before else "put_new"

    async def cut_off(*sent: Any) -> Version | None:
        on_its_way.append(sent)
        raise RemoteUnavailableError("memory://fleet", write, "the test says so")

    async def run() -> None:
        async with AsyncExitStack() as stack:
            a, b = await two(stack, tmp_path, bucket)
            if was_pinned_before:
                await a.pin("one", 1)
                await agree(a, b)
                await a.cache.pins.unpin("one")
                await agree(a, b)
            await a.pin("one", 1)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(a.store, write, cut_off)
                with pytest.raises(RemoteUnavailableError):
                    await a.sync.look()
            await a.cache.pins.unpin("one", forget=True)
            await agree(a, b)
            assert not a.sync.is_behind, "nothing is left to do until it arrives"
            if not is_restarted:
                await arrive(a, b)
        if is_restarted:
            async with AsyncExitStack() as stack:
                await arrive(*await two(stack, tmp_path, bucket))

    async def arrive(a: FleetHost, b: FleetHost) -> None:
        if is_pinned_again:
            await a.pin("one", 3)
        assert await getattr(a.store, write)(*on_its_way[0]) is not None
        await agree(b, a, b)
        assert a.pinned() == b.pinned() == ({"one": 3} if is_pinned_again else {})
        await b.pin("one", 4)
        await agree(b, a)
        assert a.pinned() == b.pinned() == {"one": 4}, "another host's pin is one"

    asyncio.run(run())


def test_nothing_is_kept_of_a_prompt_that_was_forgotten(tmp_path: Path) -> None:
    """Its tokens stayed in memory until the next start: LMCache's pins get a new name with each change of them."""

    async def scenario(a: FleetHost, b: FleetHost) -> None:
        rows = [weakref.ref(await a.pin("support", 1))]
        await agree(a, b)
        rows.append(weakref.ref(b.cache.prompts.get("support")))
        await a.cache.pins.unpin("support", forget=True)
        await agree(a, b)
        await b.cache.evictions.evict("support", force=False)
        await b.sync.look()
        gc.collect()
        assert [row() for row in rows] == [None, None]

    play(tmp_path, scenario)


def test_a_pin_that_was_changed_here_is_not_shared_before_the_store_knows(tmp_path: Path) -> None:
    """`kvtier remote` said that no pin waits, while all changes of an outage did."""

    async def scenario(a: FleetHost, b: FleetHost) -> None:
        await a.pin("support", 1)
        await agree(a, b)
        a.store.down = True
        await a.cache.pins.update(PinUpdate(name="support", priority=7))
        with pytest.raises(RemoteUnavailableError):
            await a.sync.look()
        assert not a.sync.is_shared("support")
        a.store.down = False
        await a.sync.look()
        assert a.sync.is_shared("support")

    play(tmp_path, scenario)
