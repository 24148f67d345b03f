"""Requests made from the description of the API, `/openapi.json`: a new route is fuzzed by itself.

A request names who asks by a mark, for which the target puts the token of its daemon: so inputs can be kept.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from tests.fakes.bundles import bundle_bytes, old_bundle
from tests.fuzz.attacked_daemon import SECRET_NAME
from tests.fuzz.mutation import Choices

VIEWER, OPERATOR, ADMIN = b"@viewer@", b"@operator@", b"@admin@"
OWN_NAME = "own/prompt"
OWN_NAMESPACE, SECRET_NAMESPACE = "@own-namespace@", "@secret-namespace@"
OTHER_PATHS = ("/", "/static/app.js", "/static/../etc/passwd", "/metrics", "/healthz", "/readyz", "/openapi.json")
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "get", "X" * 40)
BUNDLE_MARK = b'{"__metadata__"'

_TEXTS: Sequence[str] = (
    *("", "p", "q", OWN_NAME, SECRET_NAME, "p@1", "auto-1", "a/b/../c", "model", "team=a,!b", "hour", "disk"),
    *("durable", "x" * 3000, "\0", "a\r\nX-Injected: 1", "\x1b[2J", "\u202e", "\ud800", "\udfff\ud800"),
    *("ö" * 200, "[" * 3000, OWN_NAMESPACE, SECRET_NAMESPACE, "0" * 32, "%", "%2F", "%00", "..", ".", "@"),
    *("{name}", "a?b#c", "\ufffe", " "),
)
_NUMBERS = (0, 1, -1, 2, 7, 16, 80, 1000, 4096, 2**31, 2**32, 2**53 + 1, 2**63, 2**64, -(2**63), 10**30, 0.5, 1e308)
_JUNK: Sequence[Any] = (None, True, [], {}, [[]], {"a": {"b": []}}, "text", 3, float("nan"), float("inf"), "\ud800")
_RAW_BODIES = (
    *(b"", b"[", b"null", b"[]", b'"text"', b"\xff\xfe", b"\xef\xbb\xbf{}", b'{"a":' * 500, b"[" * 100_000),
    *(b'{"ttl_s": 1, "ttl_s": 2}', b'{"tokens": [1e999]}', b'{"tokens": [' + b"9" * 5000 + b"]}", b"{}" * 3),
    *(b'{"name": "\xed\xa0\x80"}', b'{"system": "a", "text": "b"}', b'{"tokens": [0.5, -1], "warm": false}', b"{}\0"),
)
_PROMPTS = "set: s\nprompts:\n"
_DECLARED = (
    *("", "- a", "prompts: []\n", f"{_PROMPTS}- name: p\n  system: hello\n", "&a [*a, *a]", "%YAML 9.9\n---\n"),
    *(f"{_PROMPTS}- {{name: q, tokens: [1, 2, 3]}}\n", f"{_PROMPTS}- name: p\n  system_file: /etc/passwd\n"),
    *(f"{_PROMPTS}- name: {SECRET_NAME}\n  system: mine\n", f"{_PROMPTS}- name: p\n  system: a\n  labels: {{a: 1}}\n"),
    *('{"prompts": [{"name": "p", "messages": [{"role": "system", "content": "x"}]}]}', "!!python/object:os {}"),
)
_AUTHORIZATIONS: Sequence[bytes] = (
    *(b"Bearer " + VIEWER, b"Bearer " + VIEWER, b"Bearer " + OPERATOR, b"Bearer " + OPERATOR, b"Bearer " + ADMIN),
    *(b"bearer " + OPERATOR, b"Bearer   " + OPERATOR),
)
_MALFORMED: Sequence[bytes] = (
    *(b"", b"Bearer", b"Bearer ", b"Basic YTpi", b"Bearer kvt_" + b"A" * 43, b"Bearer \xff\xfe"),
    *(b"Bearer " + b"A" * 9000, b"Bearer " + OPERATOR + b" x", b"Bearer " + OPERATOR + b"," + ADMIN),
    *(b"Token " + OPERATOR, b"Bearer\t" + OPERATOR),
)
_HEADERS: Sequence[bytes] = (
    *(b"Content-Type: application/json", b"Content-Type: multipart/form-data; boundary=x", b"Content-Type: \xff"),
    *(b"Origin: http://127.0.0.1", b"Origin: null", b"Origin: http://[", b"Origin: http://a\xff", b"Cookie: a=b"),
    *(b"Sec-Fetch-Site: cross-site", b"If-None-Match: *", b"Accept-Encoding: gzip", b"Accept-Encoding: gzip;q=x"),
    *(b"Accept: application/openmetrics-text", b"Accept: a/b;q=;;,", b"Accept: */*", b"Last-Event-ID: 7"),
    *(b"X-Forwarded-For: 1.2.3.4", b"X-HTTP-Method-Override: DELETE", b"Range: bytes=0-", b"Host: evil.example"),
    *(b"Expect: 100-continue", b"Expect: x", b"Upgrade: websocket\r\nConnection: upgrade", b"Connection: close"),
    *(b"TE: trailers", b"X-Kvtier-Acting-For: {}", b"kvtier-acting-for: {}", b"Content-Encoding: gzip"),
)


@dataclass(frozen=True)
class Operation:
    """A route of the description, with one method."""

    method: str
    path: str
    parameters: Sequence[Any]
    body: Any
    """Media types with their schemas; None: it takes none."""


def operations_of(description: Any) -> list[Operation]:
    """Return every route of `/openapi.json`."""
    found = []
    for path, methods in description["paths"].items():
        for method, each in methods.items():
            body = each.get("requestBody", {}).get("content")
            found.append(Operation(method.upper(), path, each.get("parameters", []), body))
    return found


def request_of(method: str, target: str, body: bytes = b"", *headers: bytes, authorization: bytes = b"") -> bytes:
    """Return a request with the length of its body."""
    lines = [f"{method} {target} HTTP/1.1".encode(), b"Host: 127.0.0.1", *headers]
    if authorization:
        lines.append(b"Authorization: " + authorization)
    if body:
        lines.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join([*lines, b"", body])


def plain_request(operation: Operation, mark: bytes) -> bytes:
    """Return a request without anything unusual, of whom the mark names."""
    path = operation.path.replace("{name}", quote(OWN_NAME, safe="")).replace("{namespace_id}", OWN_NAMESPACE)
    path = path.replace("{request_id}", "cmpl-1")
    body = b"" if operation.body is None else _plain_body(operation.body)
    return request_of(operation.method, path, body, authorization=b"Bearer " + mark)


def _plain_body(content: Any) -> bytes:
    if "application/octet-stream" in content:
        return bundle_bytes()
    if "application/yaml" in content:
        return _DECLARED[3].encode()
    names = content["application/json"]["schema"]["properties"]
    if "tokens" in names:
        return b'{"tokens": [1, 2, 3], "warm": false}' if "warm" in names else b'{"tokens": [1, 2, 3]}'
    required = content["application/json"]["schema"].get("required", [])
    if "priority" in names and not required:
        return b'{"priority": 5, "labels": {"team": "a"}}'
    return json.dumps(dict.fromkeys(required, "p")).encode()


def made_request(operations: Sequence[Operation], choices: Choices) -> bytes:
    """Return a request that the choices make: mostly one that a route takes, with values that it may not like."""
    operation = operations[choices.next(len(operations))]
    method, path = operation.method, operation.path
    if choices.next(12) == 0:
        method = METHODS[choices.next(len(METHODS))]
    path = OTHER_PATHS[choices.next(len(OTHER_PATHS))] if choices.next(15) == 0 else _filled(operation, choices)
    headers = [_HEADERS[choices.next(len(_HEADERS))] for _ in range(max(0, choices.next(5) - 2))]
    known = choices.next(8)
    pool = _AUTHORIZATIONS if known else _MALFORMED
    authorization = pool[choices.next(len(pool))]
    body = _made_body(operation.body, choices)
    if choices.next(6):
        return request_of(method, path, body, *headers, authorization=authorization)
    framed = [b"Transfer-Encoding: chunked", *headers]
    return request_of(method, path, b"", *framed, authorization=authorization) + _chunked(body, choices)


def _chunked(body: bytes, choices: Choices) -> bytes:
    size = (1, 7, 4096, 65536)[choices.next(4)] if len(body) < 2000 else 4096
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    end = (b"0\r\n\r\n", b"0\r\nX-Trailer: 1\r\n\r\n", b"0;ext=1\r\n\r\n", b"zz\r\n\r\n")[choices.next(4)]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + end


def _filled(operation: Operation, choices: Choices) -> str:
    path, query = operation.path, []
    for parameter in operation.parameters:
        if parameter["in"] == "path":
            path = path.replace(f"{{{parameter['name']}}}", _quoted(_text(choices), choices))
        elif choices.next(2):
            values = [_query_value(parameter["schema"], choices) for _ in range(1 + (choices.next(6) == 0))]
            query += [f"{parameter['name']}={_quoted(value, choices)}" for value in values]
    if choices.next(10) == 0:
        query.append(("a=b", "=", "&&", "%ff", "name=%ed%a0%80", "x" * 2000)[choices.next(6)])
    if choices.next(20) == 0:
        path += "/"
    return f"{path}?{'&'.join(query)}" if query else path


def _quoted(text: str, choices: Choices) -> str:
    if text in (OWN_NAMESPACE, SECRET_NAMESPACE):
        return text
    return quote(text, safe="" if choices.next(6) else "/%?#@", errors="surrogatepass")


def _text(choices: Choices) -> str:
    return OWN_NAME if choices.next(3) == 0 else _TEXTS[choices.next(len(_TEXTS))]


def _query_value(schema: Any, choices: Choices) -> str:
    value = _value(schema, choices, 0)
    if isinstance(value, list):
        value = value[0] if value else ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _made_body(content: Any, choices: Choices) -> bytes:
    if content is None:
        return b"" if choices.next(8) else b"{}"
    if choices.next(8) == 0:
        return _RAW_BODIES[choices.next(len(_RAW_BODIES))]
    if "application/octet-stream" in content:
        return _made_bundle(choices)
    if "application/yaml" in content:
        return _DECLARED[choices.next(len(_DECLARED))].encode()
    return json.dumps(_value(content["application/json"]["schema"], choices, 0)).encode()


def _made_bundle(choices: Choices) -> bytes:
    data = (bundle_bytes, lambda: old_bundle(1), lambda: old_bundle(2))[choices.next(3)]()
    at = choices.next(256) * len(data) // 256
    match choices.next(5):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + bytes([data[at] ^ 1 << choices.next(8)]) + data[at + 1 :]
        case 2:
            return data + bytes(choices.next(256))
        case 3:
            return data.replace(b'"p"', json.dumps(_text(choices)).encode("utf-8", "replace"), 1)
        case _:
            return data


def _value(schema: Any, choices: Choices, depth: int) -> Any:
    """Return a value of a schema, or now and then one of another type."""
    if choices.next(12) == 0 or depth > 4:
        return _JUNK[choices.next(len(_JUNK))]
    if "anyOf" in schema:
        return _value(schema["anyOf"][choices.next(len(schema["anyOf"]))], choices, depth)
    if "enum" in schema:
        return schema["enum"][choices.next(len(schema["enum"]))]
    match schema.get("type"):
        case "object":
            return _object(schema, choices, depth)
        case "array":
            if schema["items"].get("type") == "integer" and choices.next(2):
                return list(range(choices.next(200)))
            return [_value(schema["items"], choices, depth + 1) for _ in range(choices.next(4))]
        case "integer" | "number":
            number = _NUMBERS[choices.next(len(_NUMBERS))]
            return number if choices.next(2) else choices.next(100)
        case "boolean":
            return bool(choices.next(2))
        case "null":
            return None
        case _:
            return _text(choices)


def _object(schema: Any, choices: Choices, depth: int) -> dict[str, Any]:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    value = {
        name: _value(each, choices, depth + 1)
        for name, each in properties.items()
        if (name in required and choices.next(20)) or choices.next(4) == 0
    }
    if schema.get("additionalProperties", True) is not False or choices.next(20) == 0:
        for _ in range(choices.next(3)):
            value[("role", "content", "type", _text(choices))[choices.next(4)]] = _TEXTS[choices.next(len(_TEXTS))]
    return value
