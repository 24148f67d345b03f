"""Every call by every role, over TCP with TLS: what is refused is what the table says, and nothing else."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvtier._pb import cache_pb2, cache_pb2_grpc, engine_pb2, engine_pb2_grpc
from kvtier._pb import cache_pb2 as pb
from kvtier.access import rate_limits
from kvtier.access.call_roles import CALL_RULES, check_call, is_free_to
from kvtier.access.caller import LOCAL, Caller, Role
from kvtier.errors import ForbiddenError, UnauthenticatedError
from tests.fakes.tcp_daemon import TcpDaemon, bearer, outcome, pin_request, serving

CALLS = [method.name for method in cache_pb2.DESCRIPTOR.services_by_name["CacheService"].methods]
ENGINE_CALLS = [method.name for method in engine_pb2.DESCRIPTOR.services_by_name["EngineService"].methods]
REFUSED = ("UNAUTHENTICATED", "PERMISSION_DENIED")
REQUESTS: dict[str, Any] = {
    "Pin": pin_request("new"),
    "ApplyPrompts": pb.ApplyMessage(start=pb.ApplyStart(dry_run=True)),
    "RenamePrompt": pb.RenamePromptRequest(name="nope", new_name="other"),
    "ListPrompts": pb.ListPromptsRequest(),
    "GetPrompt": pb.GetPromptRequest(name="p"),
    "GetTokens": pb.GetTokensRequest(name="p"),
    "GetChunkMap": pb.GetChunkMapRequest(name="p"),
    "WatchPrompt": pb.GetPromptRequest(name="p"),
    "UpdatePrompt": pb.UpdatePromptRequest(name="p", priority=1),
    "Unpin": pb.UnpinRequest(name="nope"),
    "Evict": pb.EvictRequest(name="nope"),
    "GetAdvice": pb.GetAdviceRequest(),
    "GetStatus": pb.GetStatusRequest(),
    "ListNamespaces": pb.ListNamespacesRequest(),
    "Fsck": pb.FsckRequest(),
    "Export": pb.ExportRequest(name="nope"),
    "Import": pb.ImportMessage(start=pb.ImportStart(name="nope")),
    "VerifyPrompt": pb.VerifyPromptRequest(name="nope"),
    "QuarantineNamespace": pb.QuarantineNamespaceRequest(namespace_id="nope", reason="x"),
    "ReleaseNamespace": pb.ReleaseNamespaceRequest(namespace_id="nope"),
    "CheckReady": pb.ReadyRequest(),
    "WatchEvents": pb.WatchEventsRequest(),
    "Explain": pb.ExplainRequest(tokens=[1]),
    "ListRecentRequests": pb.ListRecentRequestsRequest(),
    "GetRemote": pb.GetRemoteRequest(),
    "CreateGrant": pb.CreateGrantRequest(name="x", role="king"),
    "ListGrants": pb.ListGrantsRequest(),
    "RevokeGrant": pb.RevokeGrantRequest(name="nope"),
}
NEEDS_ADMIN = {"Evict": pb.EvictRequest(all=True), "Fsck": pb.FsckRequest(repair=True)}
CALLERS = ("none", "wrong", "viewer", "operator", "admin", "viewer-a", "operator-a")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TcpDaemon]:
    with pytest.MonkeyPatch.context() as patch, serving(tmp_path_factory.mktemp("d")) as running:
        patch.setattr(rate_limits, "MAX_WRONG", 10_000)
        running.local.pin("p", tokens=range(80), model="m", owner="a")
        yield running


@pytest.fixture(scope="module")
def tokens(daemon: TcpDaemon) -> dict[str, str | None]:
    made: dict[str, str | None] = {"none": None, "wrong": "kvt_" + "x" * 43}
    made |= {role.value: daemon.token(role.value, role.value) for role in Role}
    return made | {f"{role}-a": daemon.token(f"{role}-a", role, owner="a") for role in ("viewer", "operator")}


@pytest.fixture(scope="module")
def channel(daemon: TcpDaemon) -> grpc.Channel:
    return daemon.channel()


def allowed(caller: str, call: str, *, as_admin: bool = False) -> bool:
    rule, role = CALL_RULES[call], caller.partition("-")[0]
    if role in ("none", "wrong"):
        return False
    needed = Role.ADMIN if as_admin else rule.role
    return Role(role).includes(needed) and (rule.for_owners or "-" not in caller)


def test_the_table_has_every_call_and_no_other() -> None:
    assert set(CALL_RULES) == {*CALLS, *ENGINE_CALLS}
    assert set(REQUESTS) == set(CALLS)
    with pytest.raises(ForbiddenError, match="no role may make this call"):
        check_call(Caller(name="x", role=Role.ADMIN), "Nonsense")


def test_a_local_call_is_not_looked_at_if_nothing_can_come_of_it() -> None:
    """The check of each message of an engine took a seventh of the loop's time."""
    assert is_free_to(LOCAL, "Attach")
    assert is_free_to(LOCAL, "ListPrompts")
    noted = {"Unpin", "Evict", "Fsck", "CreateGrant", "ApplyPrompts", "Nonsense"}
    assert not [call for call in noted if is_free_to(LOCAL, call)]
    assert not is_free_to(Caller(name="x", role=Role.VIEWER), "GetTokens")
    assert not is_free_to(Caller(name="x", role=Role.VIEWER, owner="a"), "ListPrompts")


@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("call", CALLS)
def test_a_cell_of_the_table(call: str, caller: str, channel: grpc.Channel, tokens: dict[str, str | None]) -> None:
    found = outcome(channel, call, REQUESTS[call], tokens[caller])
    if allowed(caller, call):
        assert found not in (*REFUSED, "UNIMPLEMENTED", "UNKNOWN", "INTERNAL")
    else:
        assert found == ("UNAUTHENTICATED" if caller in ("none", "wrong") else "PERMISSION_DENIED")


@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("call", NEEDS_ADMIN)
def test_what_only_admins_do_with_a_call(
    call: str, caller: str, channel: grpc.Channel, tokens: dict[str, str | None]
) -> None:
    found = outcome(channel, call, NEEDS_ADMIN[call], tokens[caller])
    assert (found == "OK") == allowed(caller, call, as_admin=True), found


def test_engines_and_reflection_are_not_at_the_port(channel: grpc.Channel, tokens: dict[str, str | None]) -> None:
    """Whatever the credentials."""
    attach = engine_pb2_grpc.EngineServiceStub(channel).Attach(iter([]), metadata=bearer(tokens["admin"]), timeout=10)
    with pytest.raises(grpc.RpcError) as refused:
        next(attach)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    listing = reflection_pb2.ServerReflectionRequest(list_services="")
    answers = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([listing]), timeout=10)
    with pytest.raises(grpc.RpcError) as unknown:
        next(answers)
    assert unknown.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_what_answers_without_credentials(channel: grpc.Channel) -> None:
    """Health, for load balancers; not its watch, which would hold a call open."""
    health = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest()
    assert health.Check(request, timeout=10).status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as refused:
        next(health.Watch(request, timeout=10))
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_viewer_gets_no_text(channel: grpc.Channel, daemon: TcpDaemon, tokens: dict[str, str | None]) -> None:
    request = pin_request("parrot", first=500, recipe_json='{"kind": "text", "text": "You are a parrot."}')
    assert outcome(channel, "Pin", request, tokens["admin"]) == "OK"
    named = pb.GetPromptRequest(name="parrot")
    for role in ("viewer", "operator"):
        stub = cache_pb2_grpc.CacheServiceStub(channel)
        status = stub.GetPrompt(named, metadata=bearer(tokens[role]))
        watched = next(stub.WatchPrompt(named, metadata=bearer(tokens[role])))
        assert ["parrot" in each.recipe_json for each in (status, watched)] == [role == "operator"] * 2
    with pytest.raises(ForbiddenError, match="role operator"):
        daemon.client(tokens["viewer"]).tokens("p")
    assert daemon.client(tokens["operator"]).tokens("p") == tuple(range(80))


def test_a_viewer_gets_no_salt(channel: grpc.Channel, tokens: dict[str, str | None]) -> None:
    """A salt is all that keeps one tenant's prompts from another."""
    request = pin_request("of-tenant", first=500, cache_salt="tenant-7")
    assert outcome(channel, "Pin", request, tokens["admin"]) == "OK"
    stub = cache_pb2_grpc.CacheServiceStub(channel)
    for role in ("viewer", "operator"):
        how = {"metadata": bearer(tokens[role])}
        listed = stub.ListPrompts(pb.ListPromptsRequest(), **how).prompts
        statuses = [next(each for each in listed if each.name == "of-tenant")]
        statuses.append(stub.GetPrompt(pb.GetPromptRequest(name="of-tenant"), **how))
        assert [each.cache_salt for each in statuses] == ["tenant-7" if role == "operator" else ""] * 2


def test_refusals_name_the_remedy(daemon: TcpDaemon, tokens: dict[str, str | None]) -> None:
    with pytest.raises(ForbiddenError, match=r"kvtier token create NAME --role operator"):
        daemon.client(tokens["viewer"]).unpin("p")
    with pytest.raises(UnauthenticatedError, match=r"kvtier token create.*--token-file"):
        daemon.client().list()


def test_the_message_of_a_caller_without_credentials_is_not_parsed(channel: grpc.Channel) -> None:
    call = channel.unary_unary("/kvtier.v1.CacheService/Pin", request_serializer=None, response_deserializer=None)
    with pytest.raises(grpc.RpcError) as refused:
        call(b"\xff" * 1000, timeout=10)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_nothing_is_served_over_tcp_unless_an_address_is_named(tmp_path: Path) -> None:
    with serving(tmp_path, tls=False, listen="off") as running:
        assert running.address == ""
