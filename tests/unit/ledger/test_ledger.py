"""The ledger's operations."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.errors import InvalidArgumentError, LedgerError
from kvtier.ledger import BindingRow, Ledger
from tests.fakes.chunks import key_of
from tests.fakes.rows import binding_row, namespace_row, pack_record, prompt_row


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger.open(tmp_path / "ledger.db")
    ledger.put_namespace(namespace_row())
    ledger.promises.put_prompt(prompt_row())
    yield ledger
    ledger.close()


def chunks_by_pack(ledger: Ledger) -> dict[str, list[int]]:
    """Return the chunk numbers of each pack, in the order of the record."""
    packs = ledger.load().packs
    return {pack_id: [int.from_bytes(c.key[:32], "big") for c in record.chunks] for pack_id, record in packs.items()}


def test_everything_comes_back_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    before = Ledger.open(path)
    assert before.load().packs == {}
    before.put_namespace(namespace_row())
    before.promises.put_prompt(prompt_row())
    before.promises.put_prompt(prompt_row("other", "pin-2", tokens=()))
    before.promises.put_binding(binding_row())
    assert before.packs.commit_pack(pack_record("p1", [3, 1, 2])) == []
    before.close()
    after = Ledger.open(path)
    snapshot = after.load()
    assert snapshot.namespaces == (namespace_row(),)
    assert snapshot.prompts == (prompt_row("other", "pin-2", tokens=()), prompt_row())
    assert snapshot.bindings == (binding_row(),)
    assert snapshot.packs == {"p1": pack_record("p1", [3, 1, 2])}
    after.close()
    after.close()


@pytest.mark.parametrize(
    "damage",
    [
        "offset = -1",
        "stored_bytes = -1",
        f"stored_bytes = {2**40}",
        "raw_bytes = -1",
        f"raw_bytes = {2**40}",
        "pack_id = 'none'",
    ],
)
def test_a_chunk_row_that_makes_no_sense_is_a_chunk_that_is_not_held(ledger: Ledger, damage: str) -> None:
    ledger.packs.commit_pack(pack_record("p1", [1, 2, 3]))
    sql = ledger._database.connection
    sql.execute("PRAGMA foreign_keys = OFF")
    sql.execute(f"UPDATE chunks SET {damage} WHERE key = ?", (key_of(2),))
    assert chunks_by_pack(ledger) == {"p1": [1, 3]}


def test_the_chunks_of_each_namespace_are_told_apart(ledger: Ledger) -> None:
    ledger.put_namespace(namespace_row("ns-2"))
    ledger.packs.commit_pack(pack_record("p1", [1, 2]))
    ledger.packs.commit_pack(pack_record("p2", [2, 3], "ns-2"))
    ledger.packs.commit_pack(pack_record("p3", [4], "ns"))
    stored = ledger.load().stored
    assert stored.of_namespace("ns").records == {"p1": pack_record("p1", [1, 2]), "p3": pack_record("p3", [4])}
    assert stored.of_namespace("ns-2").records == {"p2": pack_record("p2", [2, 3], "ns-2")}


def test_put_namespace_updates_and_keeps_what_hangs_on_it(ledger: Ledger) -> None:
    ledger.promises.put_binding(binding_row())
    ledger.packs.commit_pack(pack_record("p1", [1]))
    ledger.put_namespace(namespace_row(seen_unix_s=9.0))
    snapshot = ledger.load()
    assert snapshot.namespaces == (namespace_row(seen_unix_s=9.0),)
    assert (len(snapshot.bindings), len(snapshot.packs)) == (1, 1)


def test_delete_namespace_takes_all_of_it_and_nothing_else(ledger: Ledger) -> None:
    ledger.put_namespace(namespace_row("ns-2"))
    for namespace_id in ("ns", "ns-2"):
        ledger.promises.put_binding(binding_row(namespace_id=namespace_id))
        ledger.packs.commit_pack(pack_record(f"pack-of-{namespace_id}", [1, 2], namespace_id))
    ledger.delete_namespace("ns")
    snapshot = ledger.load()
    assert [row.namespace_id for row in snapshot.namespaces] == ["ns-2"]
    assert snapshot.bindings == (binding_row(namespace_id="ns-2"),)
    assert chunks_by_pack(ledger) == {"pack-of-ns-2": [1, 2]}
    assert snapshot.prompts == (prompt_row(),)


def test_put_prompt_with_its_pin_id_keeps_the_bindings(ledger: Ledger) -> None:
    ledger.promises.put_binding(binding_row())
    changed = replace(
        prompt_row(pinned=False, expires_unix_s=77.0), priority=3, origin="request", owner="0f" * 8, public=True
    )
    ledger.promises.put_prompt(changed)
    assert ledger.load().prompts == (changed,)
    assert ledger.load().bindings == (binding_row(),)


def test_put_prompt_with_another_pin_id_drops_the_bindings(ledger: Ledger) -> None:
    ledger.promises.put_binding(binding_row())
    ledger.promises.put_prompt(prompt_row(pin_id="pin-2", tokens=(9,)))
    assert ledger.load().prompts == (prompt_row(pin_id="pin-2", tokens=(9,)),)
    assert ledger.load().bindings == ()


def test_delete_prompt_takes_its_bindings(ledger: Ledger) -> None:
    ledger.promises.put_prompt(prompt_row("other", "pin-2"))
    ledger.promises.put_binding(binding_row())
    ledger.promises.put_binding(binding_row("pin-2"))
    ledger.promises.delete_prompt("support")
    ledger.promises.delete_prompt("support")
    assert [row.name for row in ledger.load().prompts] == ["other"]
    assert ledger.load().bindings == (binding_row("pin-2"),)


def test_put_binding_replaces(ledger: Ledger) -> None:
    ledger.promises.put_binding(binding_row(numbers=[1, 2, 3]))
    ledger.promises.put_binding(binding_row(numbers=[4]))
    ledger.promises.put_binding(binding_row(numbers=[]))
    assert ledger.load().bindings == (binding_row(numbers=[]),)


def test_a_chunk_is_read_from_its_newest_pack(ledger: Ledger) -> None:
    assert ledger.packs.commit_pack(pack_record("p1", [1, 2])) == []
    assert ledger.packs.commit_pack(pack_record("p2", [2, 3])) == []
    assert chunks_by_pack(ledger) == {"p1": [1], "p2": [2, 3]}


def test_a_pack_whose_last_chunk_was_replaced_is_reported_once(ledger: Ledger) -> None:
    ledger.packs.commit_pack(pack_record("p1", [1]))
    ledger.packs.commit_pack(pack_record("p2", [2]))
    assert sorted(ledger.packs.commit_pack(pack_record("p3", [1, 2]))) == ["p1", "p2"]
    assert ledger.packs.commit_pack(pack_record("p4", [4])) == []
    assert chunks_by_pack(ledger) == {"p3": [1, 2], "p4": [4]}


def test_drop_chunks_reports_packs_left_without_chunks(ledger: Ledger) -> None:
    ledger.packs.commit_pack(pack_record("p1", [1, 2]))
    ledger.packs.commit_pack(pack_record("p2", [3]))
    assert ledger.packs.drop_chunks("ns", [key_of(1), key_of(99)]) == []
    assert sorted(ledger.packs.drop_chunks("ns", [key_of(2), key_of(3)])) == ["p1", "p2"]
    assert ledger.packs.drop_chunks("ns", []) == []
    assert ledger.load().packs == {}


def test_a_key_is_one_chunk_per_namespace(ledger: Ledger) -> None:
    ledger.put_namespace(namespace_row("ns-2"))
    ledger.packs.commit_pack(pack_record("p1", [1]))
    ledger.packs.commit_pack(pack_record("p2", [1], "ns-2"))
    assert ledger.packs.drop_chunks("ns", [key_of(1)]) == ["p1"]
    assert chunks_by_pack(ledger) == {"p2": [1]}


def test_drop_pack_takes_its_chunks(ledger: Ledger) -> None:
    ledger.packs.commit_pack(pack_record("p1", [1, 2]))
    ledger.packs.commit_pack(pack_record("p2", [3]))
    ledger.packs.drop_pack("p1")
    ledger.packs.drop_pack("p1")
    assert chunks_by_pack(ledger) == {"p2": [3]}


@pytest.mark.parametrize(
    "write",
    [
        lambda ledger: ledger.promises.put_binding(binding_row(pin_id="unknown")),
        lambda ledger: ledger.promises.put_binding(binding_row(namespace_id="unknown")),
        lambda ledger: ledger.packs.commit_pack(pack_record("p2", [2], "unknown")),
        lambda ledger: ledger.packs.commit_pack(pack_record("p1", [1, 2])),
        lambda ledger: ledger.promises.put_prompt(prompt_row("other name", "pin-1")),
    ],
    ids=["binding-prompt", "binding-namespace", "pack-namespace", "pack-twice", "pin-id-twice"],
)
def test_what_would_dangle_is_refused_and_changes_nothing(ledger: Ledger, write: Callable[[Ledger], object]) -> None:
    ledger.packs.commit_pack(pack_record("p1", [1]))
    before = ledger.load()
    with pytest.raises(LedgerError, match="nothing was changed"):
        write(ledger)
    assert ledger.load() == before


def test_a_value_that_cannot_be_kept_changes_nothing(ledger: Ledger) -> None:
    ledger.promises.put_binding(binding_row())
    before = ledger.load()
    with pytest.raises(InvalidArgumentError):
        ledger.promises.put_prompt(prompt_row(pin_id="pin-2", tokens=[-1]))
    with pytest.raises(InvalidArgumentError):
        ledger.promises.put_binding(BindingRow(pin_id="pin-1", namespace_id="ns", keys=(b"a", b"bc"), covered_tokens=0))
    assert ledger.load() == before
    ledger.promises.put_prompt(prompt_row("later", "pin-3"))


def test_only_the_owner_can_read_prompts(tmp_path: Path, ledger: Ledger) -> None:
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*") if path.suffix != ".json"}
    assert modes == {"ledger.db": 0o600, "ledger.db-wal": 0o600, "ledger.db-shm": 0o600, "promises": 0o700}
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "promises").iterdir()} == {0o600}
