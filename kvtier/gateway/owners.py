"""Whose a pin is: a digest of the caller's API key, or of a header that a proxy in front sets."""

import hashlib

from kvtier.gateway.asgi import Headers, header

_BEARER = b"bearer "


def owner_of(headers: Headers, owner_header: str = "") -> str:
    """Return 16 hex digits that stand for the caller; empty when it names no key, and then nothing is pinned.

    Of several `authorization` headers the first counts, as for vLLM, which checks its key: by the others a client with
    one key would be any number of owners. Of several trusted headers a client may have sent one, so none counts.

    Args:
        headers: Of the request.
        owner_header: A header whose value is the owner, in place of the key. Only a proxy that sets it for every
            request makes it trustworthy.
    """
    trusted = [value.strip() for name, value in headers if name.lower() == owner_header.lower().encode("latin-1")]
    if len(trusted) > 1:
        return ""
    owner = trusted[0] if trusted else b""
    if not owner:
        authorization = header(headers, b"authorization").strip()
        bearer = authorization[len(_BEARER) :] if authorization.lower().startswith(_BEARER) else b""
        owner = bearer.strip() or header(headers, b"x-api-key").strip()
    return hashlib.sha256(owner).hexdigest()[:16] if owner else ""
