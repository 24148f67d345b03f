"""Every quantity that the daemon measures at each scrape, declared here and nowhere else."""

import platform
from dataclasses import dataclass

from kvtier.obs.declare import gauge, gauged, series
from kvtier.version import __version__

_TIERS = ("host", "disk")
_KINDS = ("pinned", "unpinned")
_STATES = ("unrendered", "waiting", "capturing", "durable", "over_quota", "stale", "refreshing", "refused")

_TIER_USED = gauge(
    "tier_used_bytes",
    "Bytes that a tier uses: populated memory of the arenas, or pack files with their holes.",
    tier=_TIERS,
)
_TIER_LIMIT = gauge("tier_limit_bytes", "Bytes that a tier may use: host.bytes and disk.bytes.", tier=_TIERS)
_TIER_CHUNK_BYTES = gauge(
    "tier_chunk_bytes",
    "Bytes of the chunks in a tier: arena rows, or stored bytes. Unpinned: of no pinned prompt, so evictable.",
    tier=_TIERS,
    kind=_KINDS,
)
_TIER_CHUNKS = gauge(
    "tier_chunks", "Chunks in a tier. Unpinned: of no pinned prompt, so evictable.", tier=_TIERS, kind=_KINDS
)
_TIER_BREAKER = gauge(
    "tier_breaker_open",
    "1 while the circuit breaker of a tier is open for this operation, after repeated errors. read: a chunk that is "
    "only on disk is a miss. write: write-back waits.",
    tier=("disk",),
    operation=("read", "write"),
)
_SESSIONS = gauge(
    "sessions",
    "Engines attached, and lost ones of which a process may still write memory.",
    state=("attached", "quarantined"),
)
_NAMESPACES = gauge("namespaces", "Namespaces, by whether an engine is attached.", state=("live", "idle"))
_PINS = gauge("pins", "Pinned prompts, by state; counted at most half a minute ago.", state=_STATES)
_PIN_WAIT = gauge(
    "pins_oldest_wait_seconds",
    "How long the pinned prompt that has waited longest to become durable has waited, by the state it is in; 0: none.",
    state=tuple(state for state in _STATES if state != "durable"),
)
_BUILD_INFO = gauge("build_info", "1; the labels name the versions of kvtier and Python.", version=(), python=())


@dataclass(slots=True)
class Gauges:
    """The daemon at one moment."""

    host_used_bytes: int = series(_TIER_USED, "host")
    disk_used_bytes: int = series(_TIER_USED, "disk")
    host_limit_bytes: int = series(_TIER_LIMIT, "host")
    disk_limit_bytes: int = series(_TIER_LIMIT, "disk")
    host_pinned_bytes: int = series(_TIER_CHUNK_BYTES, "host", "pinned")
    host_unpinned_bytes: int = series(_TIER_CHUNK_BYTES, "host", "unpinned")
    disk_pinned_bytes: int = series(_TIER_CHUNK_BYTES, "disk", "pinned")
    disk_unpinned_bytes: int = series(_TIER_CHUNK_BYTES, "disk", "unpinned")
    host_pinned_chunks: int = series(_TIER_CHUNKS, "host", "pinned")
    host_unpinned_chunks: int = series(_TIER_CHUNKS, "host", "unpinned")
    disk_pinned_chunks: int = series(_TIER_CHUNKS, "disk", "pinned")
    disk_unpinned_chunks: int = series(_TIER_CHUNKS, "disk", "unpinned")

    disk_packs: int = gauged("disk_packs", "Pack files.")
    disk_unreserved_bytes: float = gauged(
        "disk_unreserved_bytes",
        "Free bytes of the packs' file system beyond the daemon's reserve (1 GiB); NaN until first measured.",
    )
    disk_reading_off: int = series(_TIER_BREAKER, "disk", "read")
    disk_writing_off: int = series(_TIER_BREAKER, "disk", "write")

    sessions_attached: int = series(_SESSIONS, "attached")
    sessions_quarantined: int = series(_SESSIONS, "quarantined")
    leased_chunks: int = gauged("leased_chunks", "Leases that engines hold on chunks in host memory.")
    store_grants: int = gauged("store_grants", "Arena slots that attached engines may write.")
    quarantined_slots: int = gauged(
        "quarantined_slots", "Arena slots that a lost engine may still write; no other engine gets them."
    )
    namespaces_live: int = series(_NAMESPACES, "live")
    namespaces_idle: int = series(_NAMESPACES, "idle")

    namespaces_quarantined: int = gauged(
        "quarantined_namespaces", "Namespaces that an operator has stopped: they serve and store nothing."
    )

    prompts: int = gauged("prompts", "Named prompts, pinned or not.")
    pins_unrendered: int = series(_PINS, "unrendered", meaning="The prompt is not turned into tokens yet.")
    pins_waiting: int = series(_PINS, "waiting", meaning="No engine has recognized it yet.")
    pins_capturing: int = series(_PINS, "capturing", meaning="Some chunks are not on disk yet.")
    pins_durable: int = series(_PINS, "durable", meaning="Every chunk is in an fsynced pack.")
    pins_over_quota: int = series(
        _PINS, "over_quota", meaning="Chunks are not on disk: disk.bytes is used up, or the file system is full."
    )
    pins_stale: int = series(_PINS, "stale", meaning="Durable for engines of before, not for those attached now.")
    pins_refreshing: int = series(_PINS, "refreshing", meaning="As stale, and some chunks are on disk for these too.")
    pins_refused: int = series(_PINS, "refused", meaning="An engine cannot use it; `kvtier show` says why.")
    oldest_wait_unrendered_s: float = series(_PIN_WAIT, "unrendered")
    oldest_wait_waiting_s: float = series(_PIN_WAIT, "waiting")
    oldest_wait_capturing_s: float = series(_PIN_WAIT, "capturing")
    oldest_wait_over_quota_s: float = series(_PIN_WAIT, "over_quota")
    oldest_wait_stale_s: float = series(_PIN_WAIT, "stale")
    oldest_wait_refreshing_s: float = series(_PIN_WAIT, "refreshing")
    oldest_wait_refused_s: float = series(_PIN_WAIT, "refused")

    promotion_queue_chunks: int = gauged(
        "promotion_queue_chunks", "Chunks that wait to be read from disk, or are being read."
    )
    write_back_throttled_namespaces: int = gauged(
        "write_back_throttled_namespaces", "Namespaces that get fewer store credits because the disk does not keep up."
    )
    over_quota_chunks: int = gauged(
        "over_quota_chunks",
        "Chunks of pinned prompts that are not on disk because disk.bytes is used up, or the file system is full.",
    )
    start_time_seconds: float = gauged("start_time_seconds", "When the daemon started, in seconds since 1970.")
    build_info: int = series(_BUILD_INFO, __version__, platform.python_version())
