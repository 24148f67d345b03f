"""What the daemon runs with, one frozen dataclass per concern. Paths are absolute and sizes are bytes.

A user sets what `kvtier.config.settings` names (`host_bytes` is `host.bytes` there). The other fields are constants
with their reasons; they are fields so that tests and benchmarks can vary them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kvtier.core.ttl import seconds_of

MIB = 1024 * 1024

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
CompressionMode = Literal["auto", "always", "never"]
StoreMode = Literal["pinned", "all"]
AutoPinMode = Literal["off", "observe", "pin"]
AuthMode = Literal["token", "none"]

OFF = "off"


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Where the daemon listens and how it stops."""

    socket: Path
    """Unix socket of the gRPC server; at most 107 bytes long."""
    group: str = OFF
    """Name or gid of the group whose members may use the daemon beside its own user; `off`: no one else may."""
    gid: int | None = None
    """No setting. The gid of `group`; None: off."""
    listen: str = OFF
    """Where other hosts reach the gRPC server, for operators and not for engines: `host:port` (port 0: any that is
    free), or `off`. Beyond loopback it needs `access.tls_cert_file`."""
    drain_timeout_s: float = 10.0
    """No setting. Seconds that running calls and writes get after SIGTERM: service managers kill after 10 s or more."""


@dataclass(frozen=True, kw_only=True)
class HostConfig:
    """The host tier: arenas in shared memory."""

    arena_dir: Path
    """Folder of the arena files, on a tmpfs; vLLM's processes map the files by this path."""
    host_bytes: int
    """Bytes of all arenas together: rows, slot tables and headers."""
    keep_arena: bool = False
    """A daemon that is stopped leaves its arenas to the next start; a crash always does."""
    preallocated_bytes: int = 256 * MIB
    """No setting. Of free rows that get their pages ahead of need, for attached engines, and keep them over a crash.
    Enough for one long prompt (ADR 13); at most an eighth of `host_bytes`, and never above `low_watermark`."""
    prefetch: bool = True
    """No setting. At start, promote pinned prompts to host memory: a pin asks for that, and requests go first."""
    high_watermark: float = 0.95
    """No setting. Share of `host_bytes` in use above which unpinned chunks are evicted in the background: later, stores
    would wait for memory."""
    low_watermark: float = 0.90
    """No setting. Share down to which that goes: lower, chunks would be evicted for which there is memory."""

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
    compression: CompressionMode = "auto"
    """`always` and `never` say whether chunks are written compressed; `auto`: see `kvtier.disk.compression`."""
    key_file: Path | None = None
    """File of keys with which packs, and secrets of the ledger, are encrypted; None: nothing is."""
    reserve_bytes: int = 1024 * MIB
    """No setting. Free space of the file system that packs never take, because others write there too; at most a
    twentieth of the file system."""
    high_watermark: float = 0.95
    """No setting. Share of `disk_bytes` in packs above which unpinned chunks are dropped in the background."""
    low_watermark: float = 0.90
    """No setting. Share of `disk_bytes` down to which that goes, counted in bytes of chunks."""
    pack_bytes: int = 64 * MIB
    """No setting. Raw bytes gathered before a pack is written: one second of a slow disk, and few fsyncs (ADR 13)."""
    pack_linger_s: float = 0.2
    """No setting. Seconds that a pack waits for more chunks while it is short of `pack_bytes`: people wait for a pin to
    be durable. A pack of unpinned chunks waits ten times that."""
    io_threads: int = 3
    """No setting. Threads that read packs for requests: one decodes while another reads and the third makes pages
    (ADR 13); more wait for Python's lock. Other disk work has its own."""
    compact_dead_ratio: float = 0.5
    """No setting. A pack is rewritten when more than this share of it is dead: a rewrite then frees more than it
    writes. A nearly full disk ignores it."""
    compact_bytes_per_s: int = 64 * MIB
    """No setting. What compaction writes at most: little for any SSD, and it waits while a request reads. 0: none."""
    scrub_bytes_per_s: int = 16 * MIB
    """No setting. What the scrub verifies at most: it reads a terabyte in a day. 0: no scrub."""


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """What is kept."""

    store: StoreMode = "pinned"
    """`pinned`: chunks of pinned prompts only. `all`: every whole prompt chunk, as evictable cache."""
    auto_pin: AutoPinMode = "pin"
    """System prompts that many requests begin with: `pin` pins them, `observe` finds them and leaves it at that, `off`
    looks at no request."""
    auto_pin_max_bytes: int = 0
    """Bytes on disk of all automatic pins together; above it the least valuable ones end."""
    auto_pin_ttl: str = "30d"
    """Time without a request after which an automatic pin ends; `never` for no end."""
    auto_pin_min_tokens: int = 1024
    """Shorter prompts are computed quickly."""
    auto_pin_min_requests: int = 3
    """Requests within a day, of at least two different prompts."""
    auto_pin_public: bool = False
    """Automatic pins are public: requests with any cache salt are restored them."""

    @property
    def auto_pin_ttl_s(self) -> int:
        """`auto_pin_ttl` in seconds; 0: never."""
        return seconds_of(self.auto_pin_ttl)


@dataclass(frozen=True, kw_only=True)
class OwnerQuota:
    """What one owner's pinned prompts may take; None: no limit. Those that requests pin have limits of their own."""

    pins: int | None = None
    """Number of them."""
    tokens: int | None = None
    """Of all of them."""
    bytes: int | None = None
    """Uncompressed, of all of them, in one namespace."""

    @property
    def is_unlimited(self) -> bool:
        """There is no limit."""
        return not self.limits()

    def limits(self) -> dict[str, int]:
        """Return the limits that there are, by the fields of `kvtier.prompts.quota.Usage`."""
        limits = {"num_pins": self.pins, "num_tokens": self.tokens, "num_bytes": self.bytes}
        return {name: limit for name, limit in limits.items() if limit is not None}


@dataclass(frozen=True, kw_only=True)
class OwnersConfig:
    """Quotas of owners. A prompt without owner has none."""

    default: OwnerQuota = OwnerQuota()
    """Of each owner that has no key of its own here: `{ pins = 100, tokens = 500000, bytes = "20GiB" }`, or some of
    these."""
    named: Mapping[str, OwnerQuota] = field(default_factory=dict)
    """No setting. By owner: each other key of the table."""

    def of(self, owner: str) -> OwnerQuota:
        """Return an owner's quota."""
        return self.named.get(owner, self.default)


@dataclass(frozen=True, kw_only=True)
class RemoteConfig:
    """The store that the daemons of a fleet share."""

    url: str = OFF
    """Bucket or folder, and a prefix in it: `s3://bucket/prefix`, `gs://…`, `az://…`, `file:///path`; or `off`.
    Credentials come from the daemon's environment, as for the cloud's own tools."""
    pool: str = OFF
    """A Mooncake Store in front of it, with copies of KV in the memory of hosts: `mooncake://host:port/prefix`; or
    `off`. Without `url` it does nothing."""
    poll: str = "30s"
    """Time between two looks at what other hosts have changed."""
    grace: str = "1d"
    """How long an object that no pin names stays in the store. No upload takes longer than half of it."""
    upload_bytes_per_s: int = 0
    """Most bytes per second that go to the store; 0: no limit."""
    download_bytes_per_s: int = 0
    """Most bytes per second that come from it; 0: no limit."""
    dollars_per_1000_writes: float = 0.005
    """What 1,000 requests that write or list cost, for the sum that `kvtier remote` shows. Prices of S3 in 2026."""
    dollars_per_1000_reads: float = 0.0004
    """What 1,000 requests that read cost."""
    dollars_per_gib_up: float = 0.0
    """What a GiB to the store costs."""
    dollars_per_gib_down: float = 0.0
    """What a GiB from the store costs; from another region or cloud it is not free."""
    parallel: int = 8
    """No setting. Ranges of an object that are read at once: one connection of an object store has some 50 MB/s."""

    @property
    def poll_s(self) -> int:
        """`poll` in seconds."""
        return seconds_of(self.poll)

    @property
    def grace_s(self) -> int:
        """`grace` in seconds."""
        return seconds_of(self.grace)


@dataclass(frozen=True, kw_only=True)
class AccessConfig:
    """Who may do what over TCP (docs/access.md). A process that may open the unix socket may do everything."""

    auth: AuthMode = "token"
    """`token`: calls need a token of `kvtier token create`, or a client certificate. `none`: on loopback only, they
    need nothing, and may do what operators may."""
    tls_cert_file: Path | None = None
    """PEM file with the certificate of this daemon, and those between it and its authority; None: no TLS. Read again
    when it changes."""
    tls_key_file: Path | None = None
    """PEM file with the key of that certificate."""
    client_ca_file: Path | None = None
    """PEM file with authorities: clients of `server.listen` must have a certificate of one of them, those of HTTPS may.
    None: they need none."""
    audit_file: Path | None = None
    """File that gets a JSON line for each call that changes something or is refused; None: there is none."""


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What is written to stderr."""

    level: LogLevel = "info"
    """Least severe level that is written."""
    format: LogFormat = "text"
    """`text` for people, `json` (one object per line) for collectors."""


@dataclass(frozen=True, kw_only=True)
class HttpConfig:
    """What is served over HTTP: metrics, readiness and the API."""

    listen: str = "127.0.0.1:9464"
    """Where: `host:port` (`[host]:port` for IPv6; port 0: any that is free), or `off`."""
    vllm_url: str = "http://127.0.0.1:8000"
    """Base URL of the vLLM that renders and computes what the API pins."""


@dataclass(frozen=True, kw_only=True)
class TraceConfig:
    """Spans for a trace viewer, see `kvtier trace`."""

    folder: Path | None = None
    """Folder of the traces, one file for each process; None: no trace."""


@dataclass(frozen=True, kw_only=True)
class DaemonConfig:
    """Everything the daemon runs with. Constructors take values from it, never the whole."""

    server: ServerConfig
    host: HostConfig
    disk: DiskConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    owners: OwnersConfig = field(default_factory=OwnersConfig)
    remote: RemoteConfig = field(default_factory=RemoteConfig)
    access: AccessConfig = field(default_factory=AccessConfig)
    http: HttpConfig = field(default_factory=HttpConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    log: LogConfig = field(default_factory=LogConfig)
