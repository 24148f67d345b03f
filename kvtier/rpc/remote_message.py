"""The message that says how a daemon stands with the store that hosts share."""

from collections.abc import Callable, Sequence
from heapq import nsmallest

from kvtier._pb import cache_pb2 as pb
from kvtier.concurrency.turns import breathing
from kvtier.fleet.fleet import Fleet
from kvtier.fleet.store_clock import SharingHost
from kvtier.remote.metered_store import dollars

_MAX_REFUSED = 100


async def remote_status(
    fleet: Fleet, hosts: Sequence[SharingHost], may_see: Callable[[str | None], bool] = lambda owner: True
) -> pb.RemoteStatus:
    """Return RemoteStatus of proto/kvtier/v1/cache.proto, with turns of the loop: there may be thousands of pins.

    `may_see`: whether pins of an owner exist for the caller.
    """
    manifests, prompts, refused = fleet.pins.manifests(), fleet.cache.prompts.pinned(), list(fleet.pins.refused.items())
    pinned = [each async for each in breathing(manifests) if each.pinned and may_see(each.how.owner)]
    num_kv_objects = kv_bytes = num_waiting = 0
    async for manifest in breathing(pinned):
        num_kv_objects += len(manifest.stored)
        kv_bytes += sum(kv.num_bytes for kv in manifest.stored)
    async for prompt in breathing(prompts):
        is_named = prompt.origin == "named" and may_see(prompt.owner)
        num_waiting += is_named and not fleet.pins.is_shared(prompt.name)
    seen = [each async for each in breathing(refused) if may_see(_owner_of(fleet, each[0]))]
    return pb.RemoteStatus(
        url=fleet.store.url,
        host=fleet.host,
        problem=fleet.problem,
        looked_unix_s=fleet.looked_unix_s,
        clock_offset_s=fleet.clock.offset_s,
        num_pins=len(pinned),
        num_kv_objects=num_kv_objects,
        kv_bytes=kv_bytes,
        num_waiting_pins=num_waiting,
        num_uploaded=fleet.kv.num_uploaded,
        num_restored=fleet.kv.num_restored,
        num_conflicts=fleet.pins.num_conflicts,
        refused=[pb.RefusedSharedPin(name=name, why=why) for name, why in nsmallest(_MAX_REFUSED, seen)],
        spending=_spending(fleet),
        hosts=[pb.RemoteHost(host=each.host, version=each.version, seen_unix_s=each.seen_unix_s) for each in hosts],
    )


def _owner_of(fleet: Fleet, name: str) -> str | None:
    """Return whose a pin is, as the store says: this host may not have it. None: it is known nowhere any longer."""
    manifest, prompt = fleet.pins.manifest(name), fleet.cache.prompts.find(name)
    if manifest is not None:
        return manifest.how.owner
    return None if prompt is None else prompt.owner


def _spending(fleet: Fleet) -> pb.RemoteSpending:
    counters = fleet.cache.resources.counters
    return pb.RemoteSpending(
        num_reads=counters.remote_requests_read,
        num_writes=counters.remote_requests_write,
        num_lists=counters.remote_requests_list,
        num_deletes=counters.remote_requests_delete,
        num_failed=counters.remote_requests_failed,
        bytes_up=counters.remote_transferred_bytes_up,
        bytes_down=counters.remote_transferred_bytes_down,
        dollars=dollars(counters, fleet.config),
    )
