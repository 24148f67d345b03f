"""What is saved of a ledger whose pages, or references, are damaged."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from kvtier.ledger import Ledger
from kvtier.ledger.checks import inspect_ledger, salvage_ledger
from tests.fakes.chunks import key_of
from tests.fakes.rows import binding_row, namespace_row, pack_record, prompt_row

PAGE_BYTES = 4096
NUM_CHUNKS = 500


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger.open(path)
    ledger.put_namespace(namespace_row())
    for number in range(200):
        ledger.promises.put_prompt(prompt_row(f"prompt {number}", f"pin-{number}", tokens=range(100)))
    ledger.promises.put_binding(binding_row("pin-0"))
    ledger.packs.commit_pack(pack_record("p1", range(NUM_CHUNKS)))
    ledger.packs.commit_pack(pack_record("p2", range(NUM_CHUNKS, NUM_CHUNKS + 3)))
    ledger.close()
    return path


def leaf_in_the_middle(path: Path, table: str) -> int:
    """Return the page in the middle of a table's leaves, of which there are several."""
    with closing(sqlite3.connect(path)) as sql:
        (pages,) = zip(
            *sql.execute("SELECT pageno FROM dbstat WHERE name = ? AND pagetype = 'leaf' ORDER BY path", (table,)),
            strict=True,
        )
    assert len(pages) > 4
    return int(pages[len(pages) // 2])


@pytest.mark.parametrize(("table", "num_rows"), [("prompts", 200), ("chunks", NUM_CHUNKS + 3)])
def test_rows_on_both_sides_of_a_damaged_page_are_saved(path: Path, tmp_path: Path, table: str, num_rows: int) -> None:
    """Tables with a row id and without one: each is read in its own order, from both ends until the damage is met."""
    try:
        page = leaf_in_the_middle(path, table)
    except sqlite3.OperationalError:
        pytest.skip("this SQLite does not say where pages lie")
    content = bytearray(path.read_bytes())
    content[(page - 1) * PAGE_BYTES : page * PAGE_BYTES] = b"\xff" * PAGE_BYTES
    path.write_bytes(content)
    assert inspect_ledger(path).problems
    saved = salvage_ledger(path, tmp_path / "saved.sqlite")
    with closing(sqlite3.connect(tmp_path / "saved.sqlite")) as sql:
        (num_saved,) = sql.execute(f"SELECT count(*) FROM {table}").fetchone()
    assert num_saved == saved[table]
    assert num_rows * 0.8 < num_saved < num_rows
    assert saved["namespaces"] == 1
    ledger = Ledger.open(tmp_path / "saved.sqlite")
    ledger.drop_dangling_rows()
    assert ledger.drop_dangling_rows() == 0
    ledger.load()
    ledger.close()


def test_a_chunk_whose_pack_has_no_row_is_not_held(path: Path) -> None:
    """As it is after a repair that could not save the pack's row."""
    with closing(sqlite3.connect(path)) as sql:
        sql.execute("DELETE FROM packs WHERE pack_id = 'p1'")
        sql.commit()
    ledger = Ledger.open(path)
    assert ledger.load().packs == {"p2": pack_record("p2", range(NUM_CHUNKS, NUM_CHUNKS + 3))}
    ledger.close()


def test_the_codec_and_the_order_of_a_pack_s_chunks_come_back(path: Path) -> None:
    ledger = Ledger.open(path)
    record = ledger.load().packs["p1"]
    assert [chunk.key for chunk in record.chunks] == [key_of(number) for number in range(NUM_CHUNKS)]
    ledger.close()
