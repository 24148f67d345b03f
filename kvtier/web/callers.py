"""Who asks over HTTP. One place, before any handler: what is refused here reads no body (ADR 38).

The caller goes with every call to the daemon, which checks role and owner: nothing is decided twice.
"""

import re
from http import HTTPStatus
from urllib.parse import urlsplit

from starlette.requests import Request

from kvtier.access.caller import Caller, Door
from kvtier.access.gatekeeper import Gatekeeper
from kvtier.core.loopback import is_loopback_host
from kvtier.errors import TooManyCallsError, UnauthenticatedError
from kvtier.web.problems import Problem

CERTIFICATE = "certificate"
"""In the state of a request: the common name of the client certificate that TLS has verified; empty: none."""
CHALLENGE = {"WWW-Authenticate": 'Bearer realm="kvtier"'}

_FETCH_SITE = "sec-fetch-site"
"""How browsers say which page sent a request; programs do not say it."""
_OWN_SITES = ("none", "same-origin")
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\s\[\]]+)(?::[0-9]{1,5})?")


class Callers:
    """Decides who asks."""

    def __init__(self, listen_host: str, gatekeeper: Gatekeeper, *, has_tls: bool = False) -> None:
        """Take the host at which the server listens, as an address, and what knows the grants."""
        self._gatekeeper, self._has_tls = gatekeeper, has_tls
        self._is_loopback = _is_loopback(listen_host)

    def caller_of(self, request: Request) -> Caller | Problem:
        """Return who asks, or why the request is refused. Reads no body."""
        if not self._is_loopback and not self._has_tls:
            return _refused(
                "the API is served with TLS or on loopback only, or tokens would be sent unencrypted; set "
                "access.tls_cert_file and access.tls_key_file, or set http.listen to 127.0.0.1:9464 and reach it from "
                "elsewhere through ssh -L or kubectl port-forward"
            )
        if request.method not in _SAFE_METHODS and not self._is_same_origin(request):
            return _refused("the request comes from a page of another origin, which may not change anything")
        authorization = request.headers.get("authorization")
        has_token = self._gatekeeper.needs_credentials and authorization
        # Such a page could not read the answers, but take all the places. A browser adds a certificate by itself.
        if not has_token and request.headers.get(_FETCH_SITE, "none") not in _OWN_SITES:
            return _refused("the request comes from a page of another origin, and without tokens those are refused")
        if not self._gatekeeper.needs_credentials:
            # A page of another site can have its own name resolve to 127.0.0.1: that name would be in Host.
            host = _HOST.fullmatch(request.headers.get("host", ""))
            if not self._is_loopback or host is None or not _is_loopback(host[1].strip("[]")):
                return _refused("the Host header must name a loopback address: 127.0.0.1, [::1] or localhost")
        try:
            return self._gatekeeper.identify(
                Door.HTTP,
                request.client.host if request.client else "",
                call=f"{request.method} {request.url.path}",
                authorization=authorization,
                certificate=getattr(request.state, CERTIFICATE, "") or None,
            )
        except UnauthenticatedError as error:
            title, detail = type(error).__name__, str(error)
            return Problem(status=HTTPStatus.UNAUTHORIZED, title=title, detail=detail, headers=CHALLENGE)
        except TooManyCallsError as error:
            title, detail = type(error).__name__, str(error)
            wait = {"Retry-After": "60"}
            return Problem(status=HTTPStatus.TOO_MANY_REQUESTS, title=title, detail=detail, headers=wait)

    def _is_same_origin(self, request: Request) -> bool:
        """Return whether a browser sent the request from a page of this server, or no browser sent it.

        Browsers send Origin with every request that may change something, and programs do not. Behind a proxy that
        ends TLS the page is https, and the request http. Where a token is needed, which pages of others do not have,
        that is the same origin.
        """
        origin, own = request.headers.get("origin"), request.url.scheme
        if origin is None:
            return request.headers.get(_FETCH_SITE, "none") in _OWN_SITES
        try:
            parts = urlsplit(origin)
        except ValueError:  # "http://[": no browser sends it
            return False
        schemes = {own, "https"} if self._gatekeeper.needs_credentials else {own}
        return parts.scheme in schemes and parts.netloc == request.headers.get("host")


def _is_loopback(host: str) -> bool:
    return is_loopback_host(host) or host.lower() == "localhost."


def _refused(detail: str) -> Problem:
    return Problem(status=HTTPStatus.FORBIDDEN, title="ForbiddenError", detail=detail)
