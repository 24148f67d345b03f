"""Who asks over HTTP. One place, before any handler: what is refused here reads no body.

Today there are no credentials: a client that reaches a loopback address is the operator of this host, as a process that
may open the unix socket is. Bearer tokens and client certificates belong here: `Callers.caller_of` gets the whole
request, and what it returns goes with every call to the daemon (ADR 38).
"""

import ipaddress
import re
from dataclasses import dataclass
from http import HTTPStatus
from typing import Literal
from urllib.parse import urlsplit

from starlette.requests import Request

from kvtier.web.problems import Problem

Role = Literal["viewer", "operator", "admin"]

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\s\[\]]+)(?::[0-9]{1,5})?")


@dataclass(frozen=True, kw_only=True)
class Caller:
    """Who asks.

    Attributes:
        owner: Whose prompts the caller sees and changes; empty: all.
        address: Where the request came from; may be empty.
    """

    name: str
    role: Role
    owner: str = ""
    address: str = ""


class Callers:
    """Decides who asks; today by where the server listens and by the request's headers."""

    def __init__(self, listen_host: str) -> None:
        """Take the host at which the server listens, as an address."""
        self._is_loopback = is_loopback(listen_host)

    def caller_of(self, request: Request) -> Caller | Problem:
        """Return who asks, or why the request is refused. Reads no body."""
        if not self._is_loopback:
            return _refused(
                "the API is served on loopback addresses only, because it asks for no credentials; set http.listen to "
                "127.0.0.1:9464, and reach it from elsewhere through ssh -L or kubectl port-forward"
            )
        # A page of another site can have its own name resolve to 127.0.0.1: that name would be in Host.
        host = _HOST.fullmatch(request.headers.get("host", ""))
        if host is None or not is_loopback(host[1].strip("[]")):
            return _refused("the Host header must name a loopback address: 127.0.0.1, [::1] or localhost")
        if request.method not in _SAFE_METHODS and not _is_same_origin(request):
            return _refused("the request comes from a page of another origin, which may not change anything")
        address = request.client.host if request.client else ""
        return Caller(name="local", role="admin", address=address)


def is_loopback(host: str) -> bool:
    """Return whether a name or an address is this host's loopback."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"


def _is_same_origin(request: Request) -> bool:
    """Return whether a browser sent the request from a page of this server, or no browser sent it.

    Browsers send Origin with every request that may change something, and programs do not.
    """
    origin = request.headers.get("origin")
    if origin is None:
        return request.headers.get("sec-fetch-site", "none") in ("none", "same-origin")
    parts = urlsplit(origin)
    return (parts.scheme, parts.netloc) == (request.url.scheme, request.headers.get("host"))


def _refused(detail: str) -> Problem:
    return Problem(status=HTTPStatus.FORBIDDEN, title="PermissionDeniedError", detail=detail)
