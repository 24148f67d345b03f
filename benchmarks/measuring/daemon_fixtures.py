"""What a daemon holds where no vLLM computes it: layouts, tiny chunks, values that look like KV, and configurations."""

from pathlib import Path

import numpy as np

from benchmarks.harness.daemon import Daemon
from kvtier.config import DaemonConfig, DiskConfig, HostConfig, HttpConfig, ServerConfig
from kvtier.config.model import OFF
from kvtier.core.layout import ChunkKey, GroupLayout, KVLayout
from tests.fakes.scripted_engine import ScriptedEngine

FINGERPRINT = {"weights": "1"}
STATE = "state"
"""The folder of the ledger and the packs, as `Daemon` names it."""


def one_group(chunk_bytes: int, *, chunk_tokens: int = 16, row_bytes: int | None = None) -> KVLayout:
    """Return the layout of a model with one KV cache group on one GPU."""
    group = GroupLayout(group_idx=0, chunk_tokens=chunk_tokens, useful_bytes=chunk_bytes)
    return KVLayout(num_ranks=1, rank_bytes=row_bytes or chunk_bytes, num_writers=1, groups=(group,))


LAYOUT = one_group(64, row_bytes=4096)
"""Where only the number of chunks matters."""


def bf16_noise(generator: np.random.Generator, num_bytes: int) -> bytes:
    """Return bf16 values of a normal distribution, which compress about as KV does."""
    bits = generator.standard_normal(num_bytes // 2, dtype=np.float32).view(np.uint32)
    return ((bits + 0x8000) >> 16).astype(np.uint16).tobytes()


class KVEngine(ScriptedEngine):
    """An engine that follows a script and stores what looks like KV."""

    def payload(self, key: ChunkKey, seed: int = 0) -> bytes:
        """Return the bytes of a chunk, the same for the same key."""
        return bf16_noise(np.random.default_rng(int.from_bytes(key[:8], "big")), self.layout.rank_bytes)


def config_for_engine(daemon: Daemon) -> DaemonConfig:
    """Return what a scripted engine needs to know of a daemon in a process of its own: its socket."""
    return DaemonConfig(
        server=ServerConfig(socket=daemon.socket),
        host=HostConfig(arena_dir=daemon.arena_dir, host_bytes=0),
        disk=DiskConfig(disk_dir=daemon.disk_dir, disk_bytes=0),
    )


def config_over(home: Path, arena_dir: Path) -> DaemonConfig:
    """Return the configuration of a daemon in this process, over the state in `home`."""
    return DaemonConfig(
        server=ServerConfig(socket=home / "d.sock", drain_timeout_s=1),
        host=HostConfig(arena_dir=arena_dir, host_bytes=256 << 20),
        disk=DiskConfig(disk_dir=home / STATE, disk_bytes=1 << 30),
        http=HttpConfig(listen=OFF),
    )
