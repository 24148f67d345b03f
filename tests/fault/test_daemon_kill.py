"""kill -9 of a real daemon at any moment: acknowledged pins and durable chunks are there afterwards, and nothing else.

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
from tests.fault.chaos import Model, many_lives

NUM_KILLS = int(os.environ.get("KVTIER_CHAOS_KILLS", "16"))
SEED = int(os.environ.get("KVTIER_CHAOS_SEED", "20260"))
BUSY = {
    # Everything that runs in the background runs all the time.
    "KVTIER_DISK_COMPACT_DEAD_RATIO": "0.1",
    "KVTIER_HOST_PREWARM": "true",
    "KVTIER_DISK_SCRUB_BYTES_PER_S": "64MiB",
}


@pytest.mark.timeout(60 + 12 * NUM_KILLS)
@pytest.mark.parametrize("store", ["pinned", "all"])
def test_what_was_promised_survives_kills(
    tmp_path: Path, record_property: Callable[[str, object], None], store: str
) -> None:
    model = Model(rng=random.Random(SEED))
    # Host memory for 128 chunks, disk for about 340, up to 180 pinned: everything is evicted, spilled and compacted.
    config = config_in(tmp_path, host_bytes=1 << 20, disk_bytes=2 << 20)
    started_s = time.monotonic()
    asyncio.run(many_lives(config, model, NUM_KILLS, BUSY | {"KVTIER_CACHE_STORE": store}, store_all=store == "all"))
    for name, count in vars(model.counts).items():
        record_property(name, count)
    print(f"\nstore={store} seed={SEED}: {model.counts}, losses 0, {time.monotonic() - started_s:.1f} s")
    assert model.counts.pins > NUM_KILLS
    assert model.counts.checked_durable > NUM_KILLS
    assert model.counts.verified_chunks > NUM_KILLS
