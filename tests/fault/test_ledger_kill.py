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

from kvtier.disk.packs.pack_tier import PackTier
from kvtier.ledger import Ledger
from tests.fakes.chunks import read_back
from tests.fault import commit_loop

NUM_KILLS = 12
ROOT = Path(__file__).parents[2]


def run_and_kill(state_dir: Path, seed: int, after_s: float) -> list[str]:
    """Return the lines that the child said before it was killed, `after_s` after it was ready."""
    command = [sys.executable, "-m", "tests.fault.commit_loop", str(state_dir), str(seed)]
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


def test_what_was_acknowledged_survives_kills(tmp_path: Path) -> None:
    rng = random.Random(20_260)
    held: set[int] = set()
    pinned: set[str] = set()
    for seed in range(4 * NUM_KILLS):
        if seed >= NUM_KILLS and len(held) > 10 and len(pinned) > NUM_KILLS:
            break  # a busy machine acknowledges little before it is killed
        apply(run_and_kill(tmp_path, seed, rng.uniform(0, 0.15)), held, pinned)
        check(tmp_path, held, pinned)
    assert len(held) > 10
    assert len(pinned) > NUM_KILLS


def check(state_dir: Path, held: set[int], pinned: set[str]) -> None:
    """Compare the state with what was acknowledged, as the next start finds it."""
    ledger, tier = Ledger.open(state_dir / "ledger.db"), PackTier(state_dir / "packs")
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
