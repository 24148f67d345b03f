"""A ledger with keys: secrets are in no file, open for their row only, and are sealed again with a new key."""

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.errors import KeyMissingError, LedgerError
from kvtier.ledger import Ledger, PromptRow
from kvtier.ledger.checks import inspect_ledger, read_ledger
from kvtier.ledger.promise_copies import PromiseCopies
from kvtier.ledger.sql.database import Database
from kvtier.maintenance.offline import check_offline
from tests.fakes.gates import failing
from tests.fakes.keys import key_of_id, ring_of
from tests.fakes.rows import binding_row, namespace_row, prompt_row

TOKENS = tuple(range(70_000, 70_400))
SECRETS = {
    "tokens": b"".join(token.to_bytes(4, "little") for token in TOKENS[:8]),
    "salt": b"saffron-and-salt",
    "recipe": b"You are the parrot of the minister",
}


def row_of(name: str = "support", pin_id: str = "pin-1") -> PromptRow:
    recipe = f'{{"kind": "text", "text": "{SECRETS["recipe"].decode()}"}}'
    return replace(prompt_row(name, pin_id, TOKENS), cache_salt=SECRETS["salt"].decode(), recipe_json=recipe)


def opened(folder: Path, *key_ids: str) -> Ledger:
    return Ledger.open(folder / "ledger.sqlite", ring=ring_of(*key_ids) if key_ids else None)


def filled(folder: Path, *key_ids: str) -> None:
    with closing(opened(folder, *key_ids)) as ledger:
        ledger.put_namespace(namespace_row())
        ledger.promises.put_prompt(row_of())
        ledger.promises.put_binding(binding_row())


def leaks(folder: Path) -> set[str]:
    """Return which secrets are in any file, as they are or in base64."""
    import base64

    content = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    return {
        name
        for name, secret in SECRETS.items()
        if secret in content or any(base64.b64encode(secret[cut:])[:16] in content for cut in range(3))
    }


def test_what_is_secret_is_in_no_file_and_names_are(tmp_path: Path) -> None:
    filled(tmp_path, "k1")
    assert leaks(tmp_path) == set()
    assert b"support" in (tmp_path / "ledger.sqlite").read_bytes()
    with closing(opened(tmp_path, "k1")) as ledger:
        (prompt,) = ledger.load().prompts
        assert prompt == row_of()
    assert read_ledger(tmp_path / "ledger.sqlite", ring_of("k1")).prompts == (row_of(),)
    (copy_id,) = (
        copy_id
        for copy_id in PromiseCopies(tmp_path / "promises").revisions
        if isinstance(PromiseCopies(tmp_path / "promises", ring_of("k1")).read(copy_id), PromptRow)
    )
    assert PromiseCopies(tmp_path / "promises", ring_of("k1")).read(copy_id) == row_of()


def test_plain_as_before_without_keys(tmp_path: Path) -> None:
    filled(tmp_path)
    assert leaks(tmp_path) == set(SECRETS)
    with closing(opened(tmp_path)) as ledger:
        assert ledger.seal() == 0
        assert ledger.load().prompts == (row_of(),)


def test_turning_it_on_leaves_nothing_plain_behind(tmp_path: Path) -> None:
    filled(tmp_path)
    with closing(opened(tmp_path, "k1")) as ledger:
        assert ledger.load().prompts == (row_of(),), "plain rows are read"
        assert ledger.seal() == 1
        assert ledger.seal() == 0
        assert ledger.load().prompts == (row_of(),)
        assert len(ledger.load().bindings) == 1
    assert leaks(tmp_path) == set()


def deleted(folder: Path) -> None:
    """Delete the prompt as an SQLite does that leaves it in free pages, and its copies."""
    with closing(sqlite3.connect(folder / "ledger.sqlite", isolation_level=None)) as sql:
        sql.execute("PRAGMA secure_delete = OFF")
        sql.execute("DELETE FROM bindings")
        sql.execute("DELETE FROM prompts")
    for path in (folder / "promises").iterdir():
        path.unlink()


def test_turning_it_on_removes_prompts_that_were_deleted_before(tmp_path: Path) -> None:
    """Nothing was removed from the file if no row was plain by then: a prompt's text stayed in it for good."""
    filled(tmp_path)
    deleted(tmp_path)
    assert leaks(tmp_path) != set()
    with closing(opened(tmp_path, "k1")) as ledger:
        assert ledger.seal() == 0
    assert leaks(tmp_path) == set()


def test_what_was_plain_is_removed_after_a_refusal_or_a_kill_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path)
    deleted(tmp_path)
    with closing(opened(tmp_path)) as ledger:
        ledger.promises.put_prompt(row_of("other", "pin-2"))
    failing(monkeypatch, Database, "vacuum", lambda: LedgerError("database or disk is full"), times=1)
    with closing(opened(tmp_path, "k1")) as ledger, pytest.raises(LedgerError):
        ledger.seal()
    with closing(opened(tmp_path, "k1")) as ledger:
        assert ledger.seal() == 0
    assert leaks(tmp_path) == set()


def test_it_is_turned_on_again_as_the_first_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(opened(tmp_path, "k1")) as ledger:
        assert ledger.seal() == 0
    with monkeypatch.context() as patch:
        failing(patch, Database, "vacuum", lambda: LedgerError("once is enough"), times=1)
        with closing(opened(tmp_path, "k1")) as ledger:
            assert ledger.seal() == 0
    filled(tmp_path)
    deleted(tmp_path)
    with closing(opened(tmp_path, "k1")) as ledger:
        assert ledger.seal() == 0
    assert leaks(tmp_path) == set()


def test_another_key_takes_over(tmp_path: Path) -> None:
    filled(tmp_path, "old")
    with closing(opened(tmp_path, "new", "old")) as ledger:
        assert ledger.seal() == 1
    with closing(opened(tmp_path, "new")) as ledger:
        assert ledger.load().prompts == (row_of(),)
        assert not ledger.promises.restore(list)


@pytest.mark.parametrize("key_ids", [(), ("other",)])
def test_without_its_key_a_promise_is_not_touched(tmp_path: Path, key_ids: tuple[str, ...]) -> None:
    filled(tmp_path, "k1")
    before = {path.name: path.read_bytes() for path in tmp_path.rglob("*.json*")}
    ledger = opened(tmp_path, *key_ids)
    with pytest.raises(KeyMissingError, match=r"prompt 'support' is sealed with key 'k1\.") as caught:
        ledger.load()
    assert caught.value.name == key_of_id("k1").name
    if key_ids:
        with pytest.raises(KeyMissingError):
            ledger.seal()
    ledger.close()
    (tmp_path / "ledger.sqlite").unlink()  # then the copies are asked
    with closing(opened(tmp_path, *key_ids)) as ledger, pytest.raises(KeyMissingError):
        ledger.promises.restore(lambda: [namespace_row()])
    assert {path.name: path.read_bytes() for path in tmp_path.rglob("*.json*")} == before
    with pytest.raises(KeyMissingError):
        check_offline(tmp_path, repair=True, deep=False, ring=ring_of(*key_ids) if key_ids else None)


def forge(path: Path, column: str, value: object) -> None:
    """Change a column of the prompt, and its row's checksum with it, as who knows the format can."""
    from kvtier.ledger.sql.row_checksums import checked_rows, row_checksum

    with closing(sqlite3.connect(path, isolation_level=None)) as sql:
        sql.execute(f"UPDATE prompts SET {column} = ?", (value,))
        for row in list(checked_rows(sql, "prompts")):
            sql.execute("UPDATE prompts SET checksum = ?", (row_checksum(row.columns),))


@pytest.mark.parametrize("column", ["pin_id", "name", "revision", "secrets"])
def test_secrets_open_in_their_row_only_and_a_repair_takes_the_copy(tmp_path: Path, column: str) -> None:
    with closing(opened(tmp_path, "k1")) as ledger:
        ledger.promises.put_prompt(row_of())
    path, ring = tmp_path / "ledger.sqlite", ring_of("k1")
    forge(path, column, {"revision": 5, "secrets": b"x" * 100}.get(column, "other"))
    with closing(opened(tmp_path, "k1")) as ledger, pytest.raises(LedgerError, match=r"fsck --offline --repair"):
        ledger.load()
    name = "other" if column == "name" else "support"
    assert inspect_ledger(path, ring).altered == {"prompts": [name]}
    check_offline(tmp_path, repair=True, deep=False, ring=ring)
    with closing(opened(tmp_path, "k1")) as ledger:
        assert ledger.load().prompts == (row_of(),)


def test_a_lost_ledger_comes_back_from_sealed_copies(tmp_path: Path) -> None:
    filled(tmp_path, "k1")
    (tmp_path / "ledger.sqlite").unlink()
    with closing(opened(tmp_path, "k1")) as ledger:
        assert ledger.promises.restore(lambda: [namespace_row()]).prompts == ["support"]
        assert ledger.load().prompts == (row_of(),)
    assert leaks(tmp_path) == set()


@pytest.mark.parametrize("before", [(), ("old",)])
def test_copies_of_what_a_start_puts_back_are_sealed_with_the_key_that_writes(
    tmp_path: Path, before: tuple[str, ...]
) -> None:
    """Their rows were, and nothing wrote the copies again: they stayed plain, or under a key that was to go."""
    filled(tmp_path, *before)
    (tmp_path / "ledger.sqlite").unlink()
    with closing(opened(tmp_path, "new", *before)) as ledger:
        assert ledger.promises.restore(lambda: [namespace_row()]).prompts == ["support"]
        ledger.seal()
        assert ledger.load().prompts == (row_of(),)
        assert len(ledger.load().bindings) == 1
    assert leaks(tmp_path) == set()
    (tmp_path / "ledger.sqlite").unlink()
    with closing(opened(tmp_path, "new")) as ledger:
        assert ledger.promises.restore(lambda: [namespace_row()]).prompts == ["support"]


def test_a_sealed_copy_of_another_prompt_is_damage(tmp_path: Path) -> None:
    with closing(opened(tmp_path, "k1")) as ledger:
        ledger.promises.put_prompt(row_of("a", "1"))
        ledger.promises.put_prompt(row_of("b", "2"))
    one, two = sorted((tmp_path / "promises").iterdir())
    one.write_bytes(two.read_bytes())
    copies = PromiseCopies(tmp_path / "promises", ring_of("k1"))
    assert [copies.read(copy_id) is None for copy_id in sorted(copies.revisions)] == [True, False]


@pytest.mark.parametrize("secrets", ["", "ü"])
def test_empty_and_other_texts(tmp_path: Path, secrets: str) -> None:
    row = replace(row_of(), cache_salt=secrets, recipe_json=secrets, tokens=())
    with closing(opened(tmp_path, "k1")) as ledger:
        ledger.promises.put_prompt(row)
        assert ledger.load().prompts == (row,)
