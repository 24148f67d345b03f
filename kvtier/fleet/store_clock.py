"""The store's clock, and who shares it: each host writes a small object from time to time, and looks when that was."""

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from kvtier.errors import InvalidArgumentError
from kvtier.obs.log import log_event
from kvtier.printable import printable
from kvtier.remote.base import RemoteStore, one_piece

logger = logging.getLogger(__name__)

HOSTS = "hosts/"
_FORMAT = 1
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
    """How far the store's clock is ahead of this host's. Loop thread only.

    Attributes:
        offset_s: Store minus host; 0 until it is measured. The store says seconds only.
    """

    def __init__(self, store: RemoteStore, *, host_clock: Callable[[], float] = time.time) -> None:
        self._store, self._host_clock = store, host_clock
        self.offset_s = 0.0
        self._is_reported = False

    def now_unix_s(self) -> float:
        """Return the store's time."""
        return self._host_clock() + self.offset_s

    async def measure(self, host: str, version: str, namespaces: Sequence[str]) -> None:
        """Enter this host among those that share the store, and read the store's clock from that.

        Raises:
            RemoteStoreError: The store did not do its part.
        """
        fields = {
            "kvtier.host": _FORMAT,
            **asdict(SharingHost(host=host, version=version, namespaces=tuple(namespaces))),
        }
        key, began_unix_s = f"{HOSTS}{host}.json", self._host_clock()
        await self._store.put_stream(key, one_piece(json.dumps(fields).encode()))
        ended_unix_s = self._host_clock()
        found = await self._store.head(key)
        if found is None:
            return
        middle_unix_s = (began_unix_s + ended_unix_s) / 2
        self.offset_s = found.modified_unix_s - middle_unix_s
        is_far = abs(self.offset_s) > _REPORTED_S + (ended_unix_s - began_unix_s)
        if is_far and not self._is_reported:
            remedy = "set the clock of this host (NTP); TTLs end by the store's clock"
            log_event(logger, "clock_differs", level=logging.WARNING, ahead_s=round(-self.offset_s), remedy=remedy)
        self._is_reported = is_far

    async def hosts(self) -> list[SharingHost]:
        """Return the hosts that share the store, by name. Raises RemoteStoreError."""
        found = [info async for info in self._store.list(HOSTS)]
        hosts = [await self._read(info.key, info.modified_unix_s) for info in found]
        return sorted((host for host in hosts if host is not None), key=lambda host: host.host)

    async def _read(self, key: str, modified_unix_s: float) -> SharingHost | None:
        found = await self._store.get(key)
        try:
            fields = json.loads(found.data) if found is not None else {}
            host, version = printable(str(fields["host"])), printable(str(fields["version"]))
            namespaces = tuple(printable(str(each)) for each in fields["namespaces"])
            return SharingHost(host=host, version=version, namespaces=namespaces, seen_unix_s=modified_unix_s)
        except (ValueError, KeyError, TypeError, RecursionError, InvalidArgumentError):
            return None
