"""Deletes objects that no manifest names. Every host of a fleet does so; several at once harm nothing.

Why nothing is deleted that is needed (ADR 33): keys of objects are never used twice, so one that no manifest names now
will be named by its uploader only, who takes less than half of the grace period, or by no one. Objects are listed
before the manifests are read, and their age is the store's own: clocks of hosts do not matter.
"""

import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from kvtier.errors import RemoteStoreError
from kvtier.fleet.manifest import KV, PROMPTS, Manifest
from kvtier.fleet.pin_sync import PinSync
from kvtier.fleet.store_clock import HOSTS, StoreClock
from kvtier.obs.log import log_event
from kvtier.remote.base import ObjectInfo, RemoteStore, one_piece

logger = logging.getLogger(__name__)

MARK = "collected.json"
"""Its age says when a host collected last: one of a fleet is enough."""
_MAX_DELETED = 10_000
"""In one go: a list of the store holds a thousand."""
_HOST_KEPT_S = 30 * 86400.0
"""A host that has written nothing for so long is gone."""


@dataclass(kw_only=True)
class Collected:
    """What was deleted."""

    num_objects: int = 0
    num_bytes: int = 0


class GarbageCollector:
    """Loop thread only.

    Args:
        grace_s: Age from which on an object that no manifest names is deleted.
    """

    def __init__(self, store: RemoteStore, sync: PinSync, clock: StoreClock, *, grace_s: float) -> None:
        self._store, self._sync, self._clock, self._grace_s = store, sync, clock, grace_s

    async def collect_if_due(self) -> Collected:
        """Collect, unless a host has lately.

        Raises:
            RemoteStoreError: The store did not do its part; what was deleted is deleted.
            KvtierError: As `PinSync.look`.
        """
        mark = await self._store.head(MARK)
        if mark is not None and mark.modified_unix_s > self._clock.now_unix_s() - self._grace_s / 4:
            return Collected()
        await self._store.put_stream(MARK, one_piece(b"{}"))
        return await self.collect()

    async def collect(self) -> Collected:
        """Delete what no manifest names; raises as `collect_if_due`."""
        await self._forget_old()
        oldest_kept_unix_s = self._clock.now_unix_s() - self._grace_s
        old = [info async for info in self._old_objects(oldest_kept_unix_s)]
        collected = Collected()
        if old:
            await self._sync.look()
            if self._sync.has_unreadable:  # who knows what that manifest names
                log_event(logger, "garbage_kept", level=logging.WARNING, why="a manifest in the store is unreadable")
                return collected
            named = set[str]().union(*(manifest.references() for manifest in self._sync.manifests()))
            for info in [each for each in old if each.key not in named][:_MAX_DELETED]:
                await self._store.delete(info.key)
                collected.num_objects += 1
                collected.num_bytes += info.num_bytes
        await self._forget_hosts()
        if collected.num_objects:
            log_event(logger, "garbage_deleted", objects=collected.num_objects, bytes=collected.num_bytes)
        return collected

    async def _old_objects(self, before_unix_s: float) -> AsyncIterator[ObjectInfo]:
        for prefix in (PROMPTS, KV):
            async for info in self._store.list(prefix):
                if info.modified_unix_s < before_unix_s:
                    yield info

    async def _forget_old(self) -> None:
        """Drop what was ended or outdated for long: a pin, which begins from nothing if it is made again, and KV."""
        before_unix_s = self._clock.now_unix_s() - self._grace_s
        for manifest in self._sync.manifests():
            if _forgotten(manifest, before_unix_s) is not None:
                await self._sync.change(manifest.name, lambda now: _forgotten(now, before_unix_s))

    async def _forget_hosts(self) -> None:
        async for info in self._store.list(HOSTS):
            if info.modified_unix_s < self._clock.now_unix_s() - _HOST_KEPT_S:
                await self._store.delete(info.key)


def _forgotten(manifest: Manifest, before_unix_s: float) -> Manifest | None:
    """Return a manifest without what is old; None: there is nothing."""
    kept = manifest.without_outdated(before_unix_s)
    if not manifest.pinned and manifest.changed_unix_s < before_unix_s:
        kept = replace(manifest, prompt="", stored=(), claims=(), versions=())
    return kept if kept != manifest else None


async def discard(store: RemoteStore, key: str) -> None:
    """Delete an object that this host has uploaded and no manifest names; the collector does what fails here."""
    try:
        await store.delete(key)
    except RemoteStoreError as error:
        log_event(logger, "object_left", level=logging.WARNING, key=key, problem=str(error))
