"""`adapter_params`: defaults, and errors that name key, value and remedy."""

from pathlib import Path
from typing import Any

import pytest

from kvtier.client.address import SOCKET_VARIABLE
from kvtier.errors import ConfigError
from kvtier_lmcache.adapter_settings import AdapterSettings, parse_adapter_settings


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SOCKET_VARIABLE, "/run/kvtier.sock")
    assert parse_adapter_settings({}) == AdapterSettings(socket=Path("/run/kvtier.sock"), timeout_s=5.0)


def test_values() -> None:
    settings = parse_adapter_settings({"socket": "/tmp/d.sock", "daemon_uid": 7, "timeout_ms": 250})
    assert settings == AdapterSettings(socket=Path("/tmp/d.sock"), daemon_uid=7, timeout_s=0.25)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("socket", 1),
        ("socket", "/" + 200 * "x"),
        ("daemon_uid", -1),
        ("timeout_ms", 0),
        ("timeout_ms", True),
        ("x", 1),
        ("coordinator_url", "host:1"),
        ("coordinator_url", 1),
        ("coordinator_url", "http://127.0.0.1:93OO"),  # its thread ended at once, and no pin was followed
        ("coordinator_url", "http://127.0.0.1:99999"),
        ("coordinator_url", "http://[x"),
        ("coordinator_url", "http://"),
        ("pin_poll_s", 0),
        ("pin_poll_s", "1"),
    ],
)
def test_unusable(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=key):
        parse_adapter_settings({key: value})


def test_a_password_in_the_coordinators_url_is_not_shown() -> None:
    with pytest.raises(ConfigError) as refused:
        parse_adapter_settings({"coordinator_url": "http://me:hunter2@127.0.0.1:port"})
    assert "hunter2" not in str(refused.value)
    assert "***@127.0.0.1:port" in str(refused.value)
