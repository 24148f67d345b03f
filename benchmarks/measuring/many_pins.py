"""Thousands of pins whose prompts no request has, as a large installation holds them beside those that match."""

import time
import uuid
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.harness.daemon import Daemon
from benchmarks.harness.process import wait_until
from kvtier.core.layout import ChunkKey, group_idx_of
from kvtier.disk.base import ChunkPayload, checksum_of
from kvtier.disk.packs.pack_tier import PackTier
from kvtier.ledger import Ledger, PromptRow

# Ids that every vocabulary here has; the special tokens before them stay out.
_FIRST_TOKEN, _LAST_TOKEN = 16, 2000
BIND_TIMEOUT_S = 600
# Between scrapes, which are work for a busy daemon.
_POLL_S = 0.5
_CHUNKS_PER_PACK = 1000


def fill_with_pins(disk_dir: Path, count: int, tokens_each: int, seed: int = 0) -> None:
    """Write pins of random tokens into the ledger of a daemon that does not run, in one transaction.

    `kvtier pin` would take an fsync for each. Random tokens begin like no prompt that a benchmark sends.
    """
    disk_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    ledger = Ledger.open(disk_dir / "ledger.sqlite")
    try:
        with ledger.together():
            for number in range(count):
                tokens = random.integers(_FIRST_TOKEN, _LAST_TOKEN, tokens_each).tolist()
                ledger.promises.put_prompt(_pin(f"many-{seed}-{number}", tuple(tokens)))
    finally:
        ledger.close()


def _pin(name: str, tokens: tuple[int, ...]) -> PromptRow:
    return PromptRow(
        name=name,
        pin_id=uuid.uuid4().hex,
        pinned=True,
        tokens=tokens,
        model="",
        lora_name="",
        lora_path="",
        cache_salt="",
        recipe_json="",
        created_unix_s=1.0,
        expires_unix_s=0.0,
    )


def make_durable(disk_dir: Path) -> int:
    """Write packs with every chunk that pins are bound to, of a daemon that does not run; return how many chunks.

    The chunks are zeros: real ones would take minutes and tens of GiB, and are never read. What costs a daemon and an
    engine is their number.
    """
    ledger, packs = Ledger.open(disk_dir / "ledger.sqlite"), PackTier(disk_dir / "packs")
    try:
        snapshot, num_chunks = ledger.load(), 0
        for namespace in snapshot.namespaces:
            rows = [row for row in snapshot.bindings if row.namespace_id == namespace.namespace_id]
            keys = list(dict.fromkeys(key for row in rows for key in row.keys))
            for first in range(0, len(keys), _CHUNKS_PER_PACK):
                batch = keys[first : first + _CHUNKS_PER_PACK]
                payloads = [_zeros(key, namespace.layout.payload_bytes(group_idx_of(key))) for key in batch]
                ledger.packs.commit_pack(packs.write_pack(namespace.namespace_id, payloads))
            num_chunks += len(keys)
        return num_chunks
    finally:
        ledger.close()


def _zeros(key: ChunkKey, num_bytes: int) -> ChunkPayload:
    payload, checksum = _zero_payload(num_bytes)
    return ChunkPayload(key=key, segments=[payload], checksum=checksum)


@cache
def _zero_payload(num_bytes: int) -> tuple[memoryview, int]:
    payload = memoryview(bytes(num_bytes))
    return payload, checksum_of([payload])


def wait_bound(daemon: Daemon, count: int) -> float:
    """Wait until an engine has bound all of `count` pins; return the seconds that took.

    Raises:
        TimeoutError: It has not, within BIND_TIMEOUT_S.
    """

    def bound() -> bool:
        time.sleep(_POLL_S)
        known = daemon.metric("kvtier_pins")
        return known >= count and known - daemon.metric("kvtier_pins", state="waiting") >= count

    return wait_until(bound, BIND_TIMEOUT_S, f"an engine to bind {count} pins")


def wait_durable(daemon: Daemon, count: int) -> float:
    """Wait until `count` pins are durable; return the seconds that took.

    Raises:
        TimeoutError: They are not, within BIND_TIMEOUT_S.
    """

    def durable() -> bool:
        time.sleep(_POLL_S)
        return daemon.metric("kvtier_pins", state="durable") >= count

    return wait_until(durable, BIND_TIMEOUT_S, f"the daemon to find {count} pins durable")
