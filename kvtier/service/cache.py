"""The cache of a daemon: made of its parts at a start, closed at the end; engines attach to it."""

import asyncio
import logging
import time
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from kvtier.concurrency.pauses import LOOK_S, POLL_S, until_next
from kvtier.concurrency.tasks import Changes
from kvtier.concurrency.thread_calls import begin_in_thread
from kvtier.concurrency.turns import SLICE_KEYS
from kvtier.config import DaemonConfig
from kvtier.core.fingerprint import differing_fields, namespace_id
from kvtier.core.layout import ChunkKey
from kvtier.discovery.auto_pins import AutoPins
from kvtier.disk.files.observed_ops import ObservedFileOps
from kvtier.disk.packs.chunk_seals import ChunkSeals
from kvtier.disk.packs.pack_tier import PackTier
from kvtier.errors import ArenaError, DrainingError, KvtierError, StuckError
from kvtier.host.arena import sweep_arena_directory
from kvtier.host.arena_tier import drop_pages
from kvtier.host.session_locks import SessionLock
from kvtier.ledger import BindingRow, Ledger, PromptRow
from kvtier.obs.counters import Counters
from kvtier.obs.log import log_event
from kvtier.obs.timings import Timings, watch_loop_lag
from kvtier.outcomes.explain import Explainer
from kvtier.outcomes.outcome_book import OutcomeBook
from kvtier.prompts.book import PromptBook
from kvtier.prompts.by_request.request_pins import RequestPins
from kvtier.prompts.evictions import Evictions
from kvtier.prompts.expiry import Expiry
from kvtier.prompts.pins import Pins
from kvtier.prompts.prefetch import Prefetcher
from kvtier.prompts.readiness import ReadinessChecker
from kvtier.prompts.renames import Renames
from kvtier.prompts.replacements import Replacements
from kvtier.sealing import load_key_ring
from kvtier.service.arenas import Arenas
from kvtier.service.bindings import Bindings
from kvtier.service.namespace_registry import NamespaceRegistry
from kvtier.service.quarantines import Quarantines
from kvtier.service.startup import load_from_disk
from kvtier.sessions.engine_peer import EngineHello, EnginePeer, KnownPin
from kvtier.sessions.residency_report import ResidencyReport
from kvtier.sessions.session import Session, SessionEnd
from kvtier.tiering.namespace import Namespace
from kvtier.tiering.quarantine import load_quarantines
from kvtier.tiering.resources import Resources
from kvtier.upkeep.arena_recovery import ArenaRecovery
from kvtier.upkeep.compactor import Compactor
from kvtier.upkeep.ledger_upkeep import keep_ledger
from kvtier.upkeep.preallocation import Preallocator
from kvtier.upkeep.scratch_folder import sweep_scratch
from kvtier.upkeep.scrubber import CURSOR_FILE, Scrubber

logger = logging.getLogger(__name__)

_CAPACITY_POLL_S = LOOK_S
_COPIES_S = 2.0
"""Beyond the drain, to end copies between vLLM's blocks and rows, which move gigabytes a second: a worker that is
stopped, or hangs, keeps the pages that it may be in."""
_FREE_S = 15.0
"""What frees a GiB in 0.2 s; all of a stop fits into the minute that systemd and Kubernetes give it."""
STUCK_AFTER_S = 10.0
"""After the drain, which has a time of its own, only calls that run are waited for: one batch of reads, one pack being
written. A disk that needs longer for that hangs, and the caller of a stop shall not wait for it for ever."""


class Cache:
    """Owns everything of the daemon but gRPC; operators ask `pins` and `evictions`. Loop thread only."""

    def __init__(self, config: DaemonConfig, resources: Resources) -> None:
        self.config = config
        self.resources = resources
        self.started_unix_s = time.time()
        self.prompts = PromptBook()
        self.changes = self._tasks = Changes()
        self.registry = NamespaceRegistry(resources, self.prompts, self.changes, self._top_up_all)
        self.namespaces, self.capacity = self.registry.by_id, self.registry.capacity
        self.quarantines = Quarantines(resources, self.registry, self.changes)
        self.compactor = Compactor(
            resources,
            self.registry.all_tiers,
            is_any_refused=self.registry.is_any_refused,
            retry_refused=self.registry.retry_refused,
        )
        self.scrubber = Scrubber(resources, self.registry.all_tiers, config.disk.disk_dir / CURSOR_FILE)
        self.arenas = Arenas(resources, self.namespaces, self._tasks, self._top_up_all)
        self._draining = False
        self._shortened: set[Path] = set()  # of which it was logged
        self._sessions: list[Session] = []  # quarantined ones too
        resources.num_storing = lambda: sum(session.hello.store_credits > 1 for session in self.live_sessions)
        self._verified = asyncio.Event()  # nothing of a previous daemon's memory comes to be served from now on
        self.pins = Pins(
            resources,
            self.prompts,
            self.namespaces,
            lambda: self.live_sessions,
            self.changes,
            self.registry.retry_refused,
        )
        self.bindings = Bindings(
            resources, self.prompts, self.pins, self.namespaces, lambda: self.live_sessions, self.changes
        )
        self.readiness = ReadinessChecker(self.pins, self.prompts, self.namespaces, lambda: self.live_sessions)
        self.evictions = Evictions(
            self.pins, self.prompts, self.namespaces, self.changes, self._verified, self.registry.retry_refused
        )
        self.renames = Renames(self.pins, self.prompts, self.namespaces, resources, self.changes)
        self.expiry = Expiry(self.pins, self.prompts, resources, self.changes)
        self.replacements = Replacements(self.pins, self.prompts, self.changes)
        self.auto_pins = AutoPins(
            resources, self.prompts, self.pins, self.renames, self.namespaces, lambda: self.live_sessions
        )
        self.pins.end_automatic_pins = self.auto_pins.end_automatic_pins

        self.outcomes = OutcomeBook(resources, self.prompts)
        self.outcomes.on_use = self.expiry.used
        self.explainer = Explainer(resources, self.prompts, self.namespaces, lambda: self.live_sessions, self.outcomes)
        self.request_pins = RequestPins(self.pins, self.prompts, self.namespaces, resources)

    @classmethod
    async def open(cls, config: DaemonConfig) -> "Cache":
        """Open ledger and packs, reconcile them, and take up what they hold.

        The caller holds the single-instance lock. Arenas of a previous daemon are taken over, packs without rows
        adopted.

        Raises:
            ConfigError: The key file cannot be used.
            KeyMissingError: A promise is sealed with a key that it lacks.
            LedgerError: The ledger cannot be opened.
            FormatVersionError: It was written by a newer kvtier.
            TierIOError: The disk tier cannot be read.
        """
        sweep_scratch(config.disk.disk_dir)
        counters, timings = Counters(), Timings()
        ops = ObservedFileOps(counters, timings.fsync)
        ring = load_key_ring(config.disk.key_file) if config.disk.key_file is not None else None
        disk = PackTier(config.disk.disk_dir / "packs", ops=ops, seals=ChunkSeals(ring, counters))
        ledger_path = config.disk.disk_dir / "ledger.sqlite"
        resources = Resources(config, disk, Ledger.open(ledger_path, ring=ring), counters, timings)
        cache = cls(config, resources)
        cache.registry.quarantined |= await resources.in_io(load_quarantines, config.disk.disk_dir)
        await load_from_disk(resources, cache.registry, cache.prompts, disk)
        await cache.outcomes.load()
        recovery = ArenaRecovery(resources, cache.namespaces, cache.prompts, cache.arenas.max_open, cache._top_up_all)
        await recovery.open()
        cache._tasks.start("recovery", cache._recover_memory(recovery))
        cache._tasks.keep("expiry", cache.expiry.run)
        cache._tasks.keep("replacements", cache.replacements.run)
        cache._tasks.keep("capacity", cache._keep_capacity)
        cache._tasks.keep("preallocation", Preallocator(resources, cache.namespaces).run)
        cache._tasks.keep("ledger-upkeep", partial(keep_ledger, resources))
        cache._tasks.keep("probe", resources.disk_health.run)
        cache._tasks.keep("disk-rate", resources.choose_compression)
        cache._tasks.keep("pin-watch", cache.pins.watch.run)
        cache._tasks.keep("bindings", cache.bindings.run)
        cache._tasks.keep("auto-pins", cache.auto_pins.run)
        cache._tasks.keep("usage", cache.outcomes.run)
        cache._tasks.keep("loop-lag", partial(watch_loop_lag, timings.loop_lag))
        if config.disk.compact_bytes_per_s:
            cache._tasks.keep("compact", cache.compactor.run)
        if config.disk.scrub_bytes_per_s:
            cache._tasks.keep("scrub", cache.scrubber.run)
        return cache

    async def until_recovered(self) -> None:
        """Return when all that is served of a previous daemon's host memory is served."""
        await self._verified.wait()

    async def _recover_memory(self, recovery: ArenaRecovery) -> None:
        """Serve what a previous daemon left in host memory, then bring in what is missing, then clear up after it."""
        try:
            await recovery.verify()
        finally:
            self._verified.set()
        self._prefetch(self.namespaces.values())
        if await recovery.release():
            self._prefetch(self.namespaces.values())  # what did not fit beside the rows that are gone now

    def _prefetch(self, namespaces: Iterable[Namespace]) -> None:
        if self.config.host.prefetch:
            prefetcher = Prefetcher(self.prompts, self.arenas.open_if_it_fits)
            self._tasks.start("prefetch", prefetcher.run(list(namespaces)))

    @property
    def sessions(self) -> list[Session]:
        """Sessions of all namespaces, quarantined ones too."""
        return list(self._sessions)

    @property
    def live_sessions(self) -> list[Session]:
        """Engines attached now."""
        return [session for session in self.sessions if not session.ended]

    @property
    def shared_files(self) -> list[Path]:
        """What attached engines and those to come reach by its path: arenas and session locks."""
        arenas = [namespace.host.arena.path for namespace in self.namespaces.values() if namespace.host.is_open]
        return [*arenas, *(session.lock.path for session in self.live_sessions)]

    def give_up_shortened_arenas(self) -> None:
        """Notice arenas that somebody has shortened: from then on they are as removed, and the drain touches none."""
        for namespace in self.namespaces.values():
            if not namespace.host.is_open or namespace.host.arena.is_whole:
                continue
            path, is_new = namespace.host.arena.path, namespace.host.arena.path not in self._shortened
            self._shortened.add(path)
            if is_new:
                log_event(logger, "arena_shortened", level=logging.ERROR, path=path)
            try:
                namespace.host.arena.abandon()
            except ArenaError as error:  # the next look tries again
                if is_new:
                    log_event(logger, "arena_not_dropped", level=logging.ERROR, problem=str(error))

    def differing_namespaces(self, session: Session) -> list[tuple[Namespace, list[str]]]:
        """Explain an empty namespace: others of the same model that hold chunks, each with the fields that differ."""
        mine = session.namespace
        others = [] if mine.holds_chunks else [each for each in self.namespaces.values() if each is not mine]
        return [
            (other, differing_fields(mine.fingerprint, other.fingerprint))
            for other in others
            if other.model in session.hello.model_names and other.holds_chunks
        ]

    def _top_up_all(self) -> None:
        for session in self.sessions:
            session.stores.top_up()

    async def _keep_capacity(self) -> None:
        """Keep free slots and disk space ahead of those who will ask, and forget namespaces that hold nothing."""
        while True:
            await asyncio.sleep(until_next(_CAPACITY_POLL_S))
            await self._keep_capacity_once()

    async def _keep_capacity_once(self) -> None:
        if self.capacity.trim_host():
            self._top_up_all()
        await self.resources.measure_disk()
        await self.capacity.trim_disk()
        for namespace in self.namespaces.values():
            if namespace.write_back.queue.num_refused:
                superseded_bytes = self.capacity.superseded_bytes(namespace.superseded_models)
                namespace.write_back.retry_if_it_fits(superseded_bytes)
        await self.arenas.close_empty()
        await self.registry.forget_empty()

    # Engines

    async def attach(self, hello: EngineHello, peer: EnginePeer) -> Session:
        """Open a session. A refused engine leaves nothing behind: its namespace is recorded last.

        Raises:
            DrainingError: The daemon is stopping.
            NamespaceMismatchError: The namespace exists with another layout, or is ephemeral and shall not be.
            ArenaError: No arena can be had.
            TierIOError: The session's lock file cannot be made.
            LedgerError: The ledger refused to record a namespace that it does not have.
        """
        async with self.changes.lock:
            if self._draining:
                raise DrainingError
            is_new = namespace_id(hello.fingerprint) not in self.namespaces
            namespace = self.registry.open_for(hello)
            had_arena, session_id = namespace.host.is_open, uuid.uuid4().hex
            namespace.attaching = True
            try:
                await self.arenas.open(namespace)
                lock = SessionLock.create(self.config.host.arena_dir, session_id, self.config.server.gid)
                try:
                    await self.registry.record(namespace, hello.model_names[0])
                except BaseException:
                    lock.close()
                    raise
            except KvtierError:
                if is_new:
                    await self.registry.close(namespace)
                raise
            finally:
                namespace.attaching = False
            session = Session(session_id, hello, peer, namespace, lock)
            self._sessions.append(session)
            namespace.sessions.append(session)
            if not had_arena and self._verified.is_set():  # else it comes when a previous daemon's memory is verified
                self._prefetch([namespace])
            self.resources.counters.sessions_opened += 1
            self.pins.watch.look_again()
        if hello.report_residency:
            report = ResidencyReport(session, partial(self._served_keys, session.namespace))
            self._tasks.keep(f"residency-{session_id[:8]}", report.run)
        log_event(
            logger,
            "session_opened",
            session=session_id,
            engine=hello.engine_id,
            pid=hello.pid,
            namespace=namespace.namespace_id,
            model=hello.model_names[0],
            vllm=hello.vllm_version,
            arena=namespace.host.arena.path,
        )
        return session

    def pins_for(self, session: Session) -> list[PromptRow]:
        """Return the prompts that the engine shall recognize."""
        return [prompt for prompt in self.prompts if session.serves(prompt)]

    def _served_keys(self, namespace: Namespace, pin_id: str) -> Sequence[ChunkKey]:
        prompt, binding = self.prompts.by_pin_id(pin_id), self.prompts.binding(pin_id, namespace.namespace_id)
        is_served = prompt is not None and prompt.pinned and namespace.quarantine is None
        return binding.keys if binding is not None and is_served else ()

    def known_pin(self, session: Session, pin_id: str) -> KnownPin | None:
        """Return a prompt with what an engine of this namespace need not compute again; None if it has ended."""
        if (prompt := self.prompts.by_pin_id(pin_id)) is None:
            return None
        binding = None if prompt.lora_name else self.prompts.binding(pin_id, session.namespace_id)
        if binding is None:
            return KnownPin(prompt)
        return KnownPin(prompt, binding.keys, session.hello.takes_joined_keys and not prompt.public)

    async def confirm(self, session: Session, pin_ids: Sequence[str], unknown: Sequence[str] = ()) -> None:
        """An engine recognizes prompts by the keys that it was sent, and others not: it is sent those with tokens."""

        def find_pin(pin_id: str) -> KnownPin | None:
            prompt = self.prompts.by_pin_id(pin_id)
            return None if prompt is None else KnownPin(prompt)

        rows, num_keys = list[BindingRow](), 0
        for pin_id in dict.fromkeys(pin_ids):
            if (row := self.prompts.binding(pin_id, session.namespace_id)) is not None:
                session.recognizes(pin_id)
                rows.append(row)
                num_keys += len(row.keys)
            if num_keys >= SLICE_KEYS:
                await session.send_pins_held(rows)
                rows, num_keys = [], 0
        await session.send_pins_held(rows)
        await session.send_pins(find_pin, list(dict.fromkeys(unknown)))

    def end(self, session: Session, how: SessionEnd = SessionEnd.CLOSED) -> None:
        """The stream is gone; its slots are freed when the engine's processes release them."""
        if session.ended:
            return
        counters, was_busy = self.resources.counters, session.is_busy
        session.lost()
        counters.sessions_lost += was_busy and how in (SessionEnd.CUT, SessionEnd.REFUSED)
        counters.sessions_ended_closed += how is SessionEnd.CLOSED
        counters.sessions_ended_gone += how is SessionEnd.GONE
        counters.sessions_ended_cut += how is SessionEnd.CUT
        counters.sessions_ended_refused += how is SessionEnd.REFUSED
        counters.sessions_ended_drained += how is SessionEnd.DRAINED
        self._tasks.start(f"quarantine-{session.session_id[:8]}", self._quarantine(session))

    async def _quarantine(self, session: Session) -> None:
        await session.wait_until_released()
        namespace = session.namespace
        namespace.sessions.remove(session)
        self._sessions.remove(session)
        namespace.left(time.time())
        self._top_up_all()
        if namespace.ephemeral and not namespace.sessions:  # it goes with its last session
            await self.registry.close(namespace)

    # The end

    async def close(self) -> None:
        """Take no new engines, make durable what is committed (within the drain timeout), free everything.

        With `host.keep_arena` the arenas stay, and with them the locks of sessions whose engines may still use them.

        Raises:
            StuckError: A call of the operating system does not return. What it may touch is left as it is: the process
                has to end without an orderly exit, which would wait for the call's thread.
        """
        self._draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(self.config.server.drain_timeout_s):
                for namespace in list(self.namespaces.values()):  # ephemeral ones may end meanwhile
                    await namespace.tasks.join()
                    await namespace.write_back.flush()
        if not self.config.host.keep_arena:
            await self._until_copied()
        ending = asyncio.create_task(self._end(), name="end")
        await asyncio.wait([ending], timeout=STUCK_AFTER_S)
        if not ending.done():
            self.resources.give_up()  # first, or who is cancelled now, or with the loop's end, would wait for its call
            ending.cancel()
            with suppress(ArenaError):  # the next start sweeps
                self._sweep_arenas()
            raise StuckError(STUCK_AFTER_S, self.resources.busy_pools)
        ending.result()
        await self._close_arenas()
        self._sweep_arenas()

    async def _until_copied(self) -> None:
        """Wait until no worker copies from or to a row of a session that has ended, but not for one that hangs."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_COPIES_S):
                while any(session.ended for session in self._sessions):  # noqa: ASYNC110 - a kernel lock has no event
                    await asyncio.sleep(POLL_S)

    async def _end(self) -> None:
        await self._tasks.close()
        await self.auto_pins.save()
        await self.outcomes.save()
        for namespace in [*self.namespaces.values(), *self.registry.ending]:
            await namespace.end()
        await self.resources.close()

    async def _close_arenas(self) -> None:
        """Pages too, as vLLM may map the files; not where a worker may be in a row still.

        What no time is left for, or no thread, goes with the last process that maps it.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + _FREE_S
        for namespace in [*self.namespaces.values(), *self.registry.ending]:
            is_kept = self.config.host.keep_arena and not namespace.ephemeral
            drop = partial(drop_pages, namespace.host, keep=is_kept)
            with suppress(OSError):
                while not namespace.sessions and await begin_in_thread("kvtier-free", drop):
                    if loop.time() > deadline_s:
                        log_event(
                            logger, "pages_left_to_engines", level=logging.WARNING, path=namespace.host.arena.path
                        )
                        break
            namespace.host.close(keep=is_kept)

    def _sweep_arenas(self) -> None:
        if not self.config.host.keep_arena:
            sweep_arena_directory(self.config.host.arena_dir)
