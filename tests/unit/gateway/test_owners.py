"""Owners are digests: of a key, wherever a client puts it, or of a trusted header."""

import pytest

from kvtier.errors import ConfigError
from kvtier.gateway.gateway_settings import MarkerSettings
from kvtier.gateway.owners import owner_of


def test_a_key_is_the_same_owner_in_either_header() -> None:
    owner = owner_of([(b"x-api-key", b"secret")])
    assert (
        owner == owner_of([(b"authorization", b"Bearer secret")]) == owner_of([(b"authorization", b"bearer  secret ")])
    )
    assert len(owner) == 16
    assert "secret" not in owner
    assert owner != owner_of([(b"x-api-key", b"other")])


@pytest.mark.parametrize("headers", [[], [(b"authorization", b"Bearer ")], [(b"authorization", b"Basic abc")]])
def test_without_a_key_there_is_no_owner(headers: list[tuple[bytes, bytes]]) -> None:
    assert owner_of(headers) == ""


def test_where_a_header_names_owners_no_key_does() -> None:
    """A client without the header was the owner whose name it sent as its key."""
    key, tenant = (b"x-api-key", b"blue"), (b"x-tenant", b"blue")
    owner = owner_of([tenant], "X-Tenant")
    assert len(owner) == 16
    assert owner_of([key, tenant], "X-Tenant") == owner
    assert owner_of([key], "x-tenant") == owner_of([key, (b"x-tenant", b" ")], "x-tenant") == ""


def test_of_several_keys_the_one_counts_that_vllm_checks() -> None:
    """By the others a client with one key was any number of owners, each with limits of its own."""
    first, second = (b"authorization", b"Bearer right"), (b"authorization", b"Bearer made-up")
    assert owner_of([first, second]) == owner_of([first])
    assert owner_of([first, (b"x-api-key", b"made-up")]) == owner_of([first])


def test_of_several_trusted_headers_none_counts() -> None:
    """One of them may be the client's."""
    headers = [(b"x-tenant", b"blue"), (b"x-api-key", b"secret"), (b"x-tenant", b"green")]
    assert owner_of(headers, "x-tenant") == ""


def test_settings_come_from_the_environment() -> None:
    variables = {"KVTIER_GATEWAY_OWNER_HEADER": "X-Tenant", "KVTIER_GATEWAY_MAX_BODY": "1MiB"}
    assert MarkerSettings.from_environment(variables) == MarkerSettings(owner_header="x-tenant", max_body_bytes=2**20)
    assert MarkerSettings.from_environment({}) == MarkerSettings()


@pytest.mark.parametrize(
    ("name", "value"),
    [("OWNER_HEADER", "two words"), ("OWNER_HEADER", "é"), ("MAX_BODY", "much"), ("MAX_BODY", "12")],
)
def test_wrong_settings_are_named(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"KVTIER_GATEWAY_{name}"):
        MarkerSettings.from_environment({f"KVTIER_GATEWAY_{name}": value})
