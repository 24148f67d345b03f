"""Table, ledger and pack files agree because one module changes them. No other may."""

import ast
from collections.abc import Iterator
from pathlib import Path

import kvtier

ROOT = Path(kvtier.__file__).parent
OWNER = ROOT / "disk" / "chunk_index.py"
LEDGER_OPERATIONS = {"commit_pack", "move_chunks", "drop_chunks"}
WITHOUT_A_DAEMON = {ROOT / "maintenance" / "offline.py"}
"""fsck on a stopped daemon's folder, where there is no table."""


def calls(path: Path, names: set[str]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr in names:
            yield f"{path.relative_to(ROOT)} {node.attr}"


def test_only_the_index_changes_where_chunks_lie_on_disk() -> None:
    others = [path for path in ROOT.rglob("*.py") if path != OWNER]
    daemons = [path for path in others if not {"core", "gateway", "discovery", "library"} & set(path.parts)]
    found = [call for path in daemons for call in calls(path, {"place", "unplace"})]
    assert found == []


def test_only_the_index_changes_rows_of_packs_in_a_running_daemon() -> None:
    others = set(ROOT.rglob("*.py")) - {OWNER, ROOT / "ledger" / "pack_rows.py"} - WITHOUT_A_DAEMON
    assert [call for path in sorted(others) for call in calls(path, LEDGER_OPERATIONS)] == [
        "maintenance/repair.py drop_chunks"  # of its own protocol `Rows`, which online.py passes on to the index
    ]
