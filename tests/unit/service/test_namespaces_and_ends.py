"""Which namespaces are opened, recorded and forgotten; what attaching, confirming and ending a session leaves."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvtier.core.fingerprint import namespace_id
from kvtier.errors import ArenaFullError, DrainingError, InvalidArgumentError, LedgerError, NamespaceMismatchError
from kvtier.ledger import Ledger
from kvtier.ledger.rows import BindingRow
from kvtier.prompts.book import RequestedPin
from kvtier.service import cache as cache_module
from kvtier.service import namespace_registry
from kvtier.sessions.session import SessionEnd
from kvtier.tiering.capacity import STALE_S
from kvtier.tiering.namespace import Namespace
from tests.fakes.clocks import at_rest
from tests.fakes.gates import failing
from tests.fakes.rig import ListPeer, Rig, at_once, eventually, hello_of, keys_of, rig
from tests.fakes.scripted_engine import ONE_GROUP, chunk_key, host_bytes_for

WIDER = replace(ONE_GROUP, rank_bytes=2 * ONE_GROUP.rank_bytes)


def scenario(folder: Path, run: Callable[[Rig], Awaitable[None]], **settings: Any) -> None:
    async def all_of_it() -> None:
        async with rig(folder, **settings) as r:
            await run(r)

    asyncio.run(all_of_it())


async def ended(r: Rig, how: SessionEnd = SessionEnd.CLOSED) -> None:
    """End every session, and wait until nothing of them is left."""
    for session in r.cache.sessions:
        r.cache.end(session, how)
    await eventually(lambda: not r.cache.sessions)


def aged(namespace: Namespace, by_s: float) -> None:
    namespace.row = replace(namespace.row, seen_unix_s=time.time() - by_s)
    namespace.idle_since_s = time.monotonic() - by_s


# Opening


def test_an_engine_gets_the_namespace_of_its_fingerprint_with_its_first_name(tmp_path: Path) -> None:
    async def run(r: Rig) -> None:
        hello = replace(hello_of("other", weights="2"), model_names=("served", "typed"))
        opened = r.cache.registry.open_for(hello)
        assert opened is not r.namespace
        assert opened.namespace_id == namespace_id(hello.fingerprint)
        assert (opened.row.model, opened.ephemeral) == ("served", False)
        assert opened.row.created_unix_s == opened.row.seen_unix_s <= time.time()
        assert r.cache.registry.open_for(hello) is opened
        assert r.cache.registry.open_for(hello_of("again")) is r.namespace

    scenario(tmp_path, run)


@pytest.mark.parametrize(
    ("change", "why"), [({"layout": WIDER}, "has another layout"), ({"ephemeral": True}, "is not ephemeral")]
)
def test_an_engine_that_differs_in_what_the_fingerprint_does_not_say_is_refused(
    tmp_path: Path, change: dict[str, Any], why: str
) -> None:
    async def run(r: Rig) -> None:
        with pytest.raises(NamespaceMismatchError, match=why):
            await r.cache.attach(replace(hello_of("differs"), **change), ListPeer())
        assert len(r.cache.namespaces) == 1
        assert r.namespace.attaching is False

    scenario(tmp_path, run)


def test_an_ephemeral_namespace_is_not_shared_and_goes_with_its_last_session(tmp_path: Path) -> None:
    async def run(r: Rig) -> None:
        hello = replace(hello_of("e", weights="2"), ephemeral=True)
        first, second = [await r.cache.attach(hello, ListPeer()) for _ in range(2)]
        with pytest.raises(NamespaceMismatchError, match="is ephemeral"):
            await r.cache.attach(replace(hello, ephemeral=False), ListPeer())
        r.cache.end(first)
        await eventually(lambda: first not in r.cache.sessions)
        assert second.namespace_id in r.cache.namespaces
        r.cache.end(second)
        await eventually(lambda: second.namespace_id not in r.cache.namespaces)
        rows = (await r.resources.in_ledger(r.resources.ledger.load)).namespaces
        assert [row.namespace_id for row in rows] == [r.namespace.namespace_id]

    scenario(tmp_path, run)


def test_a_refused_engine_leaves_no_namespace_and_an_attached_one_is_recorded(tmp_path: Path) -> None:
    async def run(r: Rig) -> None:
        huge = replace(ONE_GROUP, rank_bytes=1 << 40)
        with pytest.raises(ArenaFullError, match=r"raise host\.bytes"):
            await r.cache.attach(hello_of("huge", huge, weights="2"), ListPeer())
        assert list(r.cache.namespaces) == [r.namespace.namespace_id]
        assert r.counters.sessions_opened == 1
        await r.cache.attach(hello_of("other", weights="3"), ListPeer())
        rows = (await r.resources.in_ledger(r.resources.ledger.load)).namespaces
        assert {row.namespace_id for row in rows} == set(r.cache.namespaces)
        assert r.counters.sessions_opened == 2

    scenario(tmp_path, run)


def test_a_daemon_that_stops_takes_no_engine(tmp_path: Path) -> None:
    async def run(r: Rig) -> None:
        await r.cache.close()
        with pytest.raises(DrainingError):
            await r.cache.attach(hello_of("late"), ListPeer())

    scenario(tmp_path, run)


# Forgetting


def _binding(pin_id: str, namespace: Namespace) -> BindingRow:
    return BindingRow(pin_id=pin_id, namespace_id=namespace.namespace_id, keys=(chunk_key(1),), covered_tokens=3)


@pytest.mark.parametrize("reason", ["session", "chunk", "recent", "prompt", "recovering", "replaced", None])
def test_a_namespace_is_forgotten_only_when_nothing_speaks_for_it(tmp_path: Path, reason: str | None) -> None:
    async def run(r: Rig) -> None:
        namespace, registry = r.namespace, r.cache.registry
        if reason != "session":
            await ended(r)
        aged(namespace, STALE_S - 60 if reason == "recent" else STALE_S + 60)
        if reason == "chunk":
            await r.on_disk([1])
        elif reason == "prompt":
            await r.cache.pins.pin(RequestedPin(name="p", tokens=(1, 2, 3)))
            pin_id = next(iter(r.cache.prompts)).pin_id
            r.cache.prompts.bind(_binding(pin_id, namespace))
        elif reason == "recovering":
            namespace.host.recovering = True
        elif reason == "replaced":
            assert registry._is_over(namespace) is True
            registry.by_id[namespace.namespace_id] = Namespace.__new__(Namespace)
        assert registry._is_over(namespace) is (reason is None)
        registry.by_id[namespace.namespace_id] = namespace
        if reason != "replaced":
            await registry.forget_empty()
            assert (namespace.namespace_id in r.cache.namespaces) is (reason is not None)
        namespace.host.recovering = False

    scenario(tmp_path, run)


@pytest.mark.parametrize(
    "reason",
    ["chunk", "recent", "other model", "reset in place", "restarted", "quarantined", "renamed", "attaching", None],
)
def test_prompts_do_not_keep_a_namespace_whose_model_is_served_in_another(tmp_path: Path, reason: str | None) -> None:
    """After each update one more stayed, with rows that every start read."""

    async def run(r: Rig) -> None:
        await r.cache.pins.pin(RequestedPin(name="p", tokens=(1, 2, 3)))
        pin_id = next(iter(r.cache.prompts)).pin_id
        await r.cache.bindings.bind(r.cache.sessions[0], pin_id, keys_of([1]), 3, "")
        await ended(r)
        aged(r.namespace, STALE_S - 60 if reason == "recent" else STALE_S + 60)
        if reason == "chunk":
            await r.on_disk([1])
        names = ("other",) if reason == "other model" else ("model",)
        if reason == "renamed":  # its engine was called otherwise at last
            r.namespace.row = replace(r.namespace.row, model="weekend")
        r.namespace.attaching = reason == "attaching"
        if reason == "restarted":
            r.namespace.idle_since_s = time.monotonic()  # the ledger knows when an engine came, not when it went
        hello = replace(hello_of("after", weights="2"), model_names=names, ephemeral=reason == "reset in place")
        after = await r.cache.attach(hello, ListPeer())
        if reason == "quarantined":
            await r.cache.quarantines.begin(after.namespace_id, "wrong answers")
        await r.cache.registry.forget_empty()
        r.namespace.attaching = False
        is_kept = r.namespace.namespace_id in r.cache.namespaces
        assert is_kept is (reason is not None)
        assert bool(r.cache.prompts.bindings_of(pin_id)) is is_kept
        await r.cache.pins.unpin("p")

    scenario(tmp_path, run)


def test_what_is_forgotten_is_out_of_the_ledger_and_ends(tmp_path: Path) -> None:
    async def run(r: Rig) -> None:
        await ended(r)
        aged(r.namespace, STALE_S + 60)
        await r.cache.registry.forget_empty()
        assert not (await r.resources.in_ledger(r.resources.ledger.load)).namespaces
        assert r.cache.registry.ending == []
        assert r.namespace.host.is_open is False
        assert r.resources.budget.used_bytes == 0

    scenario(tmp_path, run)


def test_a_ledger_that_refuses_to_forget_is_asked_again_after_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was asked four times a second, with an error in the log each time, as long as the disk was full."""

    async def run(r: Rig) -> None:
        await ended(r)
        aged(r.namespace, STALE_S + 60)
        failing(monkeypatch, Ledger, "delete_namespace", lambda: LedgerError("disk is full"), times=3)
        for _ in range(3):
            await r.cache.registry.forget_empty()
        assert [record.message for record in caplog.records].count("namespace_not_forgotten") == 1
        monkeypatch.setattr(namespace_registry, "RETRY_S", 0.0)
        r.cache.registry._forget_at_s = 0.0
        for _ in range(3):
            await r.cache.registry.forget_empty()
        assert not r.cache.namespaces

    scenario(tmp_path, run)


def test_a_quota_that_refuses_anything_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(r: Rig) -> None:
        registry, retried = r.cache.registry, list[str]()
        assert registry.is_any_refused() is False
        monkeypatch.setattr(r.namespace.write_back, "retry_refused", lambda: retried.append("retried"))
        registry.retry_refused()
        assert retried == ["retried"]
        assert registry.all_tiers() == [r.namespace.tiers]
        monkeypatch.setattr(type(r.namespace.write_back.queue), "num_refused", property(lambda queue: 1))
        assert registry.is_any_refused() is True

    scenario(tmp_path, run)


# Arenas


@pytest.mark.parametrize(("num_missing", "fits"), [(0, True), (1, False)])
def test_an_arena_for_prefetching_needs_its_slot_table_and_one_row(
    tmp_path: Path, num_missing: int, fits: bool
) -> None:
    async def run(r: Rig) -> None:
        namespace = r.cache.registry.open_for(hello_of("other", weights="2"))
        needed = namespace.host.needed_bytes + namespace.layout.row_bytes
        r.resources.budget.limit_bytes = r.resources.budget.used_bytes + needed - num_missing
        assert r.cache.arenas.open_if_it_fits(namespace) is fits
        assert namespace.host.is_open is fits
        assert r.cache.arenas.open_if_it_fits(r.namespace) is True, "it has one"

    scenario(tmp_path, run)


@pytest.mark.parametrize(("max_open", "fits"), [(2, True), (1, False)])
def test_an_arena_for_prefetching_needs_descriptors(tmp_path: Path, max_open: int, fits: bool) -> None:
    async def run(r: Rig) -> None:
        namespace = r.cache.registry.open_for(hello_of("other", weights="2"))
        r.cache.arenas.max_open = max_open
        assert r.cache.arenas.num_open == 1
        assert r.cache.arenas.open_if_it_fits(namespace) is fits
        assert r.cache.arenas.num_open == 1 + fits

    scenario(tmp_path, run, host_bytes=host_bytes_for(40))


def test_only_idle_arenas_without_pages_are_closed_in_the_background(tmp_path: Path) -> None:
    async def run(r: Rig) -> None:
        await r.cache.arenas.close_empty()
        assert r.namespace.host.is_open, "an engine uses it"
        (key,) = r.in_host([1])
        await ended(r)
        r.namespace.promoter._prefetched.set()
        await r.cache.arenas.close_empty()
        assert r.namespace.host.is_open, "a row has pages"
        r.table.host.evict_when_unprotected(key)
        r.namespace.host.reclaim(1 << 40)
        r.namespace.promoter._prefetched.clear()
        await r.cache.arenas.close_empty()
        assert r.namespace.host.is_open, "it may be about to be filled"
        r.namespace.promoter._prefetched.set()
        await r.cache.arenas.close_empty()
        await at_rest(r.resources)
        assert (r.namespace.host.is_open, r.cache.arenas.num_open, r.resources.budget.used_bytes) == (False, 0, 0)

    scenario(tmp_path, run)


# Sessions of the cache


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("how", SessionEnd)
def test_ends_are_counted_by_how_and_lost_only_in_the_middle(tmp_path: Path, how: SessionEnd, busy: bool) -> None:
    async def run(r: Rig) -> None:
        session, _ = await r.session()
        if busy:
            at_once(session.loads.acquire(1, r.in_host([1])))
        r.cache.end(session, how)
        r.cache.end(session, how)
        counters = r.counters
        counts = {
            SessionEnd.CLOSED: counters.sessions_ended_closed,
            SessionEnd.GONE: counters.sessions_ended_gone,
            SessionEnd.CUT: counters.sessions_ended_cut,
            SessionEnd.REFUSED: counters.sessions_ended_refused,
            SessionEnd.DRAINED: counters.sessions_ended_drained,
        }
        assert counts == {each: int(each is how) for each in SessionEnd}
        assert counters.sessions_lost == (busy and how in (SessionEnd.CUT, SessionEnd.REFUSED))
        assert session in r.cache.sessions
        assert session not in r.cache.live_sessions
        await eventually(lambda: session not in r.cache.sessions)
        assert session not in r.namespace.sessions
        await at_rest(r.resources)
        assert session.loads.num_leases == 0

    scenario(tmp_path, run)


def test_the_end_of_a_session_is_when_its_namespace_was_last_seen(tmp_path: Path) -> None:
    async def run(r: Rig) -> None:
        aged(r.namespace, 1000)
        began_unix_s = time.time()
        await ended(r)
        assert r.namespace.row.seen_unix_s >= began_unix_s

    scenario(tmp_path, run)


def test_paths_that_engines_use_are_those_of_arenas_and_live_sessions(tmp_path: Path) -> None:
    async def run(r: Rig) -> None:
        session, _ = await r.session()
        (first,) = (each for each in r.cache.sessions if each is not session)
        arena = r.namespace.host.arena.path
        assert r.cache.shared_files == [arena, first.lock.path, session.lock.path]
        r.cache.end(first)
        assert r.cache.shared_files == [arena, session.lock.path]

    scenario(tmp_path, run)


@pytest.mark.parametrize("differs", ["holds itself", "empty", "another model", "yes"])
def test_an_empty_namespace_is_explained_by_others_of_its_model_that_hold_something(
    tmp_path: Path, differs: str
) -> None:
    async def run(r: Rig) -> None:
        if differs != "empty":
            await r.on_disk([1])
        names = ("elsewhere",) if differs == "another model" else ("typed", "model")
        session = await r.cache.attach(replace(hello_of("new", weights="2"), model_names=names), ListPeer())
        if differs == "holds itself":
            session.namespace.table.place(chunk_key(3), r.location(1))  # type: ignore[arg-type]
        found = r.cache.differing_namespaces(session)
        assert found == ([(r.namespace, ["weights"])] if differs == "yes" else [])
        if differs == "holds itself":
            session.namespace.table.unplace(chunk_key(3))

    scenario(tmp_path, run)


# Bindings


def test_a_binding_counts_pins_once_and_an_error_takes_it_back(tmp_path: Path) -> None:
    async def run(r: Rig) -> None:
        session, peer = await r.session()
        await r.cache.pins.pin(RequestedPin(name="p", tokens=tuple(range(10))))
        pin_id = next(iter(r.cache.prompts)).pin_id
        await r.cache.bindings.bind(session, pin_id, keys_of([1, 2]), 8, "")
        await r.cache.bindings.bind(session, pin_id, keys_of([2, 3]), 8, "")
        assert [r.table.get(chunk_key(number)) is not None for number in (1, 2, 3)] == [False, True, True]
        assert [r.chunk(number).num_pins for number in (2, 3)] == [1, 1]
        assert session.bound == {pin_id}
        assert peer.held == {chunk_key(number): False for number in (1, 2, 3)}
        await r.cache.bindings.bind(session, pin_id, (), 0, "cannot")
        assert (session.bound, session.bind_errors) == (set(), {pin_id: "cannot"})
        await r.cache.confirm(session, [pin_id, pin_id, "unknown"])
        assert (session.bound, session.bind_errors) == ({pin_id}, {})
        await r.cache.bindings.bind(session, "unknown", keys_of([7]), 1, "")
        assert r.table.get(chunk_key(7)) is None

    scenario(tmp_path, run)


@pytest.mark.parametrize(("covered", "is_right"), [(0, False), (1, True), (10, True), (11, False)])
def test_a_binding_covers_one_token_at_least_and_the_prompt_at_most(
    tmp_path: Path, covered: int, is_right: bool
) -> None:
    async def run(r: Rig) -> None:
        session, _ = await r.session()
        await r.cache.pins.pin(RequestedPin(name="p", tokens=tuple(range(10))))
        pin_id = next(iter(r.cache.prompts)).pin_id
        if is_right:
            await r.cache.bindings.bind(session, pin_id, keys_of([1]), covered, "")
        else:
            with pytest.raises(InvalidArgumentError, match=r"bind_pin\.covered_tokens"):
                await r.cache.bindings.bind(session, pin_id, keys_of([1]), covered, "")
        assert session.bound == ({pin_id} if is_right else set())

    scenario(tmp_path, run)


@pytest.mark.parametrize("lora_name", ["", "adapter"])
def test_a_known_pin_brings_its_keys_unless_an_adapter_is_in_them(tmp_path: Path, lora_name: str) -> None:
    async def run(r: Rig) -> None:
        session, _ = await r.session()
        wanted = RequestedPin(name="p", tokens=tuple(range(10)), lora_name=lora_name, lora_path=lora_name)
        await r.cache.pins.pin(wanted)
        pin_id = next(iter(r.cache.prompts)).pin_id
        assert r.cache.known_pin(session, "unknown") is None
        await r.cache.bindings.bind(session, pin_id, keys_of([1, 2]), 8, "")
        known = r.cache.known_pin(session, pin_id)
        assert known is not None
        assert tuple(known.keys) == (() if lora_name else tuple(keys_of([1, 2])))
        assert known.prompt.name == "p"

    scenario(tmp_path, run)


def test_confirmed_pins_are_said_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "SLICE_KEYS", 2)

    async def run(r: Rig) -> None:
        session, peer = await r.session()
        for number in range(3):
            await r.cache.pins.pin(RequestedPin(name=f"p{number}", tokens=(number, 1, 2)))
            pin_id = r.cache.prompts.get(f"p{number}").pin_id
            await r.cache.bindings.bind(session, pin_id, keys_of([number]), 3, "")
        peer.held.clear()
        peer.words.clear()
        await r.cache.confirm(session, [prompt.pin_id for prompt in r.cache.prompts])
        assert peer.held == {chunk_key(number): False for number in range(3)}
        assert len(peer.words) == 3, "each key once"

    scenario(tmp_path, run)
