"""Bearer tokens: 256 random bits as text. What is kept of one is its SHA-256; a slow hash is for passwords."""

import hashlib
import re
import secrets

from kvtier.errors import UnauthenticatedError

PREFIX = "kvt_"
"""Scanners of repositories find what begins like this."""
_TOKEN = re.compile(r"kvt_[A-Za-z0-9_-]{43}")
_BEARER = re.compile(r"[Bb]earer +([^ ]{1,256})")


def new_token() -> str:
    """Return a token: the prefix, and 256 random bits in 43 characters of URL-safe base64."""
    return PREFIX + secrets.token_urlsafe(32)


def digest_of(token: str) -> str:
    """Return what is kept of a token: its SHA-256, in hex."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


def is_token(text: str) -> bool:
    """Return whether text has the form of a token."""
    return _TOKEN.fullmatch(text) is not None


def token_of_header(authorization: str) -> str:
    """Return the token of an `Authorization` header.

    Raises:
        UnauthenticatedError: It is not `Bearer TOKEN`.
    """
    match = _BEARER.fullmatch(authorization)
    if match is None:
        raise UnauthenticatedError('the header "authorization" is not "Bearer TOKEN"')
    return match[1]
