"""Each finding, made for real on disk: found, repaired, clean afterwards, and nothing that read right is lost."""

import errno
import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvtier.disk.packs.pack_directory import UNCLAIMED_FOLDER
from kvtier.disk.packs.pack_tier import PackTier
from kvtier.errors import LedgerError, TierIOError
from kvtier.ledger import Ledger
from kvtier.ledger.checks import salvage_ledger
from kvtier.ledger.namespace_files import load_namespaces
from kvtier.ledger.promise_copies import binding_id, prompt_id
from kvtier.maintenance import Code, observe, offline
from tests.fakes.chunks import payload_of, soft
from tests.fakes.fsck import assert_clean, check
from tests.fakes.gates import failing
from tests.fakes.memory_shortage import NO_MEMORY, refuse_memory
from tests.unit.maintenance.state import NAMESPACE, RAW_BYTES, State, keys

ALL = keys(0, 1, 2, 3, 4, 5)


@pytest.fixture
def state(tmp_path: Path) -> State:
    return State(tmp_path)


def codes(state: State, **how: bool) -> set[str]:
    return {finding.code for finding in check(state.folder, **how).findings}


def repaired(state: State) -> None:
    report = check(state.folder, repair=True)
    assert not report.remaining, report.remaining
    assert_clean(state.folder)


def pack_missing(state: State) -> None:
    state.path(state.packs[0]).unlink()


def pack_truncated(state: State) -> None:
    os.truncate(state.path(state.packs[0]), state.packs[0].chunks[2].offset + 1)


def pack_longer(state: State) -> None:
    with state.path(state.packs[0]).open("ab") as file:
        file.write(b"more")


def pack_empty_file(state: State) -> None:
    os.truncate(state.path(state.packs[0]), 0)


def header_flipped(state: State) -> None:
    state.flip(state.packs[0], 9)


def chunk_flipped(state: State) -> None:
    state.flip(state.packs[0], state.packs[0].chunks[1].offset + 700)


def packs_swapped(state: State) -> None:
    one, other = map(state.path, state.packs)
    one.rename(one.with_suffix(".x"))
    other.rename(one)
    one.with_suffix(".x").rename(other)


def row_offset_changed(state: State) -> None:
    state.sql(f"UPDATE chunks SET offset = offset + 1 WHERE offset = {state.packs[0].chunks[1].offset}")


def orphan(state: State) -> None:
    state.write_pack(6)


def orphan_superseded(state: State) -> None:
    state.write_pack(0)


def orphan_unreadable(state: State) -> None:
    record = state.write_pack(6)
    os.truncate(state.path(record), 100)


def temporary_file(state: State) -> None:
    (state.tier.directory / ("0" * 32 + ".kvpack.tmp")).write_bytes(b"x")


def pack_without_chunks(state: State) -> None:
    state.sql("DELETE FROM chunks WHERE pack_id = (SELECT pack_id FROM chunks ORDER BY key LIMIT 1)")


def pack_of_another_namespace(state: State) -> None:
    payloads = [payload_of(number, soft(RAW_BYTES, number)) for number in range(3)]
    record = state.tier.write_pack("f" * 32, payloads)
    state.path(record).replace(state.path(state.packs[0]))


CASES: list[tuple[Callable[[State], None], set[Code], set[bytes]]] = [
    (pack_missing, {Code.PACK_MISSING}, keys(3, 4, 5)),
    (pack_truncated, {Code.PACK_LENGTH, Code.CHUNK_BEYOND_END, Code.HEADER_UNREADABLE}, ALL - keys(2)),
    (pack_longer, {Code.PACK_LENGTH, Code.HEADER_UNREADABLE}, ALL),
    (pack_empty_file, {Code.PACK_LENGTH, Code.CHUNK_BEYOND_END, Code.HEADER_UNREADABLE}, keys(3, 4, 5)),
    (header_flipped, {Code.HEADER_UNREADABLE}, ALL),
    (chunk_flipped, {Code.CHUNK_DAMAGED}, ALL - keys(1)),
    (packs_swapped, {Code.HEADER_DIFFERS}, ALL),
    (row_offset_changed, {Code.HEADER_DIFFERS}, ALL),
    (orphan, {Code.PACK_ORPHAN}, ALL | keys(6, 7, 8)),
    (orphan_superseded, {Code.PACK_ORPHAN}, ALL),
    (orphan_unreadable, {Code.PACK_ORPHAN}, ALL),
    (temporary_file, {Code.TEMPORARY_FILE}, ALL),
    (pack_of_another_namespace, {Code.HEADER_NAMESPACE}, ALL),
]


@pytest.mark.parametrize(("damage", "expected", "kept"), CASES, ids=[case[0].__name__ for case in CASES])
def test_damage_is_found_and_repaired(
    state: State, damage: Callable[[State], None], expected: set[Code], kept: set[bytes]
) -> None:
    assert_clean(state.folder)
    damage(state)
    found = codes(state)
    assert expected <= found, found
    repaired(state)
    assert state.readable() == kept
    assert state.load().prompts == (state.prompt,)


@pytest.mark.parametrize("damage", [chunk_flipped, header_flipped])
def test_a_pack_that_cannot_be_rewritten_stays_as_it_is(
    state: State, monkeypatch: pytest.MonkeyPatch, damage: Callable[[State], None]
) -> None:
    """On a full disk its file was unlinked, or set aside, all the same: with it went what read right."""
    damage(state)
    kept = ALL - keys(1) if damage is chunk_flipped else ALL
    with monkeypatch.context() as patch:
        full = TierIOError(state.tier.directory, "write", OSError(errno.ENOSPC, "No space left on device"))
        failing(patch, PackTier, "rewrite_pack", lambda: full, times=1)
        (finding,) = check(state.folder, repair=True).remaining
        assert finding.detail.endswith("No space left on device")
    repaired(state)
    assert state.readable() == kept


@pytest.mark.parametrize("damage", [packs_swapped, row_offset_changed])
def test_a_start_after_a_repair_that_was_cut_off_deletes_nothing(
    state: State, monkeypatch: pytest.MonkeyPatch, damage: Callable[[State], None]
) -> None:
    """Its rows, which made no sense, were dropped; so it counted as removed, and the next start swept its file."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    damage(state)
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", refuse)
        check(state.folder, repair=True)
    with closing(Ledger.open(state.ledger_path)) as ledger:
        state.tier.sweep(ledger.packs.removed_packs())
    repaired(state)
    assert state.readable() == ALL


def test_looking_changes_nothing(state: State) -> None:
    for damage in (chunk_flipped, orphan, temporary_file):
        damage(state)
    before = {path: path.read_bytes() for path in state.folder.rglob("*") if path.is_file()}
    check(state.folder)
    assert {path: path.read_bytes() for path in state.folder.rglob("*") if path.is_file()} == before


def test_what_is_damaged_is_set_aside_and_noted(state: State) -> None:
    chunk_flipped(state)
    repaired(state)
    notes = {finding.code: finding for finding in assert_clean(state.folder).findings}
    assert set(notes) == {Code.NOTE_SET_ASIDE, Code.NOTE_PROMPT_INCOMPLETE}
    assert notes[Code.NOTE_PROMPT_INCOMPLETE].num_chunks == 1


def test_damage_is_seen_only_by_a_deep_check(state: State) -> None:
    chunk_flipped(state)
    assert codes(state, deep=False) == set()
    assert codes(state, deep=True) == {Code.CHUNK_DAMAGED}


@pytest.mark.parametrize("is_set_aside", [False, True])
def test_the_last_copy_that_reads_right_is_not_unlinked(state: State, is_set_aside: bool) -> None:
    """What had a row elsewhere was taken for held there, though only a deep check reads it."""
    chunk_flipped(state)
    copy = state.path(state.write_pack(0))
    if is_set_aside:
        (state.folder / UNCLAIMED_FOLDER).mkdir()
        copy.rename(state.folder / UNCLAIMED_FOLDER / copy.name)
    report = check(state.folder, repair=True, deep=False)
    (finding,) = (finding for finding in report.findings if finding.code in (Code.PACK_ORPHAN, Code.NOTE_UNCLAIMED))
    assert "not repaired: " in finding.detail
    assert "fsck --deep --repair" in finding.detail
    repaired(state)
    assert state.readable() == ALL


def test_what_was_dropped_on_purpose_is_not_brought_back(state: State) -> None:
    """A daemon was killed between an eviction's rows and its unlink; a repair took the file for a lost pack."""
    record = state.write_pack(6)
    state.sql(f"INSERT INTO removed_packs VALUES ('{record.pack_id}')")
    assert codes(state) == {Code.NOTE_PACK_REMOVED}
    repaired(state)
    assert state.readable() == ALL
    assert not state.path(record).exists()


def test_strange_files_are_left_alone(state: State) -> None:
    strange = state.tier.directory / "notes.txt"
    strange.write_text("mine")
    assert codes(state, repair=True) == {Code.NOTE_UNKNOWN_FILE}
    assert strange.exists()


def test_rows_that_refer_to_nothing(state: State) -> None:
    """Somebody deleted the namespace with the sqlite3 shell, whose foreign keys are off: packs and bindings stayed."""
    state.sql("DELETE FROM namespaces")
    assert Code.ROW_DANGLING in codes(state)
    repaired(state)
    assert state.readable() == ALL, "the namespace comes back from its copy"


def test_rows_that_refer_to_a_namespace_of_which_nothing_is_left(state: State) -> None:
    state.sql("DELETE FROM namespaces")
    (state.folder / "namespaces" / f"{NAMESPACE}.json").unlink()
    report = check(state.folder, repair=True)
    assert not report.remaining
    assert state.load().packs == {}
    assert len(list((state.folder / "unclaimed").iterdir())) == 2, (
        "packs of an unknown namespace wait, they are not lost"
    )


@pytest.mark.parametrize(
    ("change", "kept_without_copies"),
    [
        ("UPDATE prompts SET tokens = x'01000000' WHERE name = 'p'", 0),
        ("UPDATE bindings SET covered_tokens = covered_tokens + 1", 1),
        ("UPDATE namespaces SET fingerprint = '{}'", 1),
    ],
    ids=["prompt", "binding", "namespace"],
)
@pytest.mark.parametrize("has_copies", [True, False])
def test_altered_rows_come_back_from_their_copies_or_are_dropped_and_nothing_else_is(
    state: State, change: str, kept_without_copies: int, has_copies: bool
) -> None:
    """A bit flipped in a page of the ledger: SQLite saw nothing, the row's checksum did."""
    before = state.load()
    state.sql(change)
    if not has_copies:
        shutil.rmtree(state.folder / "promises")
    found = check(state.folder, deep=True)
    (altered,) = (finding for finding in found.findings if finding.code is Code.ROW_ALTERED)
    assert "packs were not looked at: --repair mends the ledger" in altered.detail
    assert not found.num_packs
    repaired(state)
    if has_copies:
        assert (state.load().prompts, state.load().bindings) == (before.prompts, before.bindings)
    assert len(state.load().prompts) == (1 if has_copies else kept_without_copies)
    assert state.readable() == ALL
    (row,) = state.load().namespaces
    assert row.namespace_id == NAMESPACE


# Copies of promises


def copy_of(state: State, promise: str) -> Path:
    (path,) = (state.folder / "promises").glob(f"{promise}-*.json")
    return path


def prompt_lost(state: State) -> None:
    state.sql("DELETE FROM prompts", "DELETE FROM bindings")


def old_prompt(state: State) -> None:
    backup = state.ledger_path.read_bytes()
    state.put_prompts(["p"])
    state.ledger_path.write_bytes(backup)


def copy_damaged(state: State) -> None:
    path = copy_of(state, prompt_id("p"))
    path.write_bytes(path.read_bytes()[:-3])


def copy_missing(state: State) -> None:
    copy_of(state, binding_id("1" * 32, NAMESPACE)).unlink()


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (prompt_lost, {Code.PROMISE_LOST}),
        (old_prompt, {Code.PROMISE_LOST, Code.NOTE_COPY_MISSING}),
        (copy_damaged, {Code.COPY_DAMAGED}),
        (copy_missing, {Code.NOTE_COPY_MISSING}),
    ],
)
def test_promises_and_their_copies_are_compared_and_follow_each_other(
    state: State, damage: Callable[[State], None], expected: set[Code]
) -> None:
    before = state.load()
    damage(state)
    assert codes(state) == expected
    repaired(state)
    assert [row.name for row in state.load().prompts] == ["p"]
    if damage is not old_prompt:  # another pin under that name
        assert (state.load().prompts, state.load().bindings) == (before.prompts, before.bindings)


# A lost or damaged ledger


def test_a_lost_ledger_is_made_again_from_packs_and_copies(state: State) -> None:
    before = state.load()
    state.ledger_path.unlink()
    assert codes(state) == {Code.LEDGER_MISSING}
    repaired(state)
    assert (state.load().prompts, state.load().bindings) == (before.prompts, before.bindings)
    assert state.readable() == ALL
    (row,) = state.load().namespaces
    assert row.namespace_id == NAMESPACE


def test_packs_of_an_unknown_namespace_wait_until_it_is_known(state: State) -> None:
    (state.folder / "namespaces" / f"{NAMESPACE}.json").rename(state.folder / "copy")
    state.ledger_path.unlink()
    assert not check(state.folder, repair=True).remaining
    assert state.load().packs == {}
    assert {f.code for f in assert_clean(state.folder).findings} == {Code.NOTE_UNCLAIMED}
    (state.folder / "copy").rename(state.folder / "namespaces" / f"{NAMESPACE}.json")
    ledger = Ledger.open(state.ledger_path)
    ledger.put_namespace(load_namespaces(state.folder)[0])
    ledger.close()
    repaired(state)
    assert state.readable() == ALL
    assert list((state.folder / "unclaimed").iterdir()) == []


@pytest.mark.parametrize("seed", range(6))
def test_a_damaged_ledger_loses_nothing_that_can_be_read(state: State, seed: int) -> None:
    """Pages of the ledger are overwritten: it is moved aside, its rows are saved, the rest comes from packs."""
    state.put_prompts(f"q{number}" for number in range(40))
    state.sql("PRAGMA wal_checkpoint(TRUNCATE)")
    data = bytearray(state.ledger_path.read_bytes())
    num_pages = len(data) // 4096
    page = 2 + seed * 3 % (num_pages - 2)
    data[page * 4096 + 8 : page * 4096 + 4000] = b"\xa5" * 3992
    state.ledger_path.write_bytes(data)
    first = check(state.folder, repair=True)
    assert Code.LEDGER_DAMAGED in {finding.code for finding in first.findings}
    assert not first.remaining, first.remaining
    assert_clean(state.folder)
    assert state.readable() == ALL
    (aside,) = [path for path in state.folder.iterdir() if ".damaged-" in path.name]
    assert aside.read_bytes() == bytes(data)


def test_what_is_saved_of_a_damaged_ledger_keeps_its_priority(state: State) -> None:
    state.sql("PRAGMA wal_checkpoint(TRUNCATE)")
    data = bytearray(state.ledger_path.read_bytes())
    end = 13 * 4096  # of the table of chunks
    data[end - 4096 + 8 : end - 96] = b"\xa5" * (4096 - 104)
    state.ledger_path.write_bytes(data)
    assert Code.LEDGER_DAMAGED in {finding.code for finding in check(state.folder, repair=True).findings}
    assert state.load().prompts == (state.prompt,)
    assert state.prompt.priority == 7


def test_a_pack_that_lost_some_of_its_rows_gets_them_again(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of `chunks` holds rows of many packs, each of which kept others: nothing found what was lost."""

    def salvage(path: Path, target: Path) -> dict[str, int]:
        saved = salvage_ledger(path, target)
        with closing(sqlite3.connect(target)) as sql, sql:
            lost = [(pack.chunks[1].key,) for pack in state.packs]
            sql.executemany("DELETE FROM chunks WHERE key = ?", lost)
        return saved

    monkeypatch.setattr(offline, "salvage_ledger", salvage)
    test_what_is_saved_of_a_damaged_ledger_keeps_its_priority(state)
    assert_clean(state.folder)
    assert state.readable() == ALL


def test_a_repair_that_was_cut_off_gives_lost_rows_back_all_the_same(
    state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger was sound the next time, and no one looked for what it had lost."""

    def cut_off(*_: object) -> str:
        raise LedgerError("cannot copy promises: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(offline._OfflineCheck, "_fill", cut_off)
        with pytest.raises(LedgerError, match="No space left"):
            test_a_pack_that_lost_some_of_its_rows_gets_them_again(state, monkeypatch)
    monkeypatch.undo()
    assert state.readable() != ALL
    repaired(state)
    assert state.readable() == ALL
    assert not (state.folder / "ledger.sqlite.repairing").exists()


def test_a_copy_that_cannot_be_read_is_a_finding_and_stays(state: State) -> None:
    (file,) = (state.folder / "promises").glob(f"{prompt_id('p')}-*")
    file.unlink()
    file.symlink_to(file.name)
    for repair in (False, True):
        report = check(state.folder, repair=repair)
        assert [finding.code for finding in report.remaining] == [Code.UNREADABLE]
        assert file.is_symlink()


def test_where_the_disk_is_full_no_row_is_given_up(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    """What could be read was counted as damaged, and the ledger moved aside with it."""
    before = state.ledger_path.read_bytes()
    data = bytearray(before)
    data[13 * 4096 - 4088 : 13 * 4096 - 96] = b"\xa5" * 3992
    state.ledger_path.write_bytes(data)
    connect = sqlite3.connect

    def full(path: Any, *args: Any, **how: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(path, *args, **how)
        if str(path).endswith(".salvaged"):
            connection.execute("PRAGMA max_page_count = 5")
        return connection

    with monkeypatch.context() as patch:
        patch.setattr(sqlite3, "connect", full)
        with pytest.raises(LedgerError, match="free space there, and try again"):
            check(state.folder, repair=True)
    assert sorted(path.name for path in state.folder.glob("ledger*")) == ["ledger.sqlite"]
    assert state.ledger_path.read_bytes() == data
    repaired(state)
    assert state.readable() == ALL


def test_a_ledger_that_is_no_database_is_moved_aside(state: State) -> None:
    state.ledger_path.write_bytes(b"nonsense" * 1000)
    assert codes(state) == {Code.LEDGER_DAMAGED}
    repaired(state)
    assert state.readable() == ALL


def test_a_damaged_ledger_without_packs_is_found(tmp_path: Path) -> None:
    """The directory was called clean: without a folder of packs only packs were compared."""
    (tmp_path / "ledger.sqlite").write_bytes(b"nonsense" * 1000)
    assert [finding.code for finding in check(tmp_path).findings] == [Code.LEDGER_DAMAGED]
    assert not (tmp_path / "packs").exists()


def test_an_empty_directory_is_clean(tmp_path: Path) -> None:
    assert check(tmp_path).findings == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [*NO_MEMORY, None], ids=repr)
def test_what_gets_no_memory_to_be_read_is_neither_good_nor_damaged(
    state: State, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    """A repair dropped chunks that were right, when memory was short while it read them."""
    with monkeypatch.context() as patch:
        if error is not None:
            refuse_memory(patch, error, times=1000)
        else:
            patch.setattr(observe, "bytearray", lambda length=0: bytearray(length and 2**60), raising=False)
        report = check(state.folder, repair=True)
    assert {finding.code for finding in report.remaining} == {Code.UNREADABLE}
    assert state.readable() == ALL
    assert_clean(state.folder)
