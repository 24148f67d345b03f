"""Who may ask over HTTP, and what every answer says to browsers."""

import time
from functools import partial
from pathlib import Path

import httpx
import pytest
from starlette.requests import Request

from kvtier.access.caller import Caller, Door, Role
from kvtier.access.gatekeeper import Gatekeeper
from kvtier.access.grants import WantedGrant
from kvtier.core.loopback import is_loopback_host
from kvtier.web.callers import CERTIFICATE, Callers
from tests.unit.web.http_rig import gatekeeper_in, headers_of_viewer, served_door

OWN = "127.0.0.1:9464"


def caller_of(
    listen: str = "127.0.0.1",
    method: str = "GET",
    gatekeeper: Gatekeeper | None = None,
    certificate: str = "",
    **headers: str,
) -> Caller | str:
    named = {name.lower().replace("_", "-"): value for name, value in ({"host": OWN} | headers).items()}
    raw = [(name.encode(), value.encode()) for name, value in named.items()]
    scope = {
        "type": "http", "method": method, "scheme": "http", "path": "/api/v1/status", "query_string": b"",
        "headers": raw, "client": ("127.0.0.1", 5), "server": ("127.0.0.1", 9464),
        "state": {CERTIFICATE: certificate},
    }  # fmt: skip
    open_to_all = gatekeeper_in(Path("/nonexistent"), needs_credentials=False)
    found = Callers(listen, gatekeeper or open_to_all).caller_of(Request(scope))
    return found if isinstance(found, Caller) else found.detail


def test_without_credentials_a_client_on_this_host_is_an_operator() -> None:
    for host in (OWN, "127.0.0.1", "localhost:9464", "LOCALHOST", "[::1]:9464", "127.8.8.8:1"):
        assert caller_of(host=host) == Caller(name="anyone", role=Role.OPERATOR, door=Door.HTTP, address="127.0.0.1")


@pytest.mark.parametrize(
    "host",
    ["", "evil.example", "evil.example:9464", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1:9464",
     "127.0.0.1@evil.example", "evil.example#127.0.0.1", "[::1", "::1", "0.0.0.0:9464"],
)  # fmt: skip
def test_a_name_that_was_rebound_to_this_host_is_refused(host: str) -> None:
    assert "Host header" in str(caller_of(host=host))


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_pages_of_other_origins_change_nothing(method: str) -> None:
    own = f"http://{OWN}"
    assert isinstance(caller_of(method=method), Caller)
    assert isinstance(caller_of(method=method, origin=own), Caller)
    assert isinstance(caller_of(method=method, origin=own, sec_fetch_site="same-origin"), Caller)
    others = ("http://evil.example", "null", "http://127.0.0.1:8000", "https://127.0.0.1:9464", "http://localhost:9464")
    no_urls = ("http://[", "http://a]", "//", "")
    for origin in (*others, *no_urls):
        assert "another origin" in str(caller_of(method=method, origin=origin))
    assert "another origin" in str(caller_of(method=method, sec_fetch_site="cross-site"))


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_without_tokens_pages_of_other_origins_take_no_places(tmp_path: Path, site: str) -> None:
    """They read nothing, and could hold all streams of events."""
    assert "another origin" in str(caller_of(sec_fetch_site=site))
    assert isinstance(caller_of(sec_fetch_site="none"), Caller)
    gatekeeper = gatekeeper_in(tmp_path)
    assert isinstance(
        caller_of(gatekeeper=gatekeeper, sec_fetch_site=site, **headers_of_viewer(gatekeeper, "a")), Caller
    )


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_certificate_which_browsers_add_by_themselves_serves_no_page_of_another_origin(
    tmp_path: Path, site: str
) -> None:
    """Any page could have a browser of an operator hold all streams of events in the operator's name."""
    gatekeeper = gatekeeper_in(tmp_path)
    gatekeeper.grants.create(WantedGrant(name="ops", role=Role.OPERATOR, certificate="ops.example"), time.time())
    named = partial(caller_of, gatekeeper=gatekeeper, certificate="ops.example")
    assert "another origin" in str(named(sec_fetch_site=site))
    for found in (named(), named(sec_fetch_site="none"), named(sec_fetch_site="same-origin")):
        assert isinstance(found, Caller)
        assert found.name == "ops"


def test_behind_a_proxy_that_ends_tls_the_console_changes_things_too(tmp_path: Path) -> None:
    """Its page is https, what reaches the daemon is http: every change was refused."""
    gatekeeper = gatekeeper_in(tmp_path)
    own = headers_of_viewer(gatekeeper, "web") | {"host": "kv.example"}
    for origin, is_own in (("https://kv.example", True), ("http://kv.example", True), ("https://kv.example:1", False)):
        found = caller_of(method="PUT", gatekeeper=gatekeeper, **own, origin=origin)
        assert isinstance(found, Caller) == is_own, origin


def test_beyond_loopback_there_is_no_api() -> None:
    assert "http.listen" in str(caller_of("0.0.0.0"))
    assert "http.listen" in str(caller_of("10.0.0.1"))
    assert isinstance(caller_of("::1"), Caller)
    assert not is_loopback_host("localhost.evil.example")


def test_every_answer_has_the_headers_that_browsers_need() -> None:
    with served_door() as server:
        for path in ("/metrics", "/healthz", "/nothing", "/api/v1/whoami", "/api/v1/nothing", "/openapi.json"):
            answer = httpx.get(server.url + path)
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["x-frame-options"] == "DENY"
            assert answer.headers["referrer-policy"] == "no-referrer"
            assert (answer.headers.get("cache-control") == "no-store") == path.startswith("/api/")
            assert "access-control-allow-origin" not in answer.headers


def test_what_is_refused_reaches_no_handler_and_metrics_need_no_name() -> None:
    with served_door() as server:
        answer = httpx.put(f"{server.url}/api/v1/prompts/p", headers={"Host": "evil.example"}, content=b"{")
        assert (answer.status_code, answer.json()["title"]) == (403, "ForbiddenError")
        assert httpx.get(f"{server.url}/metrics", headers={"Host": "prometheus.example"}).status_code == 200


def test_a_token_says_who_asks_and_without_one_nothing_is_said(tmp_path: Path) -> None:
    gatekeeper = gatekeeper_in(tmp_path)
    wanted = WantedGrant(name="web", role=Role.VIEWER, owner="", certificate="", ttl_s=0)
    _, token = gatekeeper.grants.create(wanted, time.time())
    with served_door(gatekeeper=gatekeeper) as server:
        url = f"{server.url}/api/v1/whoami"
        for headers in ({}, {"Authorization": "Bearer kvt_" + "x" * 43}, {"Authorization": f"Basic {token}"}):
            answer = httpx.get(url, headers=headers)
            assert (answer.status_code, answer.json()["title"]) == (401, "UnauthenticatedError")
            assert answer.headers["www-authenticate"].startswith("Bearer")
            assert token not in answer.text
        found = httpx.get(url, headers={"Authorization": f"Bearer {token}", "Host": "a-tunnel.example"}).json()
        assert (found["name"], found["role"]) == ("web", "viewer")
        assert httpx.get(f"{server.url}/metrics").status_code == 200
        gatekeeper.grants.revoke("web")
        assert httpx.get(url, headers={"Authorization": f"Bearer {token}"}).status_code == 401


def test_wrong_tokens_are_slowed_and_right_ones_are_not(tmp_path: Path) -> None:
    gatekeeper = gatekeeper_in(tmp_path)
    wanted = WantedGrant(name="web", role=Role.VIEWER, owner="", certificate="", ttl_s=0)
    _, token = gatekeeper.grants.create(wanted, time.time())
    with served_door(gatekeeper=gatekeeper) as server, httpx.Client(base_url=f"{server.url}/api/v1") as client:
        statuses = [client.get("/whoami", headers={"Authorization": "Bearer x"}).status_code for _ in range(22)]
        assert (statuses[0], statuses[-1]) == (401, 429)
        assert client.get("/whoami", headers={"Authorization": f"Bearer {token}"}).status_code == 200
