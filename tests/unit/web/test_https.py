"""HTTP with TLS, as beyond loopback: 1.3, tokens or client certificates, certificates that are renewed."""

import socket
import ssl
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path

import httpx
import pytest
from starlette.requests import Request

from kvtier.access.caller import Caller, Role
from kvtier.access.grants import WantedGrant
from kvtier.access.tls_files import TlsFiles
from kvtier.web.callers import Callers
from kvtier.web.transport.http_bounds import HttpBounds
from kvtier.web.transport.tls_source import TlsSource
from tests.fakes.certificates import Authority
from tests.unit.web.http_rig import gatekeeper_in, served_door


def client_context(authority: Authority, pair: tuple[Path, Path] | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.ca_file))
    if pair is not None:
        context.load_cert_chain(*pair)
    return context


def serial_of(port: int, authority: Authority) -> str:
    context = client_context(authority)
    with (
        socket.create_connection(("127.0.0.1", port), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as sock,
    ):
        found = sock.getpeercert()
        assert found is not None
        return str(found["serialNumber"])


def test_tokens_and_certificates_over_tls(tmp_path: Path) -> None:
    authority, gatekeeper = Authority(tmp_path), gatekeeper_in(tmp_path)
    tls = TlsSource(TlsFiles(*authority.issue("daemon"), authority.ca_file))
    _, token = gatekeeper.grants.create(WantedGrant(name="web", role=Role.VIEWER), time.time())
    gatekeeper.grants.create(WantedGrant(name="by-name", role=Role.OPERATOR, certificate="team"), time.time())
    with served_door(gatekeeper=gatekeeper, tls=tls) as server:
        assert server.url.startswith("https://127.0.0.1:")
        who = f"{server.url}/api/v1/whoami"
        with httpx.Client(verify=client_context(authority)) as client:
            assert client.get(f"{server.url}/metrics").status_code == 200, "a scrape has no certificate"
            assert client.get(who).status_code == 401
            assert client.get(who, headers={"Authorization": f"Bearer {token}"}).json()["name"] == "web"
        for name, expected in (("team", 200), ("stranger", 401)):
            with httpx.Client(verify=client_context(authority, authority.issue(name))) as client:
                answer = client.get(who)
                assert answer.status_code == expected
        other = tmp_path / "other"
        other.mkdir()
        foreign = client_context(authority, Authority(other).issue("team"))
        with httpx.Client(verify=foreign) as client, pytest.raises(httpx.HTTPError):
            client.get(who)
        old = client_context(authority)
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        with httpx.Client(verify=old) as client, pytest.raises(httpx.HTTPError):
            client.get(who)
        with pytest.raises(httpx.HTTPError):
            httpx.get(who.replace("https", "http"))


def test_a_renewed_certificate_is_used_and_a_broken_one_is_not(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("daemon")
    tls = TlsSource(TlsFiles(*pair))
    with served_door(tls=tls) as server:
        port = int(server.url.rpartition(":")[2])
        first = serial_of(port, authority)
        pair[0].write_text("no certificate")
        tls.refresh()
        assert serial_of(port, authority) == first
        authority.issue("daemon")
        tls.refresh()
        assert serial_of(port, authority) != first


def test_a_look_at_the_certificates_that_hangs_does_not_keep_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file server that does not answer: the end of the daemon waited for it."""
    gate, looks = threading.Event(), threading.Event()

    def hang(_: TlsSource) -> None:
        looks.set()
        gate.wait(60)

    monkeypatch.setattr(TlsSource, "refresh", hang)
    monkeypatch.setattr("kvtier.web.transport.tls_source.CHECK_S", 0.01)
    tls = TlsSource(TlsFiles(*Authority(tmp_path).issue("daemon")))

    def serve() -> None:
        with served_door(tls=tls):
            looks.wait(30)

    served = threading.Thread(target=serve)
    served.start()
    served.join(10)
    has_ended = not served.is_alive()
    gate.set()
    served.join()
    assert has_ended


def test_with_tls_there_is_an_api_beyond_loopback(tmp_path: Path) -> None:
    gatekeeper = gatekeeper_in(tmp_path)
    _, token = gatekeeper.grants.create(WantedGrant(name="web", role=Role.VIEWER), time.time())
    scope = {
        "type": "http", "method": "GET", "scheme": "https", "path": "/api/v1/status", "query_string": b"",
        "headers": [(b"authorization", f"Bearer {token}".encode())], "client": ("192.0.2.9", 5),
        "server": ("192.0.2.1", 9464), "state": {},
    }  # fmt: skip
    found = Callers("0.0.0.0", gatekeeper, has_tls=True).caller_of(Request(scope))
    assert isinstance(found, Caller)
    assert (found.name, found.address) == ("web", "192.0.2.9")
    refused = Callers("0.0.0.0", gatekeeper).caller_of(Request(scope))
    assert not isinstance(refused, Caller)
    assert "access.tls_cert_file" in refused.detail


def test_connections_without_a_handshake_are_bounded_in_number_and_time(tmp_path: Path) -> None:
    """They did not count, and lasted a minute each: a stranger took the descriptors that engines and packs need."""
    authority = Authority(tmp_path)
    bounds = HttpBounds(max_connections=4, header_timeout_s=3.0, sweep_s=0.05)
    tls = TlsSource(TlsFiles(*authority.issue("daemon")))
    with served_door(tls=tls, bounds=bounds) as server, ExitStack() as opened:
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        began_s = time.monotonic()
        silent = [opened.enter_context(closing(socket.create_connection(address, timeout=10))) for _ in range(8)]
        for each in silent[4:]:
            assert each.recv(1) == b""
        for each in silent[:4]:
            assert each.recv(1) == b""
        assert time.monotonic() - began_s > 2.9, "within the bound they have their time"
        with httpx.Client(verify=client_context(authority)) as client:
            assert client.get(f"{server.url}/healthz").status_code == 200
