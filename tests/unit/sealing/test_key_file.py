"""The file of keys: what is refused, and that no message or repr shows a key."""

import base64
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.errors import ConfigError, KeyMissingError
from kvtier.sealing import Key, KeyRing, key_file, load_key_ring
from tests.fakes.keys import key_of_id, ring_of, write_keys

SECRET = base64.b64encode(bytes(range(32))).decode()


def file_of(folder: Path, content: str) -> Path:
    path = folder / "keys"
    path.touch(mode=0o600)
    path.write_text(content)
    return path


def test_the_first_key_writes_and_all_read(tmp_path: Path) -> None:
    ring = load_key_ring(write_keys(tmp_path / "keys", "new", "old"))
    assert ring.writing == key_of_id("new")
    assert list(ring.by_name) == [key_of_id("new").name, key_of_id("old").name]
    assert ring.find(key_of_id("old").name, "x") == key_of_id("old")


def test_comments_and_empty_lines_are_skipped(tmp_path: Path) -> None:
    ring = load_key_ring(file_of(tmp_path, f"# of 2026\n\n  \nk1 \t {SECRET}  \r\n"))
    assert ring.writing == Key("k1", bytes(range(32)))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "has no key"),
        ("# nothing\n", "has no key"),
        (SECRET, "line 1 is not ID"),
        (f"k1 {SECRET[:-4]}", "line 1 is not ID"),
        (f"k1 {SECRET} more", "line 1 is not ID"),
        (f"k1 {SECRET}\nk2 ***", "line 2 is not ID"),
        (f"k.1 {SECRET}", "line 1 is not ID"),
        (f"{'k' * 17} {SECRET}", "1 to 16"),
        (f"k1 {SECRET}\nk1 {base64.b64encode(bytes(32)).decode()}", "line 2 has the ID"),
        (f"k1 {SECRET}\nk2 {SECRET}", "line 2 has the key"),
        ("k" * 70_000, "more than 65536 bytes"),
        ("k1 \ufffd\udcff", "line 1"),
    ],
)
def test_what_is_no_file_of_keys_is_refused_and_none_of_it_is_shown(tmp_path: Path, content: str, problem: str) -> None:
    path = file_of(tmp_path, "")
    path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=problem) as caught:
        load_key_ring(path)
    assert (caught.value.key, caught.value.value) == ("disk.key_file", str(path))
    assert SECRET[:20] not in str(caught.value)


def _wide(path: Path) -> None:
    path.chmod(0o640)


def _gone(path: Path) -> None:
    path.unlink()


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


@pytest.mark.parametrize(
    ("change", "remedy"),
    [(_wide, "chmod 600"), (_gone, r"openssl rand -base64 32"), (_folder, "is no file"), (_pipe, "is no file")],
)
def test_a_file_that_others_may_read_or_that_is_none_is_refused(
    tmp_path: Path, change: Callable[[Path], None], remedy: str
) -> None:
    path = write_keys(tmp_path / "keys", "k1")
    change(path)
    with pytest.raises(ConfigError, match=remedy):
        load_key_ring(path)


def test_another_users_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, owner = write_keys(tmp_path / "keys", "k1"), os.geteuid() or 12345
    os.chown(path, owner, -1)
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(ConfigError, match=f"belongs to uid {owner}; run chown"):
        load_key_ring(path)


def check_taken_by_a_user(monkeypatch: pytest.MonkeyPatch, path: Path, *, groups: list[int], is_taken: bool) -> None:
    """Load the file as uid and gid 1000, in these groups besides."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(os, "getgroups", lambda: groups)
    monkeypatch.setattr(os, "getegid", lambda: 1000)
    if is_taken:
        assert list(load_key_ring(path).by_name)
        return
    with pytest.raises(ConfigError, match="other users may reach it"):
        load_key_ring(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs files of root's")
@pytest.mark.parametrize(
    ("gid", "mode", "is_taken"),
    [(5, 0o440, True), (5, 0o400, True), (6, 0o440, False), (5, 0o460, False), (5, 0o444, False)],
)
def test_a_file_of_roots_may_be_for_a_group_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gid: int, mode: int, is_taken: bool
) -> None:
    """As Kubernetes hands out secrets: encryption could not be switched on there."""
    path = write_keys(tmp_path / "keys", "k1")
    os.chown(path, 0, gid)
    path.chmod(mode)
    check_taken_by_a_user(monkeypatch, path, groups=[5], is_taken=is_taken)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs files of root's")
@pytest.mark.parametrize(
    ("folder", "mode", "is_taken"),
    [("", 0o440, True), ("", 0o400, True), ("", 0o460, False), ("", 0o444, False), ("other", 0o440, False)],
)
def test_a_credential_of_systemds_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, mode: int, is_taken: bool
) -> None:
    """`LoadCredential=`: root:root 0400 and an ACL for the unit's user, which stat shows as 0440. It was refused."""
    path = write_keys(tmp_path / "keys", "k1")
    os.chown(path, 0, 0)
    path.chmod(mode)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path / folder))
    check_taken_by_a_user(monkeypatch, path, groups=[1000], is_taken=is_taken)


def test_without_the_package_the_error_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_file.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"package cryptography; run pip install 'cryptography>=46'"):
        load_key_ring(write_keys(tmp_path / "keys", "k1"))


def test_nothing_shows_a_key() -> None:
    ring = ring_of("k1", "k2")
    shown = repr(ring) + repr(ring.writing) + str(ring.writing) + str(KeyMissingError("it", ring.writing.name, "f"))
    for secret in (key_of_id("k1").secret, key_of_id("k2").secret):
        for text in (repr(secret)[2:-1], secret.hex(), base64.b64encode(secret).decode()):
            assert text[:16] not in shown


def test_a_key_that_is_not_there_is_named_with_the_remedy() -> None:
    with pytest.raises(KeyMissingError, match=r"it is sealed with key 'old\..*the file that disk\.key_file names"):
        ring_of("new").find(key_of_id("old").name, "it")


def test_two_keys_of_one_id_have_two_names() -> None:
    assert Key("k", bytes(32)).name != Key("k", bytes([1]) * 32).name
    assert KeyRing([Key("k", bytes(32))]).writing.name.startswith("k.")
