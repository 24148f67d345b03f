"""The daemon at one moment, in numbers that cost no more than its namespaces and sessions are many."""

from collections.abc import Sequence
from dataclasses import replace

from kvtier.obs.counters import Counters
from kvtier.obs.gauges import Gauges
from kvtier.obs.timings import Timings
from kvtier.prompts.states.status import PromptState
from kvtier.service.cache import Cache
from kvtier.tiering.namespace import Namespace


def read_metrics(cache: Cache) -> tuple[Counters, Timings, Gauges]:
    """Return every metric of the daemon as it is now. Loop thread; never counts chunks."""
    resources = cache.resources
    return replace(resources.counters), resources.timings.copy(), read_gauges(cache)


def read_gauges(cache: Cache) -> Gauges:
    """Measure everything that is not counted on the way. Loop thread."""
    gauges = Gauges(prompts=len(cache.prompts), start_time_seconds=cache.started_unix_s, build_info=1)
    namespaces = list(cache.namespaces.values())
    _read_host(gauges, cache, namespaces)
    _read_disk(gauges, cache, namespaces)
    _read_engines(gauges, cache, namespaces)
    _read_pins(gauges, cache)
    return gauges


def _read_host(gauges: Gauges, cache: Cache, namespaces: Sequence[Namespace]) -> None:
    budget = cache.resources.budget
    gauges.host_used_bytes, gauges.host_limit_bytes = budget.used_bytes, budget.limit_bytes
    for namespace in namespaces:
        num_pinned, row_bytes = len(namespace.table.host.pinned), namespace.layout.row_bytes
        num_unpinned = namespace.table.host.num_chunks - num_pinned
        gauges.host_pinned_chunks += num_pinned
        gauges.host_unpinned_chunks += num_unpinned
        gauges.host_pinned_bytes += num_pinned * row_bytes
        gauges.host_unpinned_bytes += num_unpinned * row_bytes


def _read_disk(gauges: Gauges, cache: Cache, namespaces: Sequence[Namespace]) -> None:
    usage, health = cache.resources.disk_usage, cache.resources.disk_health
    gauges.disk_used_bytes, gauges.disk_limit_bytes = usage.used_bytes, usage.limit_bytes
    gauges.disk_unreserved_bytes, gauges.disk_packs = usage.unreserved_bytes, len(usage.packs)
    gauges.disk_reading_off, gauges.disk_writing_off = not health.readable, not health.writable
    for namespace in namespaces:
        disk, queue = namespace.table.disk, namespace.write_back.queue
        gauges.disk_unpinned_chunks += disk.num_unpinned
        gauges.disk_pinned_chunks += disk.num_chunks - disk.num_unpinned
        gauges.disk_unpinned_bytes += disk.num_bytes - disk.pinned_bytes
        gauges.disk_pinned_bytes += disk.pinned_bytes
        gauges.promotion_queue_chunks += namespace.promoter.num_waiting
        gauges.write_back_throttled_namespaces += queue.is_behind
        gauges.over_quota_chunks += queue.num_refused


def _read_engines(gauges: Gauges, cache: Cache, namespaces: Sequence[Namespace]) -> None:
    gauges.namespaces_live = sum(namespace.live for namespace in namespaces)
    gauges.namespaces_quarantined = sum(namespace.quarantine is not None for namespace in namespaces)
    gauges.namespaces_idle = len(namespaces) - gauges.namespaces_live
    for session in cache.sessions:
        gauges.leased_chunks += session.loads.num_leases
        gauges.sessions_attached += not session.ended
        gauges.sessions_quarantined += session.ended
        if session.ended:
            gauges.quarantined_slots += session.stores.num_grants
        else:
            gauges.store_grants += session.stores.num_grants


def _read_pins(gauges: Gauges, cache: Cache) -> None:
    standing = cache.pins.watch.standing()
    unrendered, waiting = standing[PromptState.UNRENDERED], standing[PromptState.WAITING]
    capturing, over_quota = standing[PromptState.CAPTURING], standing[PromptState.OVER_QUOTA]
    gauges.pins_unrendered, gauges.oldest_wait_unrendered_s = unrendered
    gauges.pins_waiting, gauges.oldest_wait_waiting_s = waiting
    gauges.pins_capturing, gauges.oldest_wait_capturing_s = capturing
    gauges.pins_over_quota, gauges.oldest_wait_over_quota_s = over_quota
    gauges.pins_stale, gauges.oldest_wait_stale_s = standing[PromptState.STALE]
    gauges.pins_refreshing, gauges.oldest_wait_refreshing_s = standing[PromptState.REFRESHING]
    gauges.pins_refused, gauges.oldest_wait_refused_s = standing[PromptState.REFUSED]
    gauges.pins_durable = standing[PromptState.DURABLE].num_pins
