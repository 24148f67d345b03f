"""Operators stop a namespace whose KV is not trusted, and let it serve again."""

import logging
import time
from pathlib import Path

from kvtier.concurrency.tasks import Changes
from kvtier.core import limits
from kvtier.errors import EphemeralNamespaceError, NamespaceNotFoundError, TierIOError
from kvtier.obs.log import log_event
from kvtier.service.namespace_registry import NamespaceRegistry
from kvtier.tiering.namespace import Namespace
from kvtier.tiering.quarantine import FOLDER_NAME, Quarantine, remove_quarantine, save_quarantine
from kvtier.tiering.resources import Resources

logger = logging.getLogger(__name__)


class Quarantines:
    """Begins and ends the quarantine of namespaces. Loop thread only."""

    def __init__(self, resources: Resources, registry: NamespaceRegistry, changes: Changes) -> None:
        self._resources, self._registry, self._changes = resources, registry, changes

    @property
    def _state_dir(self) -> Path:
        return self._resources.config.disk.disk_dir

    async def begin(self, namespace_id: str, reason: str) -> Namespace:
        """Serve and store nothing in a namespace from now on; durable on return.

        Raises:
            InvalidArgumentError: There is no reason.
            NamespaceNotFoundError: There is no such namespace.
            EphemeralNamespaceError: It ends with its engines.
            TierIOError: The note cannot be written; the namespace serves as before.
        """
        limits.REASON.check("reason", reason)

        async def change() -> Namespace:
            namespace = self._get(namespace_id)
            if namespace.ephemeral:
                raise EphemeralNamespaceError(namespace_id)
            since_unix_s = namespace.quarantine.since_unix_s if namespace.quarantine is not None else time.time()
            quarantine = Quarantine(reason=reason, since_unix_s=since_unix_s)
            try:
                await self._resources.in_io(save_quarantine, self._state_dir, namespace_id, quarantine)
            except OSError as exc:
                raise TierIOError(self._state_dir / FOLDER_NAME, "write a note", exc) from exc
            self._registry.quarantined[namespace_id] = namespace.quarantine = quarantine
            log_event(
                logger,
                "namespace_quarantined",
                level=logging.ERROR,
                namespace=namespace_id,
                model=namespace.model,
                reason=reason,
                consequence="it serves and stores nothing",
            )
            return namespace

        return await self._changes.exclusively("quarantine", change)

    async def end(self, namespace_id: str) -> Namespace:
        """Serve a namespace again, quarantined or not.

        Raises:
            NamespaceNotFoundError: There is no such namespace.
            TierIOError: The note cannot be removed; the namespace stays quarantined.
        """

        async def change() -> Namespace:
            namespace = self._get(namespace_id)
            await self._end(namespace)
            return namespace

        return await self._changes.exclusively("release", change)

    async def end_emptied(self) -> None:
        """End the quarantine of namespaces of which no chunk is left: what is stored from now on is new.

        Raises:
            TierIOError: As `end`.
        """

        async def change() -> None:
            for namespace in list(self._registry.by_id.values()):
                if namespace.quarantine is not None and not namespace.holds_chunks:
                    await self._end(namespace)

        if self._registry.quarantined:
            await self._changes.exclusively("release", change)

    async def _end(self, namespace: Namespace) -> None:
        if namespace.quarantine is None:
            return
        try:
            await self._resources.in_io(remove_quarantine, self._state_dir, namespace.namespace_id)
        except OSError as exc:
            raise TierIOError(self._state_dir / FOLDER_NAME, "remove a note", exc) from exc
        self._registry.quarantined.pop(namespace.namespace_id, None)
        namespace.quarantine = None
        log_event(logger, "namespace_released", namespace=namespace.namespace_id, model=namespace.model)

    def _get(self, namespace_id: str) -> Namespace:
        if (namespace := self._registry.by_id.get(namespace_id)) is None:
            raise NamespaceNotFoundError(namespace_id)
        return namespace
