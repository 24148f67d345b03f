"""A caller with an owner, where engines or other hosts are in it too: advice, requests, bundles, the shared store."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import grpc
import pytest

from kvtier import Client, RequestOutcome
from kvtier._pb import cache_pb2 as pb
from kvtier._pb import cache_pb2_grpc, engine_pb2
from kvtier.access.caller import Caller, Door, Role, acting_for
from kvtier.config import DaemonConfig
from kvtier.config.model import OwnerQuota, OwnersConfig, RemoteConfig
from kvtier.discovery import auto_pins
from kvtier.errors import ForbiddenError, PromptNotFoundError, RequestNotFoundError
from kvtier.rpc import convert
from tests.fakes.scripted_engine import DEADLINE_S, ScriptedEngine, chunk_key, config_in
from tests.fakes.tcp_daemon import TcpDaemon, bearer, serving
from tests.fakes.waiting import wait_for
from tests.unit.service.test_auto_pins import ask, auto_config, send_tokens, tokens_of

OWNERS = ("a", "b")


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[TcpDaemon]:
    """Have a prompt of each owner, and one of no one."""
    with serving(tmp_path, config=auto_config(tmp_path)) as running:
        for owner in OWNERS:
            running.local.pin(f"of-{owner}", tokens=tokens_of(owner), model="model", owner=owner)
        running.local.pin("of-none", tokens=tokens_of("none"), model="model")
        yield running


def owned(daemon: TcpDaemon, owner: str, role: str = "operator") -> Client:
    return daemon.client(daemon.token(f"{role}-{owner}", role, owner=owner))


# Advice


def test_advice_is_about_its_own_prompts(daemon: TcpDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_pins, "SLOW_POLL_S", 0.02)

    async def scenario() -> None:
        async with ScriptedEngine(daemon.config) as engine:
            # Before the counts are loaded, requests are not counted.
            await asyncio.to_thread(wait_for, lambda: bool(daemon.local.advise().namespaces), DEADLINE_S)
            for owner, num_requests in (("b", 9), ("a", 4)):
                await ask(engine, owner, num_requests)
                await send_tokens(engine, owner)
            await ask(engine, "other", 6)
            await send_tokens(engine, "other")
            await engine.receive("pin_added")
            place = engine_pb2.ChangingMiddle(
                num_stable_tokens=40, num_tokens=64, num_prompts=9, before="Dear", examples=["Ann", "Bob"]
            )
            await engine.send(changing_middle=place)
            await engine.barrier()

    daemon.run(scenario())
    (whole,) = daemon.local.advise().namespaces
    automatic = next(prompt.name for prompt in daemon.local.list() if prompt.origin == "auto")
    assert {each.pin_name for each in whole.prefixes} == {"of-a", "of-b", automatic}
    assert whole.places
    assert whole.requests_per_hour
    for role, text in (("operator", ("Dear", ("Ann", "Bob"))), ("viewer", ("", ()))):
        (shown,) = daemon.client(daemon.token(role, role)).advise().namespaces
        assert [(each.before, each.examples) for each in shown.places] == [text], "a viewer sees no text of prompts"
        assert [each.num_prompts for each in shown.places] == [9]

    monkeypatch.setattr(convert, "MAX_ADVISED", 1)
    for owner in OWNERS:
        (shown,) = owned(daemon, owner, "viewer").advise().namespaces
        assert [each.pin_name for each in shown.prefixes] == [f"of-{owner}"], "not cut off by those of others"
        assert not shown.places
        totals = (shown.requests_per_hour, shown.prompt_tokens_per_hour, shown.chosen_bytes, shown.saved_s_per_hour)
        assert totals == (0, 0, 0, 0)
        assert shown.saved_share == 0
    (shown,) = owned(daemon, "c", "viewer").advise().namespaces
    assert not shown.prefixes

    # Advice is about the prompt that began so, not about another one that has got its name.
    daemon.local.unpin("of-a")
    daemon.local.evict("of-a")
    daemon.local.pin("of-a", tokens=tokens_of("new"), model="model", owner="c")
    (shown,) = owned(daemon, "c", "operator").advise().namespaces
    assert not shown.prefixes


# Requests


def test_recent_requests_are_those_of_its_own_prompts(daemon: TcpDaemon) -> None:
    pins = {prompt.name: prompt.pin_id for prompt in daemon.local.list()} | {"none": "", "forgotten": "0" * 32}
    ended = [
        engine_pb2.RequestEnded(request_id=f"{number}-{name}", outcome=outcome, pin_id=pins[name], prompt_tokens=90)
        for number, (name, outcome) in enumerate(
            [
                ("of-a", engine_pb2.HIT),
                ("of-a", engine_pb2.DIVERGED),
                ("of-b", engine_pb2.HIT),
                ("of-none", engine_pb2.HIT),
                ("none", engine_pb2.UNKNOWN),
                ("forgotten", engine_pb2.DIVERGED),
            ]
        )
    ]

    async def scenario() -> None:
        async with ScriptedEngine(daemon.config) as engine:
            await engine.send(requests_ended=engine_pb2.RequestsEnded(requests=ended))
            await engine.barrier()

    daemon.run(scenario())
    assert len(daemon.local.recent_requests()) == 6
    own = owned(daemon, "a")
    assert [each.request_id for each in own.recent_requests()] == ["1-of-a", "0-of-a"]
    assert [each.request_id for each in own.recent_requests(limit=1)] == ["1-of-a"], "the limit counts its own"
    assert [each.request_id for each in own.recent_requests(outcomes=[RequestOutcome.HIT])] == ["0-of-a"]
    assert [each.request_id for each in own.recent_requests(misses_only=True)] == ["1-of-a"]
    assert own.recent_requests(outcomes=[RequestOutcome.UNKNOWN]) == []
    assert owned(daemon, "c").recent_requests() == []
    assert [each.name for each in own.explain_request("0-of-a").explanation.prompts] == ["of-a"]
    for other in ("2-of-b", "3-of-none", "4-none", "5-forgotten"):
        with pytest.raises(RequestNotFoundError):
            own.explain_request(other)
    daemon.local.set("of-b", owner="a")
    assert "2-of-b" in {each.request_id for each in own.recent_requests()}


# Bundles


@pytest.fixture
def stored(daemon: TcpDaemon) -> dict[str, bytes]:
    """Have all prompts durable; return their bundles."""

    async def scenario() -> None:
        async with ScriptedEngine(daemon.config) as engine:
            for prompt in await asyncio.to_thread(daemon.local.list):
                keys = [chunk_key((prompt.name, number)) for number in range(4)]
                await engine.bind(prompt.pin_id, keys)
                await engine.store(keys)

    daemon.run(scenario())
    wait_for(lambda: daemon.local.check_ready().ready, DEADLINE_S)
    with grpc.insecure_channel(f"unix:{daemon.config.server.socket}") as channel:
        return {prompt.name: exported(channel, prompt.name) for prompt in daemon.local.list()}


def exported(channel: grpc.Channel, name: str, token: str | None = None) -> bytes:
    pieces = cache_pb2_grpc.CacheServiceStub(channel).Export(pb.ExportRequest(name=name), metadata=bearer(token))
    return b"".join(piece.data for piece in pieces)


def test_exports_are_of_its_own_prompts(daemon: TcpDaemon, stored: dict[str, bytes]) -> None:
    token, channel = daemon.token("a", "operator", owner="a"), daemon.channel()
    assert exported(channel, "of-a", token) == stored["of-a"]
    for name in ("of-b", "of-none"):
        with pytest.raises(grpc.RpcError) as refused:
            exported(channel, name, token)
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND


def test_it_imports_nothing(daemon: TcpDaemon, stored: dict[str, bytes]) -> None:
    """A bundle says by which keys its KV is found: one of A, with the keys of what B pins next and bytes of A's own
    choice, was what requests of B were restored. Over HTTP as well, which calls at the socket in A's name."""
    daemon.local.unpin("of-b")
    daemon.local.evict("of-b")
    before = facts(daemon)
    refused = r"may not call Import: it concerns prompts of all owners, .* owner a; use one without"
    with pytest.raises(ForbiddenError, match=refused):
        owned(daemon, "a").import_bundle(BytesIO(stored["of-b"]), name="a/x")
    over_http = acting_for(Caller(name="a", role=Role.OPERATOR, owner="a", door=Door.HTTP))
    with over_http, pytest.raises(ForbiddenError, match=refused):
        daemon.local.import_bundle(BytesIO(stored["of-b"]), name="a/x")
    assert facts(daemon) == before
    whole = daemon.client(daemon.token("all", "operator"))
    assert whole.import_bundle(BytesIO(stored["of-b"])).name == "of-b"


def facts(daemon: TcpDaemon) -> Sequence[object]:
    return [(each.name, each.owner, each.pin_id, each.tokens_digest, each.state) for each in daemon.local.list()]


# The shared store


def member(folder: Path, **settings: object) -> DaemonConfig:
    (folder / "own").mkdir(parents=True)
    (folder.parent / "shared").mkdir(exist_ok=True)
    remote = RemoteConfig(url=f"file://{folder.parent}/shared", poll="1s")
    return replace(config_in(folder / "own"), remote=remote, **settings)  # type: ignore[arg-type]


def test_of_the_shared_store_it_sees_its_own_pins(tmp_path: Path) -> None:
    """Pins that a host cannot take are in the store only, so it is the store that knows whose they are."""
    with ExitStack() as stack:
        first = stack.enter_context(serving(tmp_path / "a", config=member(tmp_path / "a")))
        for number, owner in enumerate(("a", "a", "b", "b", "b", "")):
            first.local.pin(f"{number}-of-{owner}", tokens=range(number, number + 80), model="m", owner=owner)
        wait_for(lambda: first.local.remote().num_pins == 6, DEADLINE_S)
        small = OwnersConfig(named={owner: OwnerQuota(pins=0) for owner in OWNERS})
        second = stack.enter_context(serving(tmp_path / "b", config=member(tmp_path / "b", owners=small)))
        wait_for(lambda: len(second.local.remote().refused) == 5, DEADLINE_S)
        wait_for(lambda: [prompt.name for prompt in second.local.list()] == ["5-of-"], DEADLINE_S)
        for owner, names in (("a", ["0-of-a", "1-of-a"]), ("b", ["2-of-b", "3-of-b", "4-of-b"]), ("c", [])):
            seen = owned(second, owner, "viewer").remote(with_hosts=True)
            assert [each.name for each in seen.refused] == names
            assert seen.num_pins == len(names)
            assert (seen.url, len(seen.hosts)) == (f"file://{tmp_path}/shared", 2)
            seen = owned(first, owner, "viewer").remote()
            assert (seen.num_pins, seen.num_waiting_pins, seen.refused) == (len(names), 0, ())
        with pytest.raises(PromptNotFoundError):
            owned(second, "d").get("0-of-a")
