"""The daemon's namespaces: opened for an engine or at a start, recorded, forgotten when nothing is left of them."""

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from kvtier.concurrency.pauses import RETRY_S
from kvtier.concurrency.tasks import Changes
from kvtier.core.fingerprint import namespace_id
from kvtier.errors import LedgerError, NamespaceMismatchError
from kvtier.ledger import NamespaceRow
from kvtier.ledger.namespace_files import forget_namespace, save_namespace
from kvtier.obs.log import LastProblem, log_event
from kvtier.prompts.book import PromptBook
from kvtier.sessions.engine_peer import EngineHello
from kvtier.tiering.capacity import STALE_S, Capacity
from kvtier.tiering.namespace import Namespace
from kvtier.tiering.quarantine import Quarantine, remove_quarantine
from kvtier.tiering.resources import Resources
from kvtier.tiering.tiers import Tiers

logger = logging.getLogger(__name__)


class NamespaceRegistry:
    """Every namespace by its id. Loop thread only.

    Calls `top_up_all` when host memory came free.

    Attributes:
        by_id: The namespaces; read by everyone, changed here only.
        capacity: Who is evicted when a tier is full, over all namespaces.
        ending: Those that are being closed, by tasks that a stop may cancel.
        quarantined: By id; a namespace that is opened is quarantined if it is one of these.
    """

    def __init__(
        self, resources: Resources, prompts: PromptBook, changes: Changes, top_up_all: Callable[[], None]
    ) -> None:
        self.by_id: dict[str, Namespace] = {}
        self.capacity = Capacity(resources, self.by_id)
        self.ending: list[Namespace] = []
        self.quarantined: dict[str, Quarantine] = {}
        self._resources, self._prompts, self._changes, self._top_up_all = resources, prompts, changes, top_up_all
        self._problem = LastProblem()
        self._forget_at_s = 0.0  # monotonic; later after a refusal, because looks come four times a second

    def open(self, row: NamespaceRow, *, ephemeral: bool = False) -> Namespace:
        """Open a namespace that the ledger has, or an ephemeral one."""
        namespace = Namespace(
            row,
            self._resources,
            ephemeral=ephemeral,
            find_host_capacity=self.capacity.find_host_capacity,
            find_disk_capacity=self.capacity.find_disk_capacity,
            top_up_all=self._top_up_all,
        )
        namespace.quarantine = self.quarantined.get(row.namespace_id)
        self.by_id[row.namespace_id] = namespace
        return namespace

    def open_for(self, hello: EngineHello) -> Namespace:
        """Return the namespace of an engine, which is opened if there is none.

        Raises:
            NamespaceMismatchError: It exists with another layout, or is ephemeral and this engine's must not be.
        """
        found_id = namespace_id(hello.fingerprint)
        namespace = self.by_id.get(found_id)
        if namespace is None:
            now_unix_s = time.time()
            row = NamespaceRow(
                namespace_id=found_id,
                model=hello.model_names[0],
                fingerprint=dict(hello.fingerprint),
                layout=hello.layout,
                created_unix_s=now_unix_s,
                seen_unix_s=now_unix_s,
            )
            namespace = self.open(row, ephemeral=hello.ephemeral)
            namespace.is_recorded = False
            return namespace
        if namespace.layout != hello.layout:
            raise NamespaceMismatchError(
                f"namespace {found_id} has another layout than this engine states for the same fingerprint; "
                "the engine's connector and the one that created it are of different versions: upgrade both"
            )
        if namespace.ephemeral != hello.ephemeral:
            raise NamespaceMismatchError(
                f"namespace {found_id} is {'' if namespace.ephemeral else 'not '}ephemeral and this engine's is not to "
                "share it; give an ephemeral engine a fingerprint of its own"
            )
        return namespace

    async def record(self, namespace: Namespace, model: str) -> None:
        """Write its row, and the copy beside the ledger: an engine uses it now, and serves it by this name.

        What the ledger has stays as it is if it refuses: the next engine's is written.

        Raises:
            LedgerError: The ledger refused, and has no row of it.
        """
        row = replace(namespace.row, model=model, seen_unix_s=time.time())
        if not namespace.ephemeral:
            problem = ""
            try:
                await self._resources.in_ledger(self._resources.ledger.put_namespace, row)
                namespace.is_recorded = True
                await self._resources.in_io(save_namespace, self._resources.config.disk.disk_dir, row)
            except (LedgerError, OSError) as error:  # no more than its name changes; the copy is for a lost ledger
                if not namespace.is_recorded:
                    raise
                problem = str(error)
            if self._problem.becomes(problem):
                log_event(logger, "namespace_not_saved", level=logging.WARNING, problem=problem)
        namespace.row, namespace.model = row, model

    async def forget_empty(self) -> None:
        """Forget namespaces that have had no chunks, prompts and engines for a day.

        Where an engine of the same model uses another, prompts do not keep one: they are stored for that.
        """
        for namespace in list(self.by_id.values()):
            if time.monotonic() < self._forget_at_s or not self._is_over(namespace):
                continue
            async with self._changes.lock:
                if self._is_over(namespace):
                    await self._forget(namespace)

    def _is_over(self, namespace: Namespace) -> bool:
        if self.by_id.get(namespace.namespace_id) is not namespace:  # ended while the change lock was waited for
            return False
        if namespace.host.recovering:  # its arena is still being taken over from a previous daemon
            return False
        if namespace.sessions or namespace.holds_chunks or time.time() - namespace.row.seen_unix_s <= STALE_S:
            return False
        if self.capacity.is_superseded(namespace):
            return True
        return not len(namespace.table) and not self._prompts.num_bound_in(namespace.namespace_id)

    async def _forget(self, namespace: Namespace) -> None:
        resources = self._resources
        if not namespace.ephemeral:
            try:
                await resources.in_ledger(resources.ledger.delete_namespace, namespace.namespace_id)
            except LedgerError as error:  # tried again then
                self._forget_at_s = time.monotonic() + RETRY_S
                log_event(logger, "namespace_not_forgotten", level=logging.ERROR, problem=str(error))
                return
            with suppress(OSError):  # at the next start it is quarantined again, if it is there again
                await resources.in_io(remove_quarantine, resources.config.disk.disk_dir, namespace.namespace_id)
                self.quarantined.pop(namespace.namespace_id, None)
            with suppress(OSError):  # a superfluous copy does no harm
                await resources.in_io(forget_namespace, resources.config.disk.disk_dir, namespace.namespace_id)
        await self.close(namespace)
        log_event(logger, "namespace_forgotten", namespace=namespace.namespace_id, model=namespace.row.model)

    async def close(self, namespace: Namespace) -> None:
        """End a namespace that no engine uses; its bindings are forgotten."""
        del self.by_id[namespace.namespace_id]
        self._prompts.forget_namespace(namespace.namespace_id)
        self.ending.append(namespace)
        await namespace.close()
        self.ending.remove(namespace)
        self._top_up_all()

    def all_tiers(self) -> list[Tiers]:
        """Return the tiers of every namespace."""
        return [namespace.tiers for namespace in self.by_id.values()]

    def is_any_refused(self) -> bool:
        """Say whether the disk quota keeps some chunk from becoming durable."""
        return any(namespace.write_back.queue.num_refused for namespace in self.by_id.values())

    def retry_refused(self) -> None:
        """Space came free on disk: try to write what was refused."""
        for namespace in self.by_id.values():
            namespace.write_back.retry_refused()
