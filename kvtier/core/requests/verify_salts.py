"""Salts of verification requests: how a request says to the connector that it compares KV, and is no user's.

vLLM hashes the salt of a request into its first block. So under a salt that is used once, vLLM's own prefix cache has
nothing, and only kvtier can restore the prompt: `kvtier-verify-<nonce>:<the pin's own salt>` asks for that. Who knows a
pin's salt may be restored it in any case, so the salt of a verification gives no one more. The other side of the
comparison, `kvtier-reference-<nonce>`, asks kvtier to stay out: vLLM alone computes and caches.

Of neither anything is stored, or counted among the requests of users.

vLLM 0.32 takes salts of at most 128 characters, without / @ \\ and NUL: so a pin's own salt may have 97 here.
Source: `validate_cache_salt` of vLLM 0.32.
"""

import re
import secrets
from typing import NamedTuple

MAX_OWN_SALT_CHARS = 97
"""Longest salt of a pin that a verification can name."""
_NONCE_BYTES = 8
_RESTORED = re.compile(r"kvtier-verify-[0-9a-f]{16,64}:(.*)", re.DOTALL)
_REFERENCE = re.compile(r"kvtier-reference-[0-9a-f]{16,64}")


class Verification(NamedTuple):
    """What a verification request asks for.

    Attributes:
        own_salt: It is restored what a request with this salt would be (empty: without one); None: nothing, vLLM alone
            answers it.
    """

    own_salt: str | None


def new_restored_salt(own_salt: str) -> str:
    """Return a salt under which only kvtier has the prompt that is pinned with `own_salt`, which may be empty."""
    return f"kvtier-verify-{secrets.token_hex(_NONCE_BYTES)}:{own_salt}"


def new_reference_salt() -> str:
    """Return a salt under which no one has anything, and which kvtier ignores."""
    return f"kvtier-reference-{secrets.token_hex(_NONCE_BYTES)}"


def verification_of(salt: str | None) -> Verification | None:
    """Return what a request's salt asks for; None for a salt of users."""
    if not salt or not salt.startswith("kvtier-"):
        return None
    if found := _RESTORED.fullmatch(salt):
        return Verification(found.group(1))
    return Verification(None) if _REFERENCE.fullmatch(salt) else None
