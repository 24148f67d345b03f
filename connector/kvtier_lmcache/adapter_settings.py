"""`adapter_params` of LMCache's `--l2-adapter`: what we take and what we refuse."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvtier.client.address import MAX_UID, default_daemon_uid, default_socket_path, usable_socket_path
from kvtier.errors import ConfigError
from kvtier.printable import shown_url

_SOURCE = "adapter_params"
_KEYS = ("coordinator_url", "daemon_uid", "pin_poll_s", "socket", "timeout_ms")


@dataclass(frozen=True, kw_only=True)
class AdapterSettings:
    """The validated settings of one adapter."""

    socket: Path
    """The daemon's unix socket."""
    daemon_uid: int | None = None
    """As whom the daemon may run besides our own uid and root; None: as no one else."""
    timeout_s: float = 5.0
    """How long a store or a load waits for the daemon without any progress; then what is missing is a miss."""
    coordinator_url: str | None = None
    """LMCache's coordinator, whose pins the daemon is to keep; None: it is not asked."""
    pin_poll_s: float = 5
    """How often it is asked."""


def parse_adapter_settings(params: Mapping[str, Any]) -> AdapterSettings:
    """Validate `adapter_params`.

    Raises:
        ConfigError: A key is unknown or its value unusable; names key, value and what is allowed.
    """
    for key, value in params.items():
        if key not in _KEYS:
            raise ConfigError(key, value, _SOURCE, f"is unknown; use {', '.join(_KEYS)}")
    socket, uid, timeout_ms = params.get("socket"), params.get("daemon_uid"), params.get("timeout_ms", 5000)
    try:
        path = usable_socket_path(default_socket_path() if socket is None else socket)
    except (TypeError, ValueError) as exc:
        raise ConfigError("socket", socket, _SOURCE, str(exc)) from exc
    if uid is not None and not _is_whole(uid, 0, MAX_UID):
        raise ConfigError("daemon_uid", uid, _SOURCE, "must be a uid, a whole number")
    if not _is_whole(timeout_ms, 1, 600_000):
        raise ConfigError("timeout_ms", timeout_ms, _SOURCE, "must be a whole number, 1 to 600000")
    url, poll_s = params.get("coordinator_url"), params.get("pin_poll_s", 5)
    if url is not None and not _is_url(url):
        remedy = "must be a URL, for example http://127.0.0.1:9300"
        raise ConfigError("coordinator_url", shown_url(str(url)), _SOURCE, remedy)
    if not _is_whole(poll_s, 1, 3600):
        raise ConfigError("pin_poll_s", poll_s, _SOURCE, "must be a whole number, 1 to 3600")
    return AdapterSettings(
        socket=path,
        daemon_uid=default_daemon_uid() if uid is None else uid,
        timeout_s=timeout_ms / 1000,
        coordinator_url=url,
        pin_poll_s=poll_s,
    )


def _is_url(value: object) -> bool:
    try:
        parts = urlsplit(value) if isinstance(value, str) else None
        return parts is not None and parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port that is none
        return False


def _is_whole(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
