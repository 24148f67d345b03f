"""HTTP of a real daemon in a process of its own: raw bytes on a connection, and requests made for every route.

An input is what is sent over one connection; marks in it stand for the tokens and namespaces of this daemon. Who has
the token of an admin may change everything, so the bystander's prompt is stored again after that; who has not must
neither see nor change it.
"""

import asyncio
import hashlib
import json
import re
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import quote, unquote_to_bytes

from kvtier._pb import cache_pb2
from kvtier.web.request_guard import API
from tests.fakes.waiting import wait_for
from tests.fuzz.attacked_daemon import (
    SECRET_LABEL,
    SECRET_NAME,
    SECRET_SALT,
    SECRET_TEXT,
    SECRET_TOKENS,
    AttackedDaemon,
    StoredPrompt,
)
from tests.fuzz.base import ACCEPTED, DaemonError, reason
from tests.fuzz.file_targets import BundleTarget
from tests.fuzz.mutation import Choices
from tests.fuzz.wire.exchange import Answer, Requests, exchanged, requests_in
from tests.fuzz.wire.raw_requests import raw_requests
from tests.fuzz.wire.request_making import (
    ADMIN,
    BUNDLE_MARK,
    METHODS,
    OPERATOR,
    OTHER_PATHS,
    OWN_NAME,
    OWN_NAMESPACE,
    SECRET_NAMESPACE,
    VIEWER,
    made_request,
    operations_of,
    plain_request,
    request_of,
)

OWNER = "fuzzers"
NO_VLLM = "http://127.0.0.1:1"
_UVICORNS = b"Invalid HTTP request received."
"""Its own answer to what is no HTTP; no code of ours has run."""
_FAILURES = {502, 503, 504, 507}
"""Answered on purpose, each with a problem document that says why; see docs/http-api.md."""
_DEAD = {"DaemonUnreachableError", "DaemonSilentError", "DrainingError"}
"""Titles of those that this daemon has no reason for."""
_SECURITY = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}
_POLICY = "content-security-policy"
_HEADERS = {
    *(
        *_SECURITY,
        _POLICY,
        "content-type",
        "content-length",
        "transfer-encoding",
        "connection",
        "date",
        "cache-control",
    ),
    *("allow", "etag", "location", "retry-after", "vary", "www-authenticate", "content-encoding", "x-accel-buffering"),
}
_MAX_DETAIL_CHARS = 5000
_IMPORT = "/api/v1/bundles?name=q&replace=true"
_EVENT_S = 0.1
"""Until a stream of events has begun."""


class HttpTarget:
    """Implements `Target`; a daemon of its own from the start to `close`."""

    name = "http"
    words: Sequence[bytes] = (
        *(b"\r\n", b"\n", b"\r\n\r\n", b" ", b"\0", b"%0d%0a", b"%2f", b"..", b"//", b"?", b"HTTP/1.0", b"HTTP/2.0"),
        *(b"Content-Length: ", b"Transfer-Encoding: chunked\r\n", b"0\r\n\r\n", b"GET /api/v1/status HTTP/1.1\r\n"),
        *(b"Connection: close\r\n", b"Expect: 100-continue\r\n", b"Authorization: Bearer ", VIEWER, OPERATOR, ADMIN),
        *(
            SECRET_NAME.encode(),
            OWN_NAMESPACE.encode(),
            SECRET_NAMESPACE.encode(),
            b"\xc2\xa0",
            b"\xff",
            b"X: y\r\n" * 500,
        ),
    )

    def __init__(self) -> None:
        self._daemon = AttackedDaemon(
            "--http-listen=127.0.0.1:0",
            environment=[f"KVTIER_HTTP_VLLM_URL={NO_VLLM}"],
        )
        wait_for(lambda: " http_served " in self._daemon.log.read_text())
        (url,) = re.findall(r" http_served url=(http://127\.0\.0\.1:[0-9]+)\n", self._daemon.log.read_text())
        self._port = int(url.rpartition(":")[2])
        with urllib.request.urlopen(f"{url}/openapi.json") as answer:
            self._operations = operations_of(json.load(answer))
        self._bundles = BundleTarget()
        self._marks = self._daemon.loop.run_until_complete(self._open())
        call = {"Authorization": f"Bearer {self._marks[OPERATOR].decode()}"}
        path = f"{url}/api/v1/prompts/{quote(OWN_NAME, safe='')}/bundle"
        with urllib.request.urlopen(urllib.request.Request(path, headers=call)) as answer:
            self._exported: bytes = answer.read()
        secret_bytes = [self._daemon.bystander.engine.payload(key)[:64] for key in self._daemon.bystander.keys]
        tokens = ", ".join(map(str, SECRET_TOKENS[:4])).encode()
        self._secrets = [*map(str.encode, (SECRET_TEXT, SECRET_SALT, SECRET_LABEL)), tokens, *secret_bytes]

    async def _open(self) -> dict[bytes, bytes]:
        stub, marks = self._daemon.stub, {}
        for mark, role, owner in ((VIEWER, "viewer", OWNER), (OPERATOR, "operator", OWNER), (ADMIN, "admin", "")):
            grant = await stub.CreateGrant(cache_pb2.CreateGrantRequest(name=role, role=role, owner=owner))
            marks[mark] = grant.token.encode()
        own = cache_pb2.PinRequest(name=OWN_NAME, tokens=range(80), model="model", owner=OWNER)
        self._own = StoredPrompt.of(self._daemon.config, own)
        await self._own.store(stub)
        marks[OWN_NAMESPACE.encode()] = self._own.engine.welcome.namespace_id.encode()
        marks[SECRET_NAMESPACE.encode()] = self._daemon.bystander.engine.welcome.namespace_id.encode()
        return marks

    @property
    def peak_rss_mib(self) -> float:
        """Of the daemon."""
        return self._daemon.peak_rss_mib

    def seeds(self) -> Sequence[bytes]:
        """See `Target`: each route as each caller, each method at some paths, what HTTP is made of."""
        found = [plain_request(each, mark) for each in self._operations for mark in (VIEWER, OPERATOR, ADMIN)]
        found += [request_of("GET", path) for path in OTHER_PATHS]
        found += [request_of(method, path) for method in METHODS for path in ("/healthz", "/api/v1/status")]
        status = request_of("GET", "/api/v1/status", authorization=b"Bearer " + VIEWER)
        explain = request_of("POST", "/api/v1/explain", authorization=b"Bearer " + OPERATOR)
        chunked = explain[:-2] + b'Transfer-Encoding: chunked\r\n\r\n5\r\n{"a":\r\n2\r\n1}\r\n0\r\n\r\n'
        found.append(request_of("POST", _IMPORT, self._exported, authorization=b"Bearer " + OPERATOR))
        return [*found, status * 5, chunked, status + chunked + status, *raw_requests()]

    def mend(self, data: bytes) -> bytes:
        """Make the digest of a bundle right; of all else, make a request that a route takes, by what the bytes are."""
        _, mark, body = data.partition(b"\r\n\r\n")
        if mark and BUNDLE_MARK in body[:200]:
            bundle = self._bundles.mend(body)
            return request_of("POST", _IMPORT, bundle, authorization=b"Bearer " + OPERATOR)
        return made_request(self._operations, Choices(hashlib.sha256(data).digest()))

    def read(self, data: bytes) -> str:
        """See `Target`."""
        sent = data
        for mark, value in self._marks.items():
            sent = sent.replace(mark, value)
        requests = requests_in(sent)
        is_admin = ADMIN in data
        answers = self._daemon.run(self._attack(sent, requests, is_admin))
        outcomes = [self._outcome(answer, requests, None if is_admin else unquote_to_bytes(data)) for answer in answers]
        if not outcomes:
            return "no answer: not a whole request"
        return ACCEPTED if ACCEPTED in outcomes else outcomes[0]

    async def _attack(self, sent: bytes, requests: Requests, is_admin: bool) -> list[Answer]:
        stub, bystander = self._daemon.stub, self._daemon.bystander
        exchange = asyncio.create_task(exchanged(self._port, sent, requests))
        if b"/events" in sent:  # the bystander has some
            await asyncio.wait({exchange}, timeout=_EVENT_S)
            await bystander.touch(stub)
        answers = await exchange
        if not await bystander.is_intact(stub) or (is_admin and b"quarantine" in sent):
            if not is_admin:
                raise DaemonError("the bystander's prompt was changed by a caller of another owner")
            await bystander.store_again(stub)
        if not await self._own.is_intact(stub):
            await self._own.store_again(stub)
        return answers

    def _outcome(self, answer: Answer, requests: Requests, asked: bytes | None) -> str:
        """Return how a request was answered; `asked` by a caller who may not see the bystander's."""
        is_cut = not answer.is_whole and _UVICORNS.startswith(answer.body)
        if (
            (requests.is_refused or requests.is_doubtful)
            and answer.status == 400
            and (answer.body == _UVICORNS or is_cut)
        ):
            return "refused by uvicorn"
        path = unquote_to_bytes(answer.sent.target.partition(b"?")[0]) if answer.sent else b""
        is_api = path.startswith(API.encode())
        _check_headers(answer, is_api)
        if asked is not None:
            self._check_secrets(answer, asked)
        return _checked_body(answer, path, is_api)

    def _check_secrets(self, answer: Answer, asked: bytes) -> None:
        shown = answer.body + repr(answer.headers).encode()
        secrets = self._secrets if SECRET_NAME.encode() in asked else [*self._secrets, SECRET_NAME.encode()]
        for secret in secrets:
            if secret in shown and secret not in asked:
                raise DaemonError(f"a caller of another owner is shown {secret[:40]!r}")

    def close(self) -> None:
        """See `Target`."""
        self._bundles.close()
        self._daemon.close(is_whole=True)


def _check_headers(answer: Answer, is_api: bool) -> None:
    unknown = answer.headers.keys() - _HEADERS
    if unknown:
        raise DaemonError(f"{answer.status} has headers that no code of ours sets: {sorted(unknown)}")
    missing = [name for name, value in _SECURITY.items() if answer.headers.get(name) != value]
    if missing or "default-src 'none'" not in answer.headers.get(_POLICY, ""):
        raise DaemonError(f"{answer.status} lacks {missing or _POLICY}: {answer.headers} {answer.body[:200]!r}")
    lengths = {b"content-length", b"transfer-encoding"}
    if answer.sent and lengths <= dict(answer.sent.headers).keys() and answer.headers.get("connection") != "close":
        raise DaemonError(f"{answer.status} to a request with two lengths, and the connection goes on")
    if is_api and "no-store" not in answer.headers.get("cache-control", ""):
        raise DaemonError(f"{answer.status} of the API may be cached: {answer.headers}")


def _checked_body(answer: Answer, path: bytes, is_api: bool) -> str:
    status, is_head = answer.status, answer.sent is not None and answer.sent.method == b"HEAD"
    media_type = answer.headers.get("content-type", "")
    if status >= 500 and status not in _FAILURES:
        raise DaemonError(f"{path[:200]!r}: {status}: {answer.body[:500]!r}")
    if status >= 400 and (is_api or status > 500) and not is_head and path != b"/readyz":
        return _refusal(answer, path)
    if status < 400 and media_type == "application/json" and not is_head and answer.is_whole:
        json.loads(answer.body, parse_constant=_no_constant)
    return ACCEPTED if status < 400 else f"{status} {path[:20].decode('latin-1')}"


def _no_constant(name: str) -> Any:
    raise DaemonError(f"an answer has {name}, which is no JSON")


def _refusal(answer: Answer, path: bytes) -> str:
    document: Any = None
    with suppress(ValueError):
        document = json.loads(answer.body)
    is_problem = isinstance(document, dict) and document.keys() >= {"type", "title", "status", "detail"}
    if not is_problem or answer.headers.get("content-type") != "application/problem+json":
        raise DaemonError(f"{path[:200]!r}: {answer.status} is no problem document: {answer.body[:500]!r}")
    title, detail = document["title"], document["detail"]
    if document["status"] != answer.status or not 0 < len(detail) <= _MAX_DETAIL_CHARS:
        raise DaemonError(f"{path[:200]!r}: {answer.status} with {len(detail)} characters: {answer.body[:500]!r}")
    if title in _DEAD:
        raise DaemonError(f"{path[:200]!r}: {answer.status} {title}: {detail[:500]}")
    return reason(DaemonError(f"{answer.status} {title} {detail}"))
