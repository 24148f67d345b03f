"""Bytes that are nearly HTTP: lengths that disagree, chunks, headers without end, requests behind each other."""

from collections.abc import Sequence

from tests.fuzz.wire.request_making import ADMIN, OPERATOR, SECRET_NAMESPACE, VIEWER, request_of

_HIDDEN = request_of("GET", f"/api/v1/namespaces/{SECRET_NAMESPACE}", authorization=b"Bearer " + VIEWER)
_IN_CHUNKS = b"0\r\n\r\n" + _HIDDEN
_FRAMES: Sequence[tuple[bytes, bytes]] = (
    (b"Content-Length: 4\r\nTransfer-Encoding: chunked", _IN_CHUNKS),
    (b"Transfer-Encoding: chunked\r\nContent-Length: %d" % len(_IN_CHUNKS), _IN_CHUNKS),
    (b"Content-Length: 0\r\nContent-Length: %d" % len(_HIDDEN), _HIDDEN),
    (b"Content-Length: 5\r\nContent-Length: 5", b"hello" + _HIDDEN),
    (b"Content-Length: 0, %d" % len(_HIDDEN), _HIDDEN),
    (b"Content-Length: +5", b"hello" + _HIDDEN),
    (b"Content-Length: -1", _HIDDEN),
    (b"Content-Length: 0x5", b"hello" + _HIDDEN),
    (b"Content-Length: 5 ", b"hello" + _HIDDEN),
    (b"Content-Length: \xc2\xb2", b"hello"),
    (b"Content-Length: " + b"9" * 20, b"hello"),
    (b"Content-Length: " + b"9" * 400, b"hello"),
    (b"Content-Length: 40000000", b"hello"),
    (b"Transfer-Encoding: chunked, chunked", _IN_CHUNKS),
    (b"Transfer-Encoding: xchunked\r\nContent-Length: 5", b"hello" + _HIDDEN),
    (b"Transfer-Encoding: gzip, chunked", _IN_CHUNKS),
    (b"Transfer-Encoding : chunked", _IN_CHUNKS),
    (b"Transfer-Encoding:\r\n chunked\r\nContent-Length: 4", _IN_CHUNKS),
    (b"X: y\nTransfer-Encoding: chunked\r\nContent-Length: 4", _IN_CHUNKS),
    (b"Connection: content-length\r\nContent-Length: 5", b"hello" + _HIDDEN),
    (b"X: a\0b\r\nContent-Length: 0", _HIDDEN),
    (b"X: a\rb\r\nContent-Length: 0", _HIDDEN),
    (b"Transfer-Encoding: chunked", b"5\r\nhelloXX0\r\n\r\n"),
    (b"Transfer-Encoding: chunked", b"-5\r\nhello\r\n0\r\n\r\n"),
    (b"Transfer-Encoding: chunked", b"5" + b" " * 70_000 + b"\r\nhello\r\n0\r\n\r\n"),
    (b"Transfer-Encoding: chunked", b"ffffffffffffffffffff\r\nhello"),
    (b"Transfer-Encoding: chunked", b"5\nhello\n0\n\n" + _HIDDEN),
    (b"Transfer-Encoding: chunked", b"5;a=b\r\nhello\r\n0\r\nAuthorization: Bearer " + ADMIN + b"\r\n\r\n" + _HIDDEN),
    (b"Transfer-Encoding: chunked", b"0\r\n" + b"X: y\r\n" * 20_000 + b"\r\n"),
)
_TARGETS = ("/api/v1/explain", "/healthz")

_LINES: Sequence[bytes] = (
    *(b"", b"\r\n", b"\r\n" * 1000, b"\0", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
    *(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET /healthz\r\n\r\n", b"GET  /healthz HTTP/1.1\r\n\r\n"),
    *(b"GET /healthz HTTP/9.9\r\n\r\n", b"GET /healthz HTTP/1.0\r\n\r\n", b"GET /healthz HTTP/1.1\r\n\r\n"),
    *(b"GET /healthz HTTP/1.1\nHost: x\n\n", b"\x80 / HTTP/1.1\r\nHost: x\r\n\r\n", b"G" * 70_000),
    *(b"GET /" + b"a" * 70_000, b"GET /" + b"a" * 60_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n"),
    *(b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 20_000, b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 200_000),
    *(b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", b"GET / HTTP/1.1\r\nHost: \xff\r\n\r\n"),
    *(b"CONNECT 127.0.0.1:22 HTTP/1.1\r\nHost: x\r\n\r\n" + _HIDDEN, b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n"),
)
_PATHS: Sequence[bytes] = (
    *(b"http://evil.example/api/v1/status", b"//api//v1//status", b"/%61pi/v1/status", b"/api%2Fv1/status"),
    *(
        b"/api/v1/../../metrics",
        b"/\xc3\xb6",
        b"/%ff%fe%00",
        b"/api/v1/prompts/",
        b"/api/v1/prompts/%0d%0aX-Injected:%201/",
    ),
)
_PLACES: Sequence[bytes] = (b"Origin: http://[", b"Origin: http://a]", b"Origin: //", b"Host: [::1", b"Host: a:99999")
"""Headers that hold a URL, or a part of one."""


def raw_requests() -> list[bytes]:
    """Return each shape, as a request of an operator to a route that takes a body, and to one that takes none."""
    framed = [
        request_of("POST", target, b"", headers, authorization=b"Bearer " + OPERATOR) + body
        for headers, body in _FRAMES
        for target in _TARGETS
    ]
    events = request_of("GET", "/api/v1/events", authorization=b"Bearer " + OPERATOR)
    in_chunks = request_of(
        "GET", "/api/v1/events", b"", b"Transfer-Encoding: chunked", authorization=b"Bearer " + VIEWER
    )
    paths = [b"GET " + path + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" for path in _PATHS]
    places = [request_of("POST", "/api/v1/explain", b"{}", place, authorization=b"") for place in _PLACES]
    return [*framed, *paths, *places, *_LINES, events * 3, events + b"\0\0 no request\r\n\r\n", in_chunks + b"zz\r\n"]
