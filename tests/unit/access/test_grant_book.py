"""Grants in their file: what is kept, what is looked up, and what a full disk leaves."""

import json
import os
from pathlib import Path

import pytest

from kvtier.access.bearer_tokens import is_token, new_token, token_of_header
from kvtier.access.caller import Role
from kvtier.access.grants import FILE_NAME, MAX_GRANTS, GrantBook, WantedGrant
from kvtier.errors import (
    GrantExistsError,
    GrantNotFoundError,
    GrantsUnusableError,
    InvalidArgumentError,
    UnauthenticatedError,
)

NOW_S = 1e9


def wanted(name: str, role: Role = Role.VIEWER, **more: object) -> WantedGrant:
    return WantedGrant(name=name, role=role, **more)  # type: ignore[arg-type]


def test_a_token_is_256_random_bits_and_only_its_digest_is_kept(tmp_path: Path) -> None:
    book = GrantBook(tmp_path)
    grant, token = book.create(wanted("ci", owner="a"), NOW_S)
    assert is_token(token)
    assert len(token) == 47
    text = (tmp_path / FILE_NAME).read_text()
    assert token not in text
    assert token[4:] not in text
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o777 == 0o600
    assert book.by_token(token, NOW_S) == grant
    assert GrantBook(tmp_path).by_token(token, NOW_S) == grant
    assert len({new_token() for _ in range(100)}) == 100
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


@pytest.mark.parametrize(
    "token", ["", "kvt_", "x" * 47, "kvt_" + "x" * 42, "kvt_" + "x" * 44, "kvt_" + "ü" * 43, "\udcff"]
)
def test_what_is_no_token(tmp_path: Path, token: str) -> None:
    book = GrantBook(tmp_path)
    book.create(wanted("c", certificate="x"), NOW_S)
    with pytest.raises(UnauthenticatedError, match="no such token"):
        book.by_token(token, NOW_S)


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", "Basic x", "Bearer a b", "Bearer " + "x" * 300, "kvt_x"])
def test_what_is_no_bearer_header(header: str) -> None:
    with pytest.raises(UnauthenticatedError, match="Bearer TOKEN"):
        token_of_header(header)
    assert token_of_header("bearer x") == "x"


def test_names_and_certificates_are_one_grants(tmp_path: Path) -> None:
    book = GrantBook(tmp_path)
    book.create(wanted("a", certificate="host-1"), NOW_S)
    with pytest.raises(GrantExistsError, match="name"):
        book.create(wanted("a"), NOW_S)
    with pytest.raises(GrantExistsError, match="certificate"):
        book.create(wanted("b", certificate="host-1"), NOW_S)
    assert book.by_certificate("host-1", NOW_S).name == "a"
    with pytest.raises(UnauthenticatedError, match="--certificate host-2"):
        book.by_certificate("host-2", NOW_S)
    book.revoke("a")
    with pytest.raises(GrantNotFoundError):
        book.revoke("a")
    assert book.all() == ()


def test_time(tmp_path: Path) -> None:
    book = GrantBook(tmp_path)
    grant, token = book.create(wanted("a", ttl_s=60), NOW_S)
    assert book.by_token(token, NOW_S + 59) == grant
    assert book.is_valid(grant.grant_id, NOW_S + 59)
    with pytest.raises(UnauthenticatedError, match=r"time .* is over"):
        book.by_token(token, NOW_S + 60)
    assert not book.is_valid(grant.grant_id, NOW_S + 60)


def test_two_daemons_do_not_lose_each_others_grants(tmp_path: Path) -> None:
    """Or one daemon and an editor: the file is read before it is written."""
    one, other = GrantBook(tmp_path), GrantBook(tmp_path)
    one.create(wanted("a"), NOW_S)
    other.create(wanted("b"), NOW_S)
    assert [grant.name for grant in other.all()] == ["a", "b"]
    assert one.refresh()
    assert [grant.name for grant in one.all()] == ["a", "b"]
    assert not one.refresh()


def test_the_number_of_grants_is_bounded(tmp_path: Path) -> None:
    rows = [
        {"grant_id": f"i{number}", "name": f"n{number}", "role": "viewer", "certificate": f"c{number}"}
        for number in range(MAX_GRANTS)
    ]
    path = tmp_path / FILE_NAME
    path.write_text(json.dumps({"version": 1, "grants": rows}))
    path.chmod(0o600)
    with pytest.raises(InvalidArgumentError, match="revoke some"):
        GrantBook(tmp_path).create(wanted("one-more"), NOW_S)


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "a b"},
        {"name": ""},
        {"name": "a", "owner": "x y"},
        {"name": "a", "ttl_s": -1},
        {"name": "a", "certificate": "x" * 200},
        {"name": "a", "role": Role.ADMIN, "owner": "a"},
    ],
)
def test_wanted_grants_that_cannot_be(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidArgumentError):
        WantedGrant(**{"role": Role.VIEWER} | fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("call", ["open", "fsync", "rename"])
def test_a_write_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    book = GrantBook(tmp_path)
    _, token = book.create(wanted("a"), NOW_S)

    def refuse(*_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        owner: object = Path if call == "rename" else os
        patch.setattr(owner, call, refuse)
        with pytest.raises(GrantsUnusableError, match="No space left"):
            book.create(wanted("b"), NOW_S)
        with pytest.raises(GrantsUnusableError, match="No space left"):
            book.revoke("a")
    assert [grant.name for grant in GrantBook(tmp_path).all()] == ["a"]
    assert book.by_token(token, NOW_S).name == "a"
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]
