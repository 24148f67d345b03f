"""Settings of the app, which vLLM makes without arguments: they come from the environment, in `kvtier-gateway` too."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from kvtier.config.units import parse_size
from kvtier.errors import ConfigError

OWNER_HEADER = "KVTIER_GATEWAY_OWNER_HEADER"
MAX_BODY = "KVTIER_GATEWAY_MAX_BODY"
DEFAULT_MAX_BODY = "32MiB"
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}")


@dataclass(frozen=True, kw_only=True)
class MarkerSettings:
    """How markers are read.

    Attributes:
        owner_header: Header that names the owner of pins, in place of a digest of the API key; empty for none.
        max_body_bytes: Of a request. In vLLM a larger one passes unread; a gateway refuses it.
    """

    owner_header: str = ""
    max_body_bytes: int = parse_size(DEFAULT_MAX_BODY)

    @classmethod
    def from_environment(cls, variables: Mapping[str, str] = os.environ) -> "MarkerSettings":
        """Return the settings. ConfigError: a variable has a value that cannot be used."""
        return cls(
            owner_header=checked_header(variables.get(OWNER_HEADER, ""), "environment"),
            max_body_bytes=checked_size(variables.get(MAX_BODY, DEFAULT_MAX_BODY), "environment"),
        )


def checked_header(name: str, source: str) -> str:
    """Return a header's name, or nothing. ConfigError: no header can have it."""
    if name and not _HEADER_NAME.fullmatch(name):
        raise ConfigError(OWNER_HEADER, name, source, 'must be the name of a header, like "x-tenant-id"')
    return name.lower()


def checked_size(text: str, source: str) -> int:
    """Return a size in bytes. ConfigError: it is none, or too small for any request."""
    try:
        num_bytes = parse_size(text)
    except ValueError as exc:
        raise ConfigError(MAX_BODY, text, source, str(exc)) from exc
    if num_bytes < 1024:
        raise ConfigError(MAX_BODY, text, source, "must be at least 1KiB; requests with markers are longer")
    return num_bytes
