"""URL and API key of vLLM, checked before anything is sent."""

from urllib.parse import urlsplit

import httpx

from kvtier.errors import InvalidArgumentError
from kvtier.printable import shown_url

_REMEDY = "must look like http://127.0.0.1:8000"


def checked_url(text: str) -> httpx.URL:
    """Return a base URL; a user and password in it are sent as HTTP Basic authentication.

    Raises:
        InvalidArgumentError: Not an HTTP URL; the message hides secrets in it.
    """
    try:
        parts = urlsplit(text)
        # Neither parser refuses port 0, or a name that the resolver cannot encode.
        (parts.hostname or "").encode("idna")
        is_base = parts.scheme in ("http", "https") and parts.hostname and not parts.query and not parts.fragment
        if not is_base or parts.port == 0:
            raise InvalidArgumentError("--url", shown_url(text), _REMEDY)
        return httpx.URL(text)
    except (ValueError, httpx.InvalidURL) as exc:
        raise InvalidArgumentError("--url", shown_url(text), _REMEDY) from exc


def checked_key(api_key: str) -> str:
    """Return an API key that a header can hold.

    Raises:
        InvalidArgumentError: No header can hold it; the message hides the key.
    """
    if not (api_key.isascii() and api_key.isprintable()):
        problem = (
            "has a character that no HTTP header can hold (a line break, a letter beyond ASCII); give the key alone"
        )
        raise InvalidArgumentError("--api-key", "***", problem)
    return api_key
