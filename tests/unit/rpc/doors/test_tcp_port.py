"""The TCP port itself: TLS, credentials that end, too many connections, and what is written down."""

import asyncio
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier import Client
from kvtier._pb import cache_pb2 as pb
from kvtier._pb import cache_pb2_grpc
from kvtier.access import gatekeeper, rate_limits
from kvtier.access.caller import Caller, Door, Role, acting_for
from kvtier.access.tls_files import TlsFiles
from kvtier.errors import (
    ConfigError,
    ForbiddenError,
    GrantsUnusableError,
    InvalidArgumentError,
    PromptNotFoundError,
    ServerUnreachableError,
    TooManyCallsError,
    UnauthenticatedError,
)
from kvtier.process import prepare_grpc
from kvtier.rpc.doors import tcp_server
from tests.fakes.certificates import Authority
from tests.fakes.rig import eventually
from tests.fakes.scripted_engine import DEADLINE_S
from tests.fakes.tcp_daemon import TcpDaemon, bearer, outcome, serving
from tests.fakes.waiting import wait_for

WRONG = "kvt_" + "x" * 43
STATUS = pb.GetStatusRequest()
_TLS12_DAEMON = """
import asyncio, sys
from dataclasses import replace
from pathlib import Path
from kvtier.config.model import AccessConfig
from kvtier.rpc.server import serve
from tests.fakes.scripted_engine import config_in
config = config_in(Path(sys.argv[1]))
access = AccessConfig(tls_cert_file=Path(sys.argv[2]), tls_key_file=Path(sys.argv[3]))
config = replace(config, server=replace(config.server, listen="127.0.0.1:0"), access=access)
async def main():
    await serve(config, stop=asyncio.Event())
asyncio.run(main())
"""


# TLS


def files_of(pair: tuple[Path, Path]) -> Any:
    """Return the arguments of a client with this certificate and key."""
    return dict(zip(("client_cert_file", "client_key_file"), pair, strict=True))


def say_tls(daemon: TcpDaemon, version: str) -> subprocess.CompletedProcess[bytes]:
    """Have openssl make a handshake of this version."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs openssl")
    assert daemon.authority is not None
    command = [openssl, "s_client", "-connect", daemon.address, "-CAfile", str(daemon.authority.ca_file)]
    command += ["-verify_return_error", "-alpn", "h2", version]
    return subprocess.run(command, input=b"", capture_output=True, timeout=DEADLINE_S, check=False)


def test_tls_is_1_3_or_nothing(tmp_path: Path) -> None:
    with serving(tmp_path) as daemon:
        assert say_tls(daemon, "-tls1_3").returncode == 0
        refused = say_tls(daemon, "-tls1_2")
        assert refused.returncode != 0
        assert b"Cipher is (NONE)" in refused.stdout


def test_a_process_whose_grpc_would_take_1_2_does_not_start(tmp_path: Path) -> None:
    """Whatever gRPC makes of its environment one day: the port is tried before it is used."""
    cert, key = Authority(tmp_path).issue("daemon")
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_SSL_CIPHER_SUITES"}
    command = [sys.executable, "-c", _TLS12_DAEMON, str(tmp_path), str(cert), str(key)]
    root = Path(__file__).parents[4]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False, env=environment, cwd=root)
    assert b"would take TLS 1.2" in done.stderr


def test_grpc_was_prepared() -> None:
    """Else the tests here would see another TLS than `kvtier-daemon` has."""
    before = os.environ.get("GRPC_SSL_CIPHER_SUITES")
    prepare_grpc()
    assert os.environ["GRPC_SSL_CIPHER_SUITES"] == before


def test_client_certificates(tmp_path: Path) -> None:
    with serving(tmp_path, client_ca=True) as daemon:
        token, authority = daemon.token("ci", "viewer"), daemon.authority
        assert authority is not None
        with pytest.raises(ServerUnreachableError, match="--client-cert-file"):
            daemon.client(token).list()
        (tmp_path / "other").mkdir()
        foreign = Authority(tmp_path / "other").issue("team")
        over = authority.issue("team", stem="over", days=-1)
        for pair in (foreign, over):
            with pytest.raises(ServerUnreachableError):
                daemon.client(token, **files_of(pair)).list()
        files = files_of(authority.issue("team"))
        with pytest.raises(UnauthenticatedError, match="no grant names the client certificate 'team'"):
            daemon.client(**files).list()
        assert daemon.local.create_grant("by-name", role="viewer", certificate="team").token == ""
        assert daemon.client(**files).list() == []
        with pytest.raises(ForbiddenError, match="by-name"):
            daemon.client(**files).unpin("x")
        admin = daemon.token("op", "admin")  # a token counts before the certificate
        assert len(daemon.client(admin, **files).grants()) == 3
        daemon.local.revoke_grant("by-name")
        with pytest.raises(UnauthenticatedError):
            daemon.client(**files).list()


def test_a_client_that_trusts_another_authority_sends_no_token(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Authority(tmp_path / "other")
    with serving(tmp_path) as daemon:
        with pytest.raises(ServerUnreachableError, match="not signed by an authority that this client trusts"):
            daemon.client(WRONG, ca_file=other.ca_file).list()
        with pytest.raises(ServerUnreachableError, match="--ca-file"):
            daemon.client(WRONG, ca_file=None).list()  # no TLS to a port that has it


def test_renewed_certificates_are_used_without_a_restart(tmp_path: Path) -> None:
    with serving(tmp_path) as daemon:
        token = daemon.token("ci", "viewer")
        assert daemon.client(token).list() == []
        (tmp_path / "new").mkdir()
        renewed = Authority(tmp_path / "new", "renewed")
        cert, key = renewed.issue("daemon")
        cert.replace(tmp_path / "daemon.crt")  # for a moment certificate and key are no pair
        assert daemon.client(token).list() == []
        key.replace(tmp_path / "daemon.key")
        with pytest.raises(ServerUnreachableError, match="not signed by an authority"):
            daemon.client(token).list()
        assert daemon.client(token, ca_file=renewed.ca_file).list() == []


@pytest.mark.parametrize("broken", ["cert", "key", "ca", "no key", "password"])
def test_certificates_that_cannot_be_used_are_refused_by_setting(tmp_path: Path, broken: str) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.issue("daemon")
    ca, field = authority.ca_file, "access.tls_cert_file"
    if broken == "cert":
        cert.write_text("no certificate")
    elif broken == "key":
        key = authority.issue("other")[1]
    elif broken == "ca":
        ca, field = tmp_path / "ca", "access.client_ca_file"
        ca.write_text("-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n")
    elif broken == "no key":
        key, field = tmp_path / "nope", "access.tls_key_file"
    else:
        key.write_text(key.read_text().replace("BEGIN PRIVATE", "BEGIN ENCRYPTED PRIVATE"))
    with pytest.raises(ConfigError) as refused:
        TlsFiles(cert, key, ca)
    assert refused.value.key == field


def test_an_address_that_is_taken_keeps_the_daemon_from_starting(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match="cannot listen there") as refused, serving(tmp_path, listen=address):
            pass
        assert refused.value.key == "server.listen"


def test_without_tls_on_loopback_tokens_are_still_needed(tmp_path: Path) -> None:
    with serving(tmp_path, tls=False) as daemon:
        assert daemon.client(daemon.token("ci", "viewer")).list() == []
        with pytest.raises(UnauthenticatedError, match="no credentials"):
            daemon.client().list()


def test_without_credentials_anyone_on_loopback_is_an_operator(tmp_path: Path) -> None:
    with serving(tmp_path, tls=False, auth="none") as daemon:
        client = daemon.client()
        client.pin("p", tokens=range(80), model="m")
        with pytest.raises(ForbiddenError, match=gatekeeper.ANYONE):
            client.create_grant("x", role="admin")


# Credentials that end


def test_tokens_end(tmp_path: Path) -> None:
    with serving(tmp_path) as daemon:
        token = daemon.token("ci", "viewer")
        client, channel = daemon.client(token), daemon.channel()
        assert client.list() == []
        daemon.local.revoke_grant("ci")
        with pytest.raises(UnauthenticatedError, match="revoked"):
            client.list()
        short = daemon.token("short", "viewer", ttl_s=1)
        wait_for(lambda: outcome(channel, "GetStatus", STATUS, short) == "UNAUTHENTICATED", DEADLINE_S)
        again = daemon.token("ci", "viewer")
        assert again != token
        assert outcome(channel, "GetStatus", STATUS, token) == "UNAUTHENTICATED"
        assert again not in (daemon.config.disk.disk_dir / "access.json").read_text()


@pytest.mark.parametrize("door", ["tcp", "acting over the socket"])
def test_revoking_ends_streams(tmp_path: Path, door: str) -> None:
    with serving(tmp_path) as daemon:
        made, other = daemon.local.create_grant("ci", role="viewer"), daemon.token("other", "viewer")
        caller = Caller(name="ci", role=Role.VIEWER, door=Door.HTTP, grant_id=made.grant.grant_id)
        with daemon.client(other).watch_events(timeout_s=DEADLINE_S) as kept:
            with acting_for(caller):
                client = daemon.client(made.token) if door == "tcp" else daemon.local
                watch = client.watch_events(timeout_s=DEADLINE_S)
            daemon.local.revoke_grant("ci")
            with pytest.raises(UnauthenticatedError, match="the grant of this stream has ended"):
                next(watch)
            daemon.local.pin("p", tokens=range(80), model="m")
            assert next(kept).name == "pin_registered"


def test_a_call_whose_message_comes_after_its_grant_has_ended_is_refused(tmp_path: Path) -> None:
    """Who sent the headers in time had its call carried out up to half a minute later."""
    with serving(tmp_path) as daemon:
        daemon.local.pin("p", tokens=range(80), model="m")
        token, channel, watched = daemon.token("ci", "operator"), daemon.channel(), daemon.token("ci2", "viewer")

        def late() -> Any:
            with daemon.client(watched).watch_events(timeout_s=DEADLINE_S) as watch:
                daemon.local.revoke_grant("ci")
                daemon.local.revoke_grant("ci2")
                with pytest.raises(UnauthenticatedError):  # the daemon knows by then
                    next(watch)
            yield pb.UnpinRequest(name="p")

        unpin = channel.stream_unary(
            "/kvtier.v1.CacheService/Unpin",
            request_serializer=pb.UnpinRequest.SerializeToString,
            response_deserializer=pb.PromptStatus.FromString,
        )
        assert unpin.future(late(), metadata=bearer(token), timeout=DEADLINE_S).code().name == "UNAUTHENTICATED"
        assert daemon.local.get("p").pinned


def test_a_call_for_a_grant_that_has_ended_is_refused(tmp_path: Path) -> None:
    """HTTP asks for the token when the headers come, and calls when the body is there: hours later, byte by byte."""
    with serving(tmp_path) as daemon:
        daemon.local.pin("p", tokens=range(80), model="m")
        made = daemon.local.create_grant("ci", role="operator")
        caller = Caller(name="ci", role=Role.OPERATOR, door=Door.HTTP, grant_id=made.grant.grant_id)
        with acting_for(caller):
            daemon.local.set("p", priority=3)
        daemon.local.revoke_grant("ci")

        def is_refused() -> bool:
            try:
                with acting_for(caller):
                    daemon.local.set("p", priority=4)
            except UnauthenticatedError as error:
                return "the grant of this call has ended" in str(error)
            return False

        wait_for(is_refused, DEADLINE_S)


def test_an_import_that_is_under_way_ends_too(tmp_path: Path) -> None:
    """Its caller waits for the daemon, so the daemon has to end the call."""
    with serving(tmp_path) as daemon:
        token, channel = daemon.token("ci", "operator"), daemon.channel()

        def endless() -> Any:
            yield pb.ImportMessage(start=pb.ImportStart(name="x"))
            daemon.local.revoke_grant("ci")
            is_over.wait(DEADLINE_S)

        is_over = threading.Event()
        ended = cache_pb2_grpc.CacheServiceStub(channel).Import.future(endless(), metadata=bearer(token), timeout=20)
        try:
            assert ended.code().name == "UNAUTHENTICATED"
        finally:
            is_over.set()


def test_a_change_of_the_file_is_noticed(tmp_path: Path) -> None:
    """An administrator may edit it, or put back a copy."""
    with serving(tmp_path) as daemon:
        path, token = daemon.config.disk.disk_dir / "access.json", daemon.token("ci", "viewer")
        assert path.stat().st_mode & 0o777 == 0o600
        watch, copy, channel = daemon.client(token).watch_events(timeout_s=20), path.read_text(), daemon.channel()
        path.unlink()
        with pytest.raises(UnauthenticatedError):
            next(watch)
        path.write_text(copy)
        path.chmod(0o600)
        wait_for(lambda: outcome(channel, "GetStatus", STATUS, token) == "OK", DEADLINE_S)


def _doubled(path: Path) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"grants": content["grants"] * 2}))


def _as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _as_link(path: Path) -> None:
    path.rename(path.with_name("x"))
    path.symlink_to(path.with_name("x"))


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "empty": lambda path: path.write_text(""),
    "cut": lambda path: path.write_text(path.read_text()[:-40]),
    "bytes": lambda path: path.write_bytes(b"\xff\x00" * 100),
    "deep": lambda path: path.write_text("[" * 100_000),
    "long": lambda path: path.write_text(" " * 3_000_000),
    "a role too many": lambda path: path.write_text(path.read_text().replace("viewer", "king")),
    "of tomorrow": lambda path: path.write_text(path.read_text().replace('"version": 1', '"version": 2')),
    "twice": _doubled,
    "for all to write": lambda path: path.chmod(0o666),
    "a folder": _as_folder,
    "a link": _as_link,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_refuses_everyone_and_says_so(tmp_path: Path, damage: str) -> None:
    with serving(tmp_path) as daemon:
        path, token = daemon.config.disk.disk_dir / "access.json", daemon.token("ci", "viewer")
        client = daemon.client(token)
        assert client.list() == []
        DAMAGE[damage](path)
        before = path.read_bytes() if path.is_file() else None

        def refusal() -> str:
            try:
                client.list()
            except UnauthenticatedError as error:
                return str(error)
            return ""

        wait_for(lambda: "cannot read its grants" in refusal(), DEADLINE_S)
        with pytest.raises(GrantsUnusableError, match=r"access\.json"):
            daemon.local.grants()
        with pytest.raises(GrantsUnusableError):
            daemon.local.create_grant("new", role="viewer")
        assert (path.read_bytes() if path.is_file() else None) == before, "nothing is overwritten"
        assert daemon.local.list() == [], "the socket still serves"


# Too much


def test_wrong_credentials_are_counted_and_right_ones_are_not_locked_out(tmp_path: Path) -> None:
    with serving(tmp_path) as daemon:
        channel, token = daemon.channel(), daemon.token("ci", "viewer")
        wrong = [outcome(channel, "GetStatus", STATUS, WRONG) for _ in range(25)]
        assert wrong == ["UNAUTHENTICATED"] * 20 + ["RESOURCE_EXHAUSTED"] * 5
        assert outcome(channel, "GetStatus", STATUS, token) == "OK"
        with pytest.raises(TooManyCallsError, match="wait a minute"):
            daemon.client(WRONG).list()


def test_a_caller_that_calls_too_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limits, "CALLS_PER_S", 0.001)
    monkeypatch.setattr(rate_limits, "BURST_CALLS", 5.0)
    with serving(tmp_path) as daemon:
        channel = daemon.channel()
        one, other = daemon.token("one", "viewer"), daemon.token("other", "viewer")
        statuses = [outcome(channel, "GetStatus", STATUS, one) for _ in range(8)]
        assert statuses == ["OK"] * 5 + ["RESOURCE_EXHAUSTED"] * 3
        assert outcome(channel, "GetStatus", STATUS, other) == "OK"
        assert len([daemon.local.status() for _ in range(20)]) == 20, "the socket has no such limit"


def test_two_thousand_idle_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those beyond the most are closed at once; the socket serves meanwhile, and the port when they are gone."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 6000:
        pytest.skip("needs 6000 open files")
    monkeypatch.setattr(tcp_server, "HANDSHAKE_TIMEOUT_S", 10 * DEADLINE_S)  # no clock closes them
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 6000), hard))
    try:
        with serving(tmp_path) as daemon:
            token, channel = daemon.token("ci", "viewer"), daemon.channel()
            asyncio.run(_flood(daemon))
            wait_for(lambda: outcome(channel, "GetStatus", STATUS, token) == "OK", DEADLINE_S)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def _flood(daemon: TcpDaemon) -> None:
    """Open the connections, call at the socket, and wait until the daemon has closed most."""
    host, _, port = daemon.address.rpartition(":")
    opened = [await asyncio.open_connection(host, int(port)) for _ in range(2000)]
    assert (await asyncio.to_thread(daemon.local.status)).pid

    def num_closed() -> int:
        return sum(reader.at_eof() or reader.exception() is not None for reader, _ in opened)

    await eventually(lambda: num_closed() >= 1500)
    for _, writer in opened:
        writer.close()


# What is written down


def test_the_audit_log_has_what_changes_and_what_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"

    def lines() -> list[dict[str, Any]]:
        return [json.loads(line) for line in path.read_text().splitlines()]

    with serving(tmp_path, audit_file=path) as daemon:
        token = daemon.token("team-a", "operator", owner="a")
        client = daemon.client(token)
        client.pin("p", tokens=range(80), model="m")
        client.list()
        client.tokens("p")
        with pytest.raises(ForbiddenError):
            client.grants()
        with pytest.raises(UnauthenticatedError):
            daemon.client(WRONG).list()
        with pytest.raises(PromptNotFoundError):
            client.unpin("nope")
        stub = cache_pb2_grpc.CacheServiceStub(daemon.channel())
        client.rename("p", "q")
        messages = [pb.ApplyMessage(start=pb.ApplyStart()), pb.ApplyMessage(unpin="q")]
        stub.ApplyPrompts(iter(messages), metadata=bearer(token))
        with pytest.raises(PromptNotFoundError):
            daemon.local.adopt("greeting", "auto-1", public=False)
        daemon.local.fsck()
        wait_for(lambda: len(lines()) == 8, DEADLINE_S)
        assert [(each["caller"], each["call"], each["outcome"], each["names"]) for each in lines()] == [
            ("local", "CreateGrant", "ok", ["team-a"]),
            ("team-a", "Pin", "ok", ["p"]),
            ("team-a", "ListGrants", "ForbiddenError", []),
            ("", "ListPrompts", "UnauthenticatedError", []),
            ("team-a", "Unpin", "PromptNotFoundError", ["nope"]),
            ("team-a", "RenamePrompt", "ok", ["p", "q"]),
            ("team-a", "ApplyPrompts", "ok", ["q"]),
            ("local", "Pin", "PromptNotFoundError", ["greeting", "auto-1"]),
        ]
        pinned = lines()[1]
        found = [pinned[name] for name in ("role", "owner", "door", "address", "num_names")]
        assert found == ["operator", "a", "grpc", "127.0.0.1", 1]
        assert path.stat().st_mode & 0o777 == 0o600
        assert token not in path.read_text()


# A client's mistakes


@pytest.mark.parametrize(
    "server", ["x", ":1", "x:", "x:99999", "http://x:1", "a@x:1", "x:1/y", "[::1", "ü:1", "x y:1", "x:0", "x:1\n"]
)
def test_addresses_that_are_none(server: str) -> None:
    with pytest.raises(InvalidArgumentError, match="HOST:PORT"):
        Client(server=server)


def test_a_token_that_is_none_is_not_shown(tmp_path: Path) -> None:
    for token in ("two words", "ü", "x" * 300, "line\nbreak"):
        with pytest.raises(InvalidArgumentError) as refused:
            Client(server="127.0.0.1:1", token=token)
        assert token not in str(refused.value)
    with pytest.raises(InvalidArgumentError, match="give server, too"):
        Client(token="kvt_x")
    with pytest.raises(InvalidArgumentError, match="reached at its socket or over TCP"):
        Client(tmp_path / "s", server="127.0.0.1:1")
    with pytest.raises(InvalidArgumentError, match="token_file"):
        Client(server="127.0.0.1:1", token_file=tmp_path / "nope")


def test_no_process_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        server = f"127.0.0.1:{free.getsockname()[1]}"  # no other process can listen there meanwhile
        with Client(server=server) as client, pytest.raises(ServerUnreachableError, match="no process"):
            client.list()
