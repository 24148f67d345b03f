"""A child process that stores, re-stores and drops chunks, and says what is acknowledged; its parent kills it.

Run as `python commit_loop.py STATE_DIR SEED KEY_ID...`; with keys everything is sealed.
 Lines: `held N`, `dropping N` (before), `pinned NAME`.
"""

import random
import sys
from pathlib import Path

from kvtier.disk.packs.pack_tier import PackTier
from kvtier.ledger import Ledger
from tests.fakes.chunks import key_of, payload_of, soft
from tests.fakes.keys import seals_of
from tests.fakes.rows import namespace_row, prompt_row

NUM_CHUNKS = 30


def data_of(number: int) -> bytes:
    """Return what chunk `number` always holds."""
    return soft(20_000 + number, seed=number)


def main(state_dir: Path, seed: int, key_ids: list[str]) -> None:
    """Start up as the daemon does, then work until killed."""
    rng = random.Random(seed)
    seals = seals_of(*key_ids)
    ledger, tier = Ledger.open(state_dir / "ledger.db", ring=seals.ring), PackTier(state_dir / "packs", seals=seals)
    ledger.seal()
    tier.sweep(ledger.packs.removed_packs())
    ledger.put_namespace(namespace_row())
    say("ready")
    while True:
        numbers = rng.sample(range(NUM_CHUNKS), 3)
        record = tier.write_pack("ns", [payload_of(number, data_of(number)) for number in numbers])
        unlink(tier, ledger.packs.commit_pack(record))
        for number in numbers:
            say(f"held {number}")
        name = f"prompt {seed} {rng.randrange(10**9)}"
        ledger.promises.put_prompt(prompt_row(name, f"pin of {name}", tokens=range(1000)))
        say(f"pinned {name}")
        victim = rng.randrange(NUM_CHUNKS)
        say(f"dropping {victim}")
        unlink(tier, ledger.packs.drop_chunks("ns", [key_of(victim)]))


def unlink(tier: PackTier, pack_ids: list[str]) -> None:
    """Delete packs whose rows are gone."""
    for pack_id in pack_ids:
        tier.delete_pack(pack_id)


def say(line: str) -> None:
    """Acknowledge."""
    print(line, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
