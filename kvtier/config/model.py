"""What the daemon can be told, one frozen dataclass per concern.

Paths are absolute and sizes are bytes here. How each setting is spelled in TOML and in the environment is in
`kvtier.config.settings`; an attribute that repeats its table's name (`host.host_bytes`) drops it there (`host.bytes`).
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

MIB = 1024 * 1024

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
StoreMode = Literal["pinned", "all"]

OFF = "off"


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Where the daemon listens and how it stops."""

    socket: Path
    """Unix socket of the gRPC server; at most 107 bytes long."""
    drain_timeout_s: float = 10.0
    """Seconds that running calls and writes get after SIGTERM before they are cut off."""


@dataclass(frozen=True, kw_only=True)
class HostConfig:
    """The host tier: arenas in shared memory."""

    arena_dir: Path
    """Folder of the arena files, on a tmpfs; vLLM's processes map the files by this path."""
    host_bytes: int
    """Bytes of all arenas together: rows, slot tables and headers."""
    keep_arena: bool = False
    """A daemon that is stopped leaves its arenas to the next start; a crash always does."""
    spare_bytes: int = 256 * MIB
    """Of free rows that get their pages ahead of need, for attached engines, and keep them over a crash; never above
    `low_watermark`."""
    prewarm: bool = True
    """At start, promote pinned prompts to host memory in the background."""
    high_watermark: float = 0.95
    """Share of `host_bytes` in use above which ordinary chunks are evicted in the background."""
    low_watermark: float = 0.90
    """Share down to which that goes."""

    @property
    def low_watermark_bytes(self) -> int:
        """`low_watermark` of `host_bytes`: what is done ahead of need stays below it."""
        return int(self.low_watermark * self.host_bytes)


@dataclass(frozen=True, kw_only=True)
class DiskConfig:
    """The disk tier: packs and the ledger."""

    disk_dir: Path
    """Folder of packs, ledger and lock. One daemon per folder."""
    disk_bytes: int
    """Bytes of all packs together; pins that would not fit are refused."""
    reserve_bytes: int = 1024 * MIB
    """Free space of the file system that packs never take."""
    high_watermark: float = 0.95
    """Share of `disk_bytes` in packs above which ordinary chunks are dropped in the background."""
    low_watermark: float = 0.90
    """Share of `disk_bytes` down to which that goes, counted in bytes of chunks."""
    pack_bytes: int = 64 * MIB
    """Raw bytes gathered before a pack is written: larger packs mean fewer fsyncs, later durability."""
    pack_linger_s: float = 0.2
    """Seconds that a pack waits for more chunks while it is short of `pack_bytes`; of unpinned ones ten times that."""
    zstd_level: int = 1
    """zstd level of new packs, 1..22. Higher levels hardly shrink KV and cost a lot of time."""
    io_threads: int = 3
    """Threads that read packs for requests; one at a time decodes short chunks. Other disk work has its own."""
    compact_dead_ratio: float = 0.5
    """Packs of which more than this share is read no more are rewritten; 1: only when the disk is nearly full."""
    compact_bytes_per_s: int = 64 * MIB
    """Bytes per second that compaction writes at most; 0: no compaction."""
    scrub_bytes_per_s: int = 16 * MIB
    """Bytes per second that the scrub verifies at most; 0: no scrub."""


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """What is kept."""

    store: StoreMode = "pinned"
    """`pinned`: chunks of pinned prompts only. `all`: every whole prompt chunk, as evictable cache."""


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What is written to stderr."""

    level: LogLevel = "info"
    """Least severe level that is written."""
    format: LogFormat = "text"
    """`text` for people, `json` (one object per line) for collectors."""


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """What Prometheus may ask."""

    listen: str = "127.0.0.1:9464"
    """Where `GET /metrics` is answered: `host:port` (`[host]:port` for IPv6; port 0: any that is free), or `off`."""


@dataclass(frozen=True, kw_only=True)
class TraceConfig:
    """Spans for a trace viewer, see `kvtier trace`."""

    folder: Path | None = None
    """Folder of the traces, one file for each process; None: no trace."""


@dataclass(frozen=True, kw_only=True)
class DaemonConfig:
    """Everything the daemon can be told. Constructors take values from it, never the whole."""

    server: ServerConfig
    host: HostConfig
    disk: DiskConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    log: LogConfig = field(default_factory=LogConfig)
