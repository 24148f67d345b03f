"""Every quantity that the daemon measures at each scrape, declared here and nowhere else."""

import platform
from dataclasses import dataclass

from kvtier.obs.declare import gauge, gauged, series
from kvtier.version import __version__

_TIERS = ("host", "disk")
_KINDS = ("pinned", "unpinned")
_STATES = ("unrendered", "waiting", "capturing", "durable", "over_quota")

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
    "1 while the circuit breaker of a tier is open for this operation, after repeated errors.",
    tier=("disk",),
    operation=("read", "write"),
)
_SESSIONS = gauge(
    "sessions",
    "Engines attached, and lost ones of which a process may still write memory.",
    state=("attached", "quarantined"),
)
_NAMESPACES = gauge("namespaces", "Namespaces, by whether an engine is attached.", state=("live", "idle"))
_PINS = gauge(
    "pins",
    "Pinned prompts, by state; counted at most half a minute ago.",
    state=_STATES,
)
_PIN_WAIT = gauge(
    "pins_oldest_wait_seconds",
    "How long the pinned prompt that has waited longest to become durable has waited, by the state it is in; 0: none.",
    state=tuple(state for state in _STATES if state != "durable"),
)
_BUILD_INFO = gauge("build_info", "1; the labels name the versions of kvtier and Python.", version=(), python=())


@dataclass(slots=True)
class Gauges:
    """The daemon at one moment."""

    host_used_bytes: int = series(_TIER_USED, tier="host")
    disk_used_bytes: int = series(_TIER_USED, tier="disk")
    host_limit_bytes: int = series(_TIER_LIMIT, tier="host")
    disk_limit_bytes: int = series(_TIER_LIMIT, tier="disk")
    host_pinned_bytes: int = series(_TIER_CHUNK_BYTES, tier="host", kind="pinned")
    host_unpinned_bytes: int = series(_TIER_CHUNK_BYTES, tier="host", kind="unpinned")
    disk_pinned_bytes: int = series(_TIER_CHUNK_BYTES, tier="disk", kind="pinned")
    disk_unpinned_bytes: int = series(_TIER_CHUNK_BYTES, tier="disk", kind="unpinned")
    host_pinned_chunks: int = series(_TIER_CHUNKS, tier="host", kind="pinned")
    host_unpinned_chunks: int = series(_TIER_CHUNKS, tier="host", kind="unpinned")
    disk_pinned_chunks: int = series(_TIER_CHUNKS, tier="disk", kind="pinned")
    disk_unpinned_chunks: int = series(_TIER_CHUNKS, tier="disk", kind="unpinned")

    disk_packs: int = gauged("disk_packs", "Pack files.")
    disk_unreserved_bytes: float = gauged(
        "disk_unreserved_bytes",
        "Free bytes of the packs' file system beyond the daemon's reserve (1 GiB); NaN until first measured.",
    )
    disk_reading_off: int = series(
        _TIER_BREAKER, "Nothing is read: a chunk that is only on disk is a miss.", tier="disk", operation="read"
    )
    disk_writing_off: int = series(
        _TIER_BREAKER, "Nothing is written: write-back waits.", tier="disk", operation="write"
    )

    sessions_attached: int = series(_SESSIONS, state="attached")
    sessions_quarantined: int = series(_SESSIONS, state="quarantined")
    leased_chunks: int = gauged("leased_chunks", "Leases that engines hold on chunks in host memory.")
    store_grants: int = gauged("store_grants", "Arena slots that attached engines may write.")
    quarantined_slots: int = gauged(
        "quarantined_slots", "Arena slots that a lost engine may still write; no other engine gets them."
    )
    namespaces_live: int = series(_NAMESPACES, state="live")
    namespaces_idle: int = series(_NAMESPACES, state="idle")

    prompts: int = gauged("prompts", "Named prompts, pinned or not.")
    pins_unrendered: int = series(_PINS, "The prompt is not turned into tokens yet.", state="unrendered")
    pins_waiting: int = series(_PINS, "No engine has recognized it yet.", state="waiting")
    pins_capturing: int = series(_PINS, "Some chunks are not on disk yet.", state="capturing")
    pins_durable: int = series(_PINS, "Every chunk is in an fsynced pack.", state="durable")
    pins_over_quota: int = series(_PINS, "Chunks are not on disk because disk.bytes is used up.", state="over_quota")
    oldest_wait_unrendered_s: float = series(_PIN_WAIT, state="unrendered")
    oldest_wait_waiting_s: float = series(_PIN_WAIT, state="waiting")
    oldest_wait_capturing_s: float = series(_PIN_WAIT, state="capturing")
    oldest_wait_over_quota_s: float = series(_PIN_WAIT, state="over_quota")

    promotion_queue_chunks: int = gauged(
        "promotion_queue_chunks", "Chunks that wait to be read from disk, or are being read."
    )
    write_back_throttled_namespaces: int = gauged(
        "write_back_throttled_namespaces", "Namespaces that get fewer store credits because the disk does not keep up."
    )
    over_quota_chunks: int = gauged(
        "over_quota_chunks", "Chunks of pinned prompts that are not on disk because disk.bytes is used up."
    )
    start_time_seconds: float = gauged("start_time_seconds", "When the daemon started, in seconds since 1970.")
    build_info: int = series(_BUILD_INFO, version=__version__, python=platform.python_version())
