"""The store's clock, and who shares it: each host writes a small object from time to time, and looks when that was."""

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from kvtier.concurrency.parallel_calls import in_parallel
from kvtier.errors import InvalidArgumentError
from kvtier.obs.clock_steps import steady_s
from kvtier.obs.log import log_event
from kvtier.printable import printable
from kvtier.remote.base import ObjectInfo, RemoteStore, one_piece

logger = logging.getLogger(__name__)

HOSTS = "hosts/"
_FORMAT = 1
_MAX_HOSTS = 1000
"""That are read: a viewer may ask for them, and those that are gone stay in the store for a month."""
_REPORTED_S = 60.0
"""A difference of clocks from which on it is reported. Below, no one notices that a TTL ends early or late."""


@dataclass(frozen=True, kw_only=True)
class SharingHost:
    """A host of the fleet.

    Attributes:
        host: Its name.
        version: Of kvtier there.
        namespaces: Ids of its engines' namespaces.
        seen_unix_s: When it wrote this, by the store's clock.
    """

    host: str
    version: str
    namespaces: tuple[str, ...] = ()
    seen_unix_s: float = 0.0


class StoreClock:
    """The store's clock: measured now and then, in between it goes on by itself. Loop thread only.

    So it does not matter that the host's clock is wrong, nor that it is set. Until it is measured it is the host's.

    Args:
        host_clock: The host's, which is only compared with it.
        now_s: Counts seconds between measurements.
    """

    def __init__(
        self,
        store: RemoteStore,
        *,
        host_clock: Callable[[], float] = time.time,
        now_s: Callable[[], float] = steady_s,
    ) -> None:
        self._store, self._host_clock, self._now_s = store, host_clock, now_s
        self._began_unix_s: float | None = None  # by the store's clock: when `now_s` was 0
        self._is_reported = False

    def now_unix_s(self) -> float:
        """Return the store's time."""
        return self._host_clock() if self._began_unix_s is None else self._began_unix_s + self._now_s()

    @property
    def is_measured(self) -> bool:
        """The store has said its time since the start."""
        return self._began_unix_s is not None

    @property
    def offset_s(self) -> float:
        """How far the store's clock is ahead of the host's now; 0 until it is measured. The store says seconds only."""
        return 0.0 if self._began_unix_s is None else self.now_unix_s() - self._host_clock()

    async def measure(self, host: str, version: str, namespaces: Sequence[str]) -> None:
        """Enter this host among those that share the store, and read the store's clock from that.

        Raises:
            RemoteStoreError: The store did not do its part.
        """
        fields = {
            "kvtier.host": _FORMAT,
            **asdict(SharingHost(host=host, version=version, namespaces=tuple(namespaces))),
        }
        key, began_s = f"{HOSTS}{host}.json", self._now_s()
        await self._store.put_stream(key, one_piece(json.dumps(fields).encode()))
        ended_s = self._now_s()
        found = await self._store.head(key)
        if found is None:
            return
        self._began_unix_s = found.modified_unix_s - (began_s + ended_s) / 2
        is_far = abs(self.offset_s) > _REPORTED_S + (ended_s - began_s)
        if is_far and not self._is_reported:
            remedy = "set the clock of this host (NTP); TTLs end by the store's clock"
            log_event(logger, "clock_differs", level=logging.WARNING, ahead_s=round(-self.offset_s), remedy=remedy)
        self._is_reported = is_far

    async def hosts(self) -> list[SharingHost]:
        """Return the hosts that share the store, those that were there last, by name. Raises RemoteStoreError."""
        found = sorted([info async for info in self._store.list(HOSTS)], key=lambda info: -info.modified_unix_s)
        hosts = await in_parallel(self._read, found[:_MAX_HOSTS])
        return sorted((host for host in hosts if host is not None), key=lambda host: host.host)

    async def _read(self, info: ObjectInfo) -> SharingHost | None:
        found = await self._store.get(info.key)
        try:
            fields = json.loads(found.data) if found is not None else {}
            host, version = printable(str(fields["host"])), printable(str(fields["version"]))
            namespaces = tuple(printable(str(each)) for each in fields["namespaces"])
            return SharingHost(host=host, version=version, namespaces=namespaces, seen_unix_s=info.modified_unix_s)
        except (ValueError, KeyError, TypeError, RecursionError, InvalidArgumentError):
            return None
