"""Whose a pin is: a digest of the caller's API key, or of a header that a proxy in front sets."""

import hashlib
from collections.abc import Iterable, Mapping

_BEARER = b"bearer "


def owner_of(headers: Iterable[tuple[bytes, bytes]], owner_header: str = "") -> str:
    """Return 16 hex digits that stand for the caller; empty when it names no key, and then nothing is pinned.

    Args:
        headers: Of the request, names in lower case as ASGI gives them.
        owner_header: A header whose value is the owner, in place of the key. Only a proxy that sets it for every
            request makes it trustworthy.
    """
    values: Mapping[bytes, bytes] = dict(headers)
    owner = values.get(owner_header.lower().encode("latin-1"), b"").strip() if owner_header else b""
    if not owner:
        authorization = values.get(b"authorization", b"").strip()
        bearer = authorization[len(_BEARER) :] if authorization.lower().startswith(_BEARER) else b""
        owner = bearer.strip() or values.get(b"x-api-key", b"").strip()
    return hashlib.sha256(owner).hexdigest()[:16] if owner else ""
