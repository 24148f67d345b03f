"""kill -9 at any moment: what was acknowledged is there afterwards, and rows and packs agree.

A kill keeps what the kernel has; that fsyncs happen, and in which order, is shown by test_packs_order_of_calls.py and
test_schema.py (synchronous = FULL).
"""

import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvtier.disk.packs.pack_tier import PackTier
from kvtier.ledger import Ledger
from tests.fakes.chunks import read_back
from tests.fakes.keys import seals_of
from tests.fault import commit_loop

NUM_KILLS = 12
ROOT = Path(__file__).parents[2]


def run_and_kill(state_dir: Path, seed: int, after_s: float, key_ids: list[str]) -> list[str]:
    """Return the lines that the child said before it was killed, `after_s` after it was ready."""
    command = [sys.executable, "-m", "tests.fault.commit_loop", str(state_dir), str(seed), *key_ids]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        timer = threading.Timer(after_s, child.kill)
        timer.start()
        lines = [line for line in child.stdout if line.endswith("\n")]
        timer.join()
    assert child.returncode == -9
    return [line.rstrip("\n") for line in lines]


def apply(lines: list[str], held: set[int], pinned: set[str]) -> None:
    """Update what must be there."""
    for line in lines:
        verb, _, what = line.partition(" ")
        if verb == "held":
            held.add(int(what))
        elif verb == "dropping":
            held.discard(int(what))
        else:
            pinned.add(what)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("keys", ["plain", "sealed", "rotated"])
def test_what_was_acknowledged_survives_kills(tmp_path: Path, keys: str) -> None:
    """Also with encryption, and with another key first after each kill."""
    rng = random.Random(20_260)
    held: set[int] = set()
    pinned: set[str] = set()
    for seed in range(4 * NUM_KILLS):
        if seed >= NUM_KILLS and len(held) > 10 and len(pinned) > NUM_KILLS:
            break  # a busy machine acknowledges little before it is killed
        first = f"k{seed % 3}" if keys == "rotated" else "k0"
        key_ids = [first, *sorted({"k0", "k1", "k2"} - {first})] if keys != "plain" else []
        apply(run_and_kill(tmp_path, seed, rng.uniform(0, 0.15), key_ids), held, pinned)
        check(tmp_path, held, pinned, key_ids)
    assert len(held) > 10
    assert len(pinned) > NUM_KILLS


def check(state_dir: Path, held: set[int], pinned: set[str], key_ids: list[str]) -> None:
    """Compare the state with what was acknowledged, as the next start finds it."""
    seals = seals_of(*key_ids)
    ledger, tier = Ledger.open(state_dir / "ledger.db", ring=seals.ring), PackTier(state_dir / "packs", seals=seals)
    snapshot = ledger.load()
    ledger.close()
    on_disk = tier.list_packs()
    assert pinned <= {row.name for row in snapshot.prompts}
    for pack_id, record in snapshot.packs.items():
        assert on_disk[pack_id] == record.file_bytes
    chunks = {int.from_bytes(c.key[:32], "big"): c for record in snapshot.packs.values() for c in record.chunks}
    assert held <= chunks.keys()
    for number, chunk in chunks.items():
        assert read_back(tier, chunk) == commit_loop.data_of(number)
