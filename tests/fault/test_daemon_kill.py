"""kill -9, now and then SIGTERM, of a real daemon at any moment: what it has promised is there afterwards.

Two namespaces, exports and imports, reboots, and in a run of its own a damaged pack now and then: see chaos.py.

A kill keeps what the kernel has; that fsyncs happen, and in which order, is shown by test_packs_order_of_calls.py and
test_power_loss.py. `make chaos` makes this run long: KVTIER_CHAOS_KILLS kills each.
"""

import asyncio
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.scripted_engine import config_in
from tests.fault.chaos import many_lives
from tests.fault.chaos_model import Model

NUM_KILLS = int(os.environ.get("KVTIER_CHAOS_KILLS", "12"))
SEED = int(os.environ.get("KVTIER_CHAOS_SEED", "20260"))
BUSY = {
    # Everything that runs in the background runs all the time.
    "TUNED_DISK_COMPACT_DEAD_RATIO": "0.1",
    "TUNED_HOST_PREFETCH": "true",
    "TUNED_DISK_SCRUB_BYTES_PER_S": str(64 << 20),
}


@pytest.mark.timeout(60 + 40 * NUM_KILLS)
@pytest.mark.parametrize(
    ("store", "damage_ratio", "num_lives"),
    [("pinned", 0.0, NUM_KILLS), ("all", 0.0, NUM_KILLS), ("pinned", 0.7, -(-NUM_KILLS // 2))],
    ids=["pinned", "all", "damaged"],
)
def test_what_was_promised_survives(
    tmp_path: Path, record_property: Callable[[str, object], None], store: str, damage_ratio: float, num_lives: int
) -> None:
    model = Model(rng=random.Random(SEED))
    # Host memory for 128 chunks, disk for about 340, up to 180 pinned: all are evicted, written back, compacted.
    config = config_in(tmp_path, host_bytes=1 << 20, disk_bytes=2 << 20)
    started_s = time.monotonic()
    settings = BUSY | {"KVTIER_CACHE_STORE": store}
    asyncio.run(many_lives(config, model, num_lives, settings, store_all=store == "all", damage_ratio=damage_ratio))
    for name, count in vars(model.counts).items():
        record_property(name, count)
    seconds = time.monotonic() - started_s
    print(f"\nstore={store} damage={damage_ratio} seed={SEED}: {model.counts}, losses 0, {seconds:.1f} s")
    assert model.counts.pins > num_lives
    assert model.counts.checked_durable > num_lives
    assert model.counts.verified_chunks > num_lives
    assert bool(model.counts.damages) == bool(damage_ratio)
