"""Copies of promises: what each says of itself, and how ledger and copies follow each other through failures."""

import errno
import importlib
import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvtier.ledger.promise_copies
from kvtier.errors import LedgerError
from kvtier.fsync import replace_file
from kvtier.ledger import BindingRow, Ledger, PromptRow
from kvtier.ledger.promise_copies import Promise, PromiseCopies, binding_id, prompt_id
from kvtier.ledger.sql.database import Database
from tests.fakes.rows import binding_row, namespace_row, pack_record, prompt_row

SUPPORT = prompt_id("support")
BOUND = binding_id("pin-1", "ns")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def ledger(path: Path) -> Iterator[Ledger]:
    ledger = Ledger.open(path)
    ledger.put_namespace(namespace_row())
    ledger.promises.put_prompt(prompt_row())
    ledger.promises.put_binding(binding_row())
    yield ledger
    ledger.close()


def copies_beside(path: Path) -> dict[str, Promise | None]:
    copies = PromiseCopies(path.parent / "promises")
    return {copy_id: copies.read(copy_id) for copy_id in copies.revisions}


def reopened(ledger: Ledger) -> Ledger:
    ledger.close()
    return Ledger.open(ledger.path)


def test_each_promise_has_a_copy_that_says_what_the_row_says(ledger: Ledger, path: Path) -> None:
    assert copies_beside(path) == {SUPPORT: prompt_row(), BOUND: binding_row()}
    changed = replace(prompt_row(pinned=False), priority=-3, recipe_json='{"text": "ä\\ud800"}', origin="auto")
    ledger.promises.put_prompt(changed)
    ledger.promises.put_binding(binding_row(numbers=()))
    assert copies_beside(path) == {SUPPORT: changed, BOUND: binding_row(numbers=())}
    assert len(list((path.parent / "promises").iterdir())) == 2, "older copies are gone"
    assert {prompt.revision for prompt in ledger.load().prompts} == {copies_beside(path)[SUPPORT].revision}  # type: ignore[union-attr]


def test_copies_go_with_their_rows(ledger: Ledger, path: Path) -> None:
    ledger.promises.put_prompt(prompt_row(pin_id="pin-2"))
    assert copies_beside(path) == {SUPPORT: prompt_row(pin_id="pin-2")}, "another prompt of that name has no bindings"
    ledger.promises.put_binding(binding_row("pin-2"))
    ledger.delete_namespace("ns")
    assert copies_beside(path) == {SUPPORT: prompt_row(pin_id="pin-2")}
    ledger.promises.delete_prompt("support")
    assert copies_beside(path) == {}


def test_a_prompt_that_is_renamed_keeps_its_bindings_and_takes_the_place_of_another(ledger: Ledger, path: Path) -> None:
    ledger.promises.put_prompt(prompt_row("other", "pin-2"))
    ledger.promises.put_binding(binding_row("pin-2"))
    renamed = replace(prompt_row(), name="other", priority=7)
    ledger.promises.change_prompts(moved=[("support", renamed)])
    snapshot = ledger.load()
    assert (snapshot.prompts, snapshot.bindings) == ((renamed,), (binding_row(),))
    assert copies_beside(path) == {prompt_id("other"): renamed, BOUND: binding_row()}
    ledger.close()
    path.unlink()
    restored = Ledger.open(path)
    assert restored.promises.restore(lambda: [namespace_row()]).prompts == ["other"]
    assert restored.load().bindings == (binding_row(),)
    restored.close()


def test_a_version_takes_the_name_of_the_prompt_that_it_replaces(ledger: Ledger, path: Path) -> None:
    ledger.promises.put_prompt(prompt_row("support@2", "pin-2", tokens=(7,)))
    ledger.promises.put_binding(binding_row("pin-2"))
    row = prompt_row("support", "pin-2", tokens=(7,))
    old = replace(prompt_row(pinned=False), name="support@1")
    ledger.promises.change_prompts(moved=[("support", old), ("support@2", row)])
    snapshot = ledger.load()
    assert snapshot.prompts == (row, old)
    assert set(snapshot.bindings) == {binding_row(), binding_row("pin-2")}
    ledger.close()
    path.unlink()
    restored = Ledger.open(path)
    assert restored.promises.restore(lambda: [namespace_row()]).prompts == ["support@1", "support"]
    assert restored.load().prompts == (row, old)
    assert set(restored.load().bindings) == {binding_row(), binding_row("pin-2")}
    restored.close()


def test_prompts_that_were_renamed_since_a_backup_are_moved(ledger: Ledger, path: Path) -> None:
    """A pin was missing after the first start, and one that was forgotten then came back under its newer name."""

    def rename(name: str, row: PromptRow) -> None:
        ledger.promises.change_prompts(moved=[(name, row)])

    ledger.promises.put_prompt(prompt_row("y", "pin-2"))
    ledger.promises.put_binding(binding_row("pin-2"))
    ledger.close()
    old = path.read_bytes()
    ledger = Ledger.open(path)
    rename("y", prompt_row("z", "pin-2"))
    rename("support", prompt_row("y", "pin-1"))
    rename("z", prompt_row("last", "pin-2"))
    ledger.promises.put_prompt(prompt_row("support", "pin-3"))
    expected, before = ledger.load(), copies_beside(path)
    ledger.close()
    path.write_bytes(old)
    for restored in (["y", "last", "support"], []):
        ledger = reopened(ledger)
        assert ledger.promises.restore(lambda: [namespace_row()]).prompts == restored
        found = ledger.load()
        assert (found.prompts, set(found.bindings)) == (expected.prompts, set(expected.bindings))
        assert copies_beside(path) == before
    ledger.promises.delete_prompt("y")
    ledger = reopened(ledger)
    assert not ledger.promises.restore(lambda: [namespace_row()])
    assert [row.name for row in ledger.load().prompts] == ["last", "support"]
    ledger.close()


def test_of_two_names_of_a_prompt_the_newer_one_is_restored(ledger: Ledger, path: Path) -> None:
    (copy,) = (path.parent / "promises").glob(f"{SUPPORT}*")
    content = copy.read_bytes()
    ledger.promises.change_prompts(moved=[("support", prompt_row("other"))])
    copy.write_bytes(content)  # a folder that was put together from two backups
    ledger.close()
    for loses in (True, False):
        if loses:
            path.unlink()
        with closing(Ledger.open(path)) as ledger:
            ledger.promises.restore(lambda: [namespace_row()])
            assert [row.name for row in ledger.load().prompts] == ["other"]
            assert set(copies_beside(path)) == {prompt_id("other"), BOUND}


@pytest.mark.parametrize("step", ["drop", "put_all"])
def test_a_replacement_that_fails_half_way_leaves_one_or_the_other(
    ledger: Ledger, path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Copies that cannot be removed: nothing has changed. Those that cannot be written: written later."""
    staged, row = prompt_row("support@2", "pin-2", tokens=(7,)), prompt_row("support", "pin-2", tokens=(7,))
    ledger.promises.put_prompt(staged)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PromiseCopies, step, fail)
    with suppress(LedgerError):
        old = replace(prompt_row(pinned=False), name="support@1")
        ledger.promises.change_prompts(moved=[("support", old), ("support@2", row)])
    names = [prompt.name for prompt in ledger.load().prompts]
    assert names == (["support", "support@2"] if step == "drop" else ["support", "support@1"])
    monkeypatch.undo()
    ledger = reopened(ledger)
    ledger.promises.restore(lambda: [namespace_row()])
    assert [prompt.name for prompt in ledger.load().prompts] == names
    ledger.close()


def test_nothing_of_a_transaction_that_fails_is_copied(ledger: Ledger, path: Path) -> None:
    before = copies_beside(path)

    def fail_at_the_end() -> None:
        with ledger.together():
            ledger.promises.put_prompt(prompt_row("other", "pin-2"))
            ledger.packs.commit_pack(pack_record("p", [1], "unknown"))

    with pytest.raises(LedgerError):
        fail_at_the_end()
    assert copies_beside(path) == before


def test_a_prompt_whose_deletion_was_rolled_back_gets_its_copy_again(ledger: Ledger, path: Path) -> None:
    before = copies_beside(path)
    assert ledger.catch_up()

    def fail_at_the_end() -> None:
        with ledger.together():
            ledger.promises.delete_prompt("support")
            ledger.packs.commit_pack(pack_record("p", [1], "unknown"))

    with pytest.raises(LedgerError):
        fail_at_the_end()
    assert ledger.catch_up()
    assert copies_beside(path) == before


@pytest.mark.parametrize("bit", range(8))
def test_a_copy_that_changed_by_a_bit_anywhere_is_none(ledger: Ledger, path: Path, bit: int) -> None:
    ledger.promises.put_prompt(prompt_row(tokens=(1,)))
    copies = PromiseCopies(path.parent / "promises")
    for copy_id, row in copies_beside(path).items():
        (file,) = (path.parent / "promises").glob(f"{copy_id}-*")
        whole = file.read_bytes()
        for place in range(len(whole)):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << bit
            file.write_bytes(damaged)
            assert copies.read(copy_id) in (None, row), place
        file.write_bytes(whole)


def test_a_copy_under_the_name_of_another_is_none(ledger: Ledger, path: Path) -> None:
    ledger.promises.put_prompt(prompt_row("other", "pin-2"))
    (one,), (other,) = ((path.parent / "promises").glob(f"{prompt_id(name)}-*") for name in ("support", "other"))
    other.write_bytes(one.read_bytes())
    assert copies_beside(path)[prompt_id("other")] is None


def unreadable(file: Path) -> None:
    file.unlink()
    file.symlink_to(file.name)  # ELOOP, also for root


def newer(file: Path) -> None:
    outer = json.loads(file.read_bytes())
    outer["promise"] = outer["promise"].replace('"format": 1', '"format": 2')
    outer["xxh3_64"] = kvtier.ledger.promise_copies._checksum(outer["promise"])
    file.write_bytes(json.dumps(outer).encode())


@pytest.mark.parametrize("change", [unreadable, newer])
def test_a_copy_that_cannot_be_read_now_is_there_for_the_next_start(
    ledger: Ledger, path: Path, change: Callable[[Path], None]
) -> None:
    """One refused read was enough: kvtier set the copy aside as damaged, and lost a pin that only the copy had."""
    ledger.close()
    path.unlink()
    (file,) = (path.parent / "promises").glob(f"{prompt_id('support')}-*")
    content = file.read_bytes()
    change(file)
    again = Ledger.open(path)
    restored = again.promises.restore(list)
    assert (restored.prompts, restored.num_damaged, restored.num_unreadable) == ([], 0, 1)
    again.close()
    file.unlink()
    file.write_bytes(content)
    last = Ledger.open(path)
    assert last.promises.restore(list).prompts == ["support"]
    last.close()


# What the database has lost


def lose(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as sql, sql:
        sql.execute(statement)


def test_a_database_that_is_new_gets_everything_back(ledger: Ledger, path: Path) -> None:
    ledger.close()
    path.unlink()
    ledger = Ledger.open(path)
    restored = ledger.promises.restore(lambda: [namespace_row()])
    assert (restored.prompts, restored.num_bindings) == (["support"], 1)
    snapshot = ledger.load()
    assert (snapshot.prompts, snapshot.bindings, snapshot.namespaces) == (
        (prompt_row(),),
        (binding_row(),),
        (namespace_row(),),
    )
    assert not ledger.promises.restore(lambda: [namespace_row()]), "once is enough"
    ledger.close()


def test_an_old_row_is_replaced_and_a_new_one_is_not(ledger: Ledger, path: Path) -> None:
    ledger.promises.put_prompt(prompt_row("ended", "pin-9"))
    backup = path.read_bytes()
    ledger.promises.delete_prompt("ended")
    assert not ledger.is_behind or ledger.catch_up()
    ledger.promises.put_prompt(prompt_row(pinned=False, tokens=(7,)))
    ledger.close()
    newer = path.read_bytes()
    path.write_bytes(backup)
    ledger = Ledger.open(path)
    restored = ledger.promises.restore(list)
    assert (restored.prompts, restored.without_copy) == (["support"], ["ended"])
    assert ledger.load().prompts == (prompt_row("ended", "pin-9"), prompt_row(pinned=False, tokens=(7,)))
    ledger.close()
    path.write_bytes(newer)
    ledger = Ledger.open(path)
    assert not ledger.promises.restore(list)
    ledger.close()


def test_a_revision_is_never_given_twice_even_when_the_newest_row_was_deleted(ledger: Ledger, path: Path) -> None:
    ledger.promises.put_prompt(prompt_row("other", "pin-2"))
    (revision,) = (row.revision for row in ledger.load().prompts if row.name == "other")
    ledger.promises.delete_prompt("other")
    ledger = reopened(ledger)
    ledger.promises.put_prompt(prompt_row("other", "pin-3"))
    assert all(row.revision > revision for row in ledger.load().prompts if row.name == "other")
    ledger.close()


def test_a_damaged_copy_of_a_lost_row_is_set_aside_and_counted(ledger: Ledger, path: Path) -> None:
    ledger.close()
    path.unlink()
    (file,) = (path.parent / "promises").glob(f"{SUPPORT}-*")
    file.write_bytes(file.read_bytes()[:-10])
    ledger = Ledger.open(path)
    restored = ledger.promises.restore(lambda: [namespace_row()])
    assert (restored.prompts, restored.num_bindings, restored.num_damaged) == ([], 0, 1)
    assert [entry.suffix for entry in sorted((path.parent / "promises").iterdir())] in (
        [".damaged", ".json"],
        [".json", ".damaged"],
    ), "the binding waits for its prompt"
    ledger.close()


def test_a_binding_of_an_unknown_namespace_waits(ledger: Ledger, path: Path) -> None:
    ledger.close()
    path.unlink()
    ledger = Ledger.open(path)
    assert ledger.promises.restore(list).num_bindings == 0
    assert ledger.promises.restore(lambda: [namespace_row()]).num_bindings == 1
    ledger.close()


def test_bindings_of_a_prompt_that_ended_are_removed(ledger: Ledger, path: Path) -> None:
    """A crash between the removal of a prompt's copy and of its bindings'."""
    (copy,) = (path.parent / "promises").glob(f"{BOUND}-*")
    data = copy.read_bytes()
    ledger.promises.delete_prompt("support")
    copy.write_bytes(data)
    ledger = reopened(ledger)
    assert not ledger.promises.restore(list)
    assert copies_beside(path) == {}
    ledger.close()


# Crashes and refusals between the steps


class PowerCutError(BaseException):
    """The process ends here."""


def test_a_crash_between_commit_and_copy_leaves_a_row_whose_copy_is_made_up_for(
    ledger: Ledger, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(*_: object) -> None:
        raise PowerCutError

    for change in (
        lambda: ledger.promises.put_prompt(prompt_row("new", "pin-2")),
        lambda: ledger.promises.put_binding(binding_row(numbers=[5])),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(PromiseCopies, "put", cut)
            patch.setattr(PromiseCopies, "put_all", cut)
            with pytest.raises(PowerCutError):
                change()
    ledger = reopened(ledger)
    assert not ledger.promises.restore(lambda: [namespace_row()])
    assert ledger.promises.misses_copies
    assert ledger.catch_up()
    assert not ledger.is_behind
    assert copies_beside(path) == {
        SUPPORT: prompt_row(),
        prompt_id("new"): prompt_row("new", "pin-2"),
        BOUND: binding_row(numbers=[5]),
    }
    ledger.close()


def test_a_crash_before_the_row_is_deleted_leaves_the_promise(
    ledger: Ledger, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Database, "transaction", lambda _: (_ for _ in ()).throw(PowerCutError))
        with pytest.raises(PowerCutError):
            ledger.promises.delete_prompt("support")
    assert copies_beside(path) == {}
    ledger = reopened(ledger)
    ledger.promises.restore(list)
    assert ledger.catch_up()
    assert ledger.load().prompts == (prompt_row(),)
    assert copies_beside(path) == {SUPPORT: prompt_row(), BOUND: binding_row()}
    ledger.close()


@pytest.mark.parametrize(
    "step", ["os.open", "os.fsync", "pathlib.Path.rename", "kvtier.ledger.promise_copies.fsync_directory"]
)
def test_a_copy_that_cannot_be_written_is_written_later(
    ledger: Ledger, path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(step, full)
        ledger.promises.put_prompt(prompt_row(tokens=(9,)))
        assert ledger.promises.misses_copies
        with pytest.raises(LedgerError, match="free space there"):
            ledger.catch_up()
    assert ledger.load().prompts == (prompt_row(tokens=(9,)),), "the row is durable"
    assert ledger.catch_up()
    assert copies_beside(path)[SUPPORT] == prompt_row(tokens=(9,))


def test_a_copy_that_cannot_be_removed_keeps_the_row(
    ledger: Ledger, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.unlink", read_only)
        with pytest.raises(LedgerError, match="nothing was changed"):
            ledger.promises.delete_prompt("support")
    assert ledger.load().prompts == (prompt_row(),)
    assert copies_beside(path)[SUPPORT] == prompt_row()


def test_of_two_copies_that_a_crash_left_the_newer_one_that_is_whole_counts(ledger: Ledger, path: Path) -> None:
    folder = path.parent / "promises"
    (older,) = folder.glob(f"{SUPPORT}-*")
    data = older.read_bytes()
    ledger.promises.put_prompt(prompt_row(tokens=(2,)))
    (newer,) = folder.glob(f"{SUPPORT}-*")
    older.write_bytes(data)
    (folder / "half.json.tmp").write_bytes(b"{")
    ledger = reopened(ledger)
    assert copies_beside(path)[SUPPORT] == prompt_row(tokens=(2,))
    assert len(list(folder.iterdir())) == 2
    older.write_bytes(data)
    newer.write_bytes(b"{}")
    ledger = reopened(ledger)
    assert copies_beside(path)[SUPPORT] == prompt_row()
    assert ledger.catch_up()
    assert copies_beside(path)[SUPPORT] == prompt_row(tokens=(2,))
    ledger.close()


def test_many_missing_copies_are_written_a_few_at_a_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.ledger.promises._MAX_COPIES_A_CALL", 2)
    ledger = Ledger.open(path, with_copies=False)
    rows: list[PromptRow] = [prompt_row(f"p{number}", f"pin-{number}") for number in range(5)]
    for row in rows:
        ledger.promises.put_prompt(row)
    ledger = reopened(ledger)
    calls: list[bool] = []
    while ledger.promises.misses_copies:
        calls.append(ledger.catch_up())
    assert calls == [False, False, True]
    assert set(copies_beside(path)) == {prompt_id(row.name) for row in rows}
    ledger.close()


def test_the_wal_is_empty_between_commits_and_after_a_reader_has_gone(ledger: Ledger, path: Path) -> None:
    wal = path.with_name("ledger.sqlite-wal")
    assert wal.stat().st_size == 0
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM prompts").fetchone()
        ledger.promises.put_prompt(prompt_row("other", "pin-2"))
        assert wal.stat().st_size > 0
        assert ledger.is_behind
        assert not ledger.catch_up()
    assert ledger.catch_up()
    assert wal.stat().st_size == 0


REMOVALS: dict[str, Callable[[Ledger], object]] = {
    "dropped chunks": lambda ledger: ledger.packs.drop_chunks(
        "ns", [chunk.key for chunk in pack_record("p1", [1]).chunks]
    ),
    "a dropped pack": lambda ledger: ledger.packs.drop_pack("p1"),
    "a pack with the same chunks": lambda ledger: ledger.packs.commit_pack(pack_record("p2", [1])),
    "a namespace": lambda ledger: ledger.delete_namespace("ns"),
}


@pytest.mark.parametrize("removal", REMOVALS)
def test_a_pack_that_lost_its_rows_on_purpose_is_remembered_until_its_file_is_gone(
    ledger: Ledger, removal: str
) -> None:
    ledger.packs.commit_pack(pack_record("p1", [1]))
    assert ledger.packs.removed_packs() == set()
    REMOVALS[removal](ledger)
    assert ledger.packs.removed_packs() == {"p1"}
    ledger.packs.forget_removed(["p1", "unknown"])
    assert ledger.packs.removed_packs() == set()


def test_rows_are_equal_whatever_their_revision(ledger: Ledger) -> None:
    assert replace(prompt_row(), revision=5) == prompt_row()
    assert BindingRow(pin_id="a", namespace_id="b", keys=(), covered_tokens=0, revision=1) == BindingRow(
        pin_id="a", namespace_id="b", keys=(), covered_tokens=0
    )


def test_copies_that_were_written_before_the_disk_was_full_go_with_their_rows(
    ledger: Ledger, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were there and not known, so a later start brought back prompts that had been deleted."""
    rows = [prompt_row(f"p{number}", f"id-{number}", tokens=(number,)) for number in range(4)]
    written, original = iter(range(100)), replace_file

    def full_after_two(target: Path, data: bytes) -> None:
        if next(written) >= 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(target, data)

    with monkeypatch.context() as patch:
        patch.setattr(kvtier.ledger.promise_copies, "replace_file", full_after_two)
        ledger.promises.change_prompts(put=rows)
    assert ledger.promises.misses_copies
    ledger.promises.change_prompts(deleted=[row.name for row in rows])
    ledger = reopened(ledger)
    assert ledger.promises.restore(list).prompts == []
    assert [prompt.name for prompt in ledger.load().prompts] == ["support"]
    ledger.close()


def many_rows() -> list[PromptRow]:
    """Enough rows that one sync makes all their copies durable."""
    return [prompt_row(f"p{number}", f"id-{number}", tokens=(number,)) for number in range(150)]


def test_many_copies_are_made_durable_together(ledger: Ledger, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, synced = many_rows(), list[Path]()
    with monkeypatch.context() as patch:
        patch.setattr("kvtier.fsync._sync_file_system", synced.append)
        patch.setattr("os.fsync", lambda fd: None)
        ledger.promises.change_prompts(put=rows)
    assert synced == [path.parent / "promises"]
    copies = copies_beside(path)
    assert [copies[prompt_id(row.name)] for row in rows] == rows
    changed = [replace(row, tokens=(7,)) for row in rows]
    ledger.promises.change_prompts(put=changed)
    copies = copies_beside(path)
    assert [copies[prompt_id(row.name)] for row in rows] == changed
    assert len(list((path.parent / "promises").iterdir())) == len(rows) + 2, "older copies are gone"


@pytest.mark.parametrize(
    ("step", "num_done"),
    [
        ("os.open", 0),
        ("os.open", 70),
        ("kvtier.fsync._sync_file_system", 0),
        ("pathlib.Path.rename", 0),
        ("pathlib.Path.rename", 70),
    ],
)
def test_many_copies_that_cannot_be_written_are_written_later(
    ledger: Ledger, path: Path, monkeypatch: pytest.MonkeyPatch, step: str, num_done: int
) -> None:
    """What was there and not known came back at a later start, after its prompt had been deleted."""
    rows, calls = many_rows(), iter(range(1000))
    module, _, name = step.rpartition(".")
    owner = Path if module == "pathlib.Path" else importlib.import_module(module)
    original = getattr(owner, name)

    def full(*arguments: Any, **named: Any) -> Any:
        if next(calls) >= num_done:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, full)
        ledger.promises.change_prompts(put=rows)
    assert ledger.promises.misses_copies
    assert len(ledger.load().prompts) == len(rows) + 1, "the rows are durable"
    while not ledger.catch_up():
        pass
    copies = copies_beside(path)
    assert [copies[prompt_id(row.name)] for row in rows] == rows
    ledger.promises.change_prompts(deleted=[row.name for row in rows])
    ledger = reopened(ledger)
    assert ledger.promises.restore(list).prompts == []
    assert len(list((path.parent / "promises").iterdir())) == 2
    ledger.close()
