"""Whose a pin is: a digest of a header that a proxy in front sets, or else of the caller's API key."""

import hashlib

from kvtier.gateway.asgi import Headers, header

_BEARER = b"bearer "


def owner_of(headers: Headers, owner_header: str = "") -> str:
    """Return 16 hex digits that stand for the caller; empty when it has no owner, and then no marker pins anything.

    Args:
        headers: Of the request.
        owner_header: A header whose value is the owner, in place of the key: the key never counts then, or a client
            could take any value for its key. Only a proxy that sets it for every request makes it trustworthy.
    """
    owner = _trusted(headers, owner_header) if owner_header else _key(headers)
    return hashlib.sha256(owner).hexdigest()[:16] if owner else ""


def _trusted(headers: Headers, name: str) -> bytes:
    """Return the value of a header; none where it comes twice: a client may have sent one of them."""
    values = [value.strip() for each, value in headers if each.lower() == name.lower().encode("latin-1")]
    return values[0] if len(values) == 1 else b""


def _key(headers: Headers) -> bytes:
    """Return the key. Of several `authorization` headers the first counts, as for vLLM, which checks it.

    By the others a client with one key would be any number of owners.
    """
    authorization = header(headers, b"authorization").strip()
    bearer = authorization[len(_BEARER) :] if authorization.lower().startswith(_BEARER) else b""
    return bearer.strip() or header(headers, b"x-api-key").strip()
