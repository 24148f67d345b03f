"""A caller with an owner: prompts of that owner exist for it, and no others, in any call."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import pytest

from kvtier import Client
from kvtier._pb import cache_pb2 as pb
from kvtier._pb import cache_pb2_grpc
from kvtier.access.caller import Caller, Role, acting_for, enter_call
from kvtier.client.admin import AdminClient
from kvtier.errors import (
    ForbiddenError,
    InvalidArgumentError,
    NameTakenError,
    PromptNotFoundError,
    RequestNotFoundError,
)
from kvtier.rpc.prompt_servicer import PromptServicer
from tests.fakes.rig import rig
from tests.fakes.rows import prompt_row
from tests.fakes.tcp_daemon import TcpDaemon, bearer, outcome, pin_request, serving

A = range(80)
B = [*range(40), *range(900, 940)]
"""Begins as the other does."""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TcpDaemon]:
    with serving(tmp_path_factory.mktemp("d")) as running:
        yield running


@pytest.fixture(scope="module")
def token(daemon: TcpDaemon) -> str:
    return daemon.token("team-a", "operator", owner="a")


@pytest.fixture(scope="module")
def own(daemon: TcpDaemon, token: str) -> Client:
    return daemon.client(token)


@pytest.fixture(scope="module")
def channel(daemon: TcpDaemon) -> grpc.Channel:
    return daemon.channel()


@pytest.fixture(autouse=True)
def prompts(daemon: TcpDaemon) -> Iterator[None]:
    daemon.local.pin("of-a", tokens=A, model="m", owner="a")
    daemon.local.pin("of-b", tokens=B, model="m", owner="b")
    daemon.local.pin("of-none", tokens=range(2000, 2080), model="m")
    yield
    for prompt in daemon.local.list():
        daemon.local.unpin(prompt.name)
        daemon.local.evict(prompt.name)


def test_lists_have_its_own_prompts(own: Client, daemon: TcpDaemon) -> None:
    assert [prompt.name for prompt in own.list()] == ["of-a"]
    assert len(daemon.local.list()) == 3
    status = own.status()
    assert (status.num_prompts, status.num_pinned) == (1, 1)
    assert own.check_ready().num_prompts == 1
    assert daemon.local.check_ready().num_prompts == 3


ABOUT_ONE: dict[str, Any] = {
    "GetPrompt": lambda name: pb.GetPromptRequest(name=name),
    "GetTokens": lambda name: pb.GetTokensRequest(name=name),
    "GetChunkMap": lambda name: pb.GetChunkMapRequest(name=name),
    "WatchPrompt": lambda name: pb.GetPromptRequest(name=name),
    "UpdatePrompt": lambda name: pb.UpdatePromptRequest(name=name, priority=3),
    "Unpin": lambda name: pb.UnpinRequest(name=name),
    "Evict": lambda name: pb.EvictRequest(name=name, force=True),
    "RenamePrompt": lambda name: pb.RenamePromptRequest(name=name, new_name=name + "-new"),
    "Export": lambda name: pb.ExportRequest(name=name),
    "VerifyPrompt": lambda name: pb.VerifyPromptRequest(name=name),
    "CheckReady": lambda name: pb.ReadyRequest(names=[name]),
}


@pytest.mark.parametrize("name", ["of-b", "of-none", "nope"])
@pytest.mark.parametrize("call", ABOUT_ONE)
def test_prompts_of_others_are_not_found(
    call: str, name: str, channel: grpc.Channel, token: str, daemon: TcpDaemon
) -> None:
    before = [(each.name, each.priority, each.pinned) for each in daemon.local.list()]
    assert outcome(channel, call, ABOUT_ONE[call](name), token) == "NOT_FOUND"
    assert [(each.name, each.priority, each.pinned) for each in daemon.local.list()] == before


@pytest.mark.parametrize("call", ABOUT_ONE)
def test_its_own_are(call: str, channel: grpc.Channel, token: str) -> None:
    found = outcome(channel, call, ABOUT_ONE[call]("of-a"), token)
    assert found == dict.fromkeys(("Export", "VerifyPrompt", "GetChunkMap"), "FAILED_PRECONDITION").get(call, "OK")


def test_by_id_too(channel: grpc.Channel, token: str, daemon: TcpDaemon) -> None:
    for name, found in (("of-b", "NOT_FOUND"), ("of-a", "OK")):
        request = pb.GetPromptRequest(pin_id=daemon.local.get(name).pin_id)
        assert outcome(channel, "GetPrompt", request, token) == found


def test_what_it_pins_is_its_owners(own: Client, daemon: TcpDaemon) -> None:
    assert own.pin("mine", tokens=range(3000, 3080), model="m").owner == "a"
    assert own.set("mine", owner="a", priority=2).owner == "a"
    with pytest.raises(ForbiddenError, match="leave the owner out"):
        own.pin("theirs", tokens=range(3000, 3080), model="m", owner="b")
    with pytest.raises(ForbiddenError, match="leave the owner out"):
        own.set("mine", owner="b")
    with pytest.raises(ForbiddenError, match="leave the owner out"):
        own.set("mine", owner="")
    assert daemon.local.get("mine").owner == "a"


@pytest.mark.parametrize("replace", [False, True])
def test_the_name_of_anothers_prompt_is_taken(replace: bool, own: Client, daemon: TcpDaemon) -> None:
    """The one thing that it learns of others: names are of all owners together."""
    before = daemon.local.get("of-b")
    with pytest.raises(NameTakenError, match="another owner"):
        own.pin("of-b", tokens=range(3000, 3080), model="m", replace=replace)
    with pytest.raises(NameTakenError):
        own.pin("of-b", tokens=B, model="m", replace=replace)  # not with the same content either
    with pytest.raises(NameTakenError):
        own.rename("of-a", "of-b")
    assert daemon.local.get("of-b") == before


def test_an_apply_is_whole_or_nothing(channel: grpc.Channel, token: str, daemon: TcpDaemon) -> None:
    stub = cache_pb2_grpc.CacheServiceStub(channel)

    def apply(*messages: pb.ApplyMessage) -> str:
        given = iter([pb.ApplyMessage(start=pb.ApplyStart()), *messages])
        try:
            stub.ApplyPrompts(given, metadata=bearer(token), timeout=10)
        except grpc.RpcError as error:
            return str(error.code().name)
        return "OK"

    new = pb.ApplyMessage(pin=pin_request("new", 5000))
    assert apply(new, pb.ApplyMessage(pin=pin_request("of-b", 5000))) == "ALREADY_EXISTS"
    assert apply(new, pb.ApplyMessage(unpin="of-b")) == "NOT_FOUND"
    assert apply(pb.ApplyMessage(pin=pin_request("new", 5000, owner="b"))) == "PERMISSION_DENIED"
    assert "new" not in {prompt.name for prompt in daemon.local.list()}
    assert apply(new, pb.ApplyMessage(unpin="of-a")) == "OK"
    assert daemon.local.get("new").owner == "a"


def test_explanations_are_of_its_own_prompts(own: Client, daemon: TcpDaemon, channel: grpc.Channel, token: str) -> None:
    """Else tokens of others could be guessed one by one: `differs_at` says where."""
    stub = cache_pb2_grpc.CacheServiceStub(channel)
    request = pb.ExplainRequest(tokens=[*B, 1], model="m")
    near = stub.Explain(request, metadata=bearer(token)).prompts
    assert [prompt.name for prompt in near] == ["of-a"]
    with AdminClient(daemon.config.server.socket) as admin:
        assert {prompt.name for prompt in admin.explain(request).prompts} == {"of-a", "of-b"}
    with pytest.raises(RequestNotFoundError):
        own.explain_request("nope")


def test_adopting_takes_nothing_that_is_no_ones(channel: grpc.Channel, token: str) -> None:
    assert outcome(channel, "Pin", pb.PinRequest(name="x", adopt="of-none"), token) == "NOT_FOUND"
    assert outcome(channel, "Pin", pb.PinRequest(name="of-b", version=1), token) == "NOT_FOUND"


def test_versions_of_others_are_not_named(tmp_path: Path) -> None:
    """A rollback to one that there is not listed those that there are, of any owner."""

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            for owner in ("a", "b"):
                r.cache.prompts.put(replace(prompt_row(f"of-{owner}@1", owner, pinned=False), owner=owner))
            enter_call(Caller(name="team-a", role=Role.OPERATOR, owner="a"))
            for name, named in (("of-b", "`kvtier list` shows the names"), ("of-a", "there are of-a@1")):
                with pytest.raises(PromptNotFoundError, match=named):
                    await PromptServicer(r.cache).Pin(pb.PinRequest(name=name, version=7), mock.Mock())

    asyncio.run(scenario())


def test_events_are_of_its_own_prompts(own: Client, daemon: TcpDaemon) -> None:
    with own.watch_events(timeout_s=10) as events:
        daemon.local.set("of-b", priority=5)
        daemon.local.set("of-none", priority=5)
        daemon.local.set("of-a", priority=5)
        event = next(events)
    assert (event.name, event.fields["name"]) == ("pin_updated", "of-a")


def test_acting_for_a_caller_over_the_socket_is_the_same(daemon: TcpDaemon) -> None:
    """The HTTP server's way: the socket's process may do everything, and does what its caller may."""
    caller = Caller(name="team-a", role=Role.VIEWER, owner="a", address="192.0.2.7")
    with acting_for(caller):
        assert [prompt.name for prompt in daemon.local.list()] == ["of-a"]
        with pytest.raises(PromptNotFoundError):
            daemon.local.get("of-b")
        with pytest.raises(ForbiddenError, match="needs the role operator"):
            daemon.local.unpin("of-a")
    assert len(daemon.local.list()) == 3


@pytest.mark.parametrize(
    "said",
    ["", "{}", "[]", '{"name": "x", "role": "king"}', '{"name": "x", "role": "admin", "owner": "a"}', "x" * 3000],
)
def test_nonsense_of_the_one_who_acts_is_refused(said: str, daemon: TcpDaemon) -> None:
    with grpc.insecure_channel(f"unix:{daemon.config.server.socket}") as channel:
        stub = cache_pb2_grpc.CacheServiceStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            stub.ListPrompts(pb.ListPromptsRequest(), metadata=(("kvtier-acting-for", said),))
        twice = (("kvtier-acting-for", '{"name": "x", "role": "viewer"}'),) * 2
        with pytest.raises(grpc.RpcError) as doubled:
            stub.ListPrompts(pb.ListPromptsRequest(), metadata=twice)
    for each in (refused, doubled):
        assert each.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_acting_for_counts_for_nothing_over_tcp(channel: grpc.Channel, token: str) -> None:
    admin = ("kvtier-acting-for", '{"name": "x", "role": "admin"}')
    stub = cache_pb2_grpc.CacheServiceStub(channel)
    with pytest.raises(grpc.RpcError) as refused:
        stub.ListPrompts(pb.ListPromptsRequest(), metadata=(admin,))
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    listed = stub.ListPrompts(pb.ListPromptsRequest(), metadata=(admin, *bearer(token)))
    assert [prompt.name for prompt in listed.prompts] == ["of-a"]


def test_an_admin_has_no_owner(daemon: TcpDaemon) -> None:
    with pytest.raises(InvalidArgumentError, match="an admin has no owner"):
        daemon.token("x", "admin", owner="a")
