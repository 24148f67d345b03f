"""The daemon's heart: opens the stores, keeps namespaces, sessions and prompts, and carries out what operators ask."""

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from kvtier.config import DaemonConfig
from kvtier.core.fingerprint import differing_fields, namespace_id
from kvtier.core.layout import ChunkKey
from kvtier.errors import (
    DrainingError,
    KvtierError,
    LedgerError,
    NamespaceMismatchError,
    PromptPinnedError,
)
from kvtier.ledger import BindingRow, Ledger, NamespaceRow, PromptRow
from kvtier.ledger.namespace_files import forget_namespace, save_namespace
from kvtier.obs.counters import Counters
from kvtier.obs.log import log_event
from kvtier.obs.loop_lag import watch_loop_lag
from kvtier.obs.timings import Timings
from kvtier.service.adoption import Adoption
from kvtier.service.compactor import Compactor
from kvtier.service.evicting import Evicted, EvictTier, evict_chunks
from kvtier.service.namespace import Namespace
from kvtier.service.peer import EngineHello, EnginePeer
from kvtier.service.pin_watch import PinWatch
from kvtier.service.prewarm import Prewarmer
from kvtier.service.prompts import PinWish, PromptBook, check_quota
from kvtier.service.recovery import recover
from kvtier.service.room import Room
from kvtier.service.scratch import sweep_scratch
from kvtier.service.scrubber import CURSOR_FILE, Scrubber
from kvtier.service.session import Session, SessionEnd
from kvtier.service.stores import Stores
from kvtier.service.tasks import Tasks
from kvtier.service.views import (
    EvictionView,
    PromptState,
    PromptView,
    durability_of,
    state_of,
    view_binding,
    view_prompt,
)
from kvtier.tiers.arena import sweep_arena_directory
from kvtier.tiers.observed_ops import ObservedFileOps
from kvtier.tiers.packs import PackTier
from kvtier.tiers.session_locks import SessionLock

logger = logging.getLogger(__name__)

_EXPIRY_POLL_S = 1.0
_ROOM_POLL_S = 0.25
_EMPTY_GRACE_S = 24 * 3600.0

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class NamespaceDifference:
    """A namespace of the same model whose chunks an engine cannot use, and the fields that differ."""

    namespace_id: str
    fields: tuple[str, ...]
    num_prompts: int


class Cache:
    """Owns everything of the daemon but gRPC. Loop thread only.

    Changes (pin, unpin, evict, expiry, binding, attaching) run one at a time, so that no decision is taken
    on a state that an awaited ledger write has meanwhile made old. They run to their end even when the caller leaves: a
    ledger write cannot be called back, and memory has to follow it.
    """

    def __init__(self, config: DaemonConfig, stores: Stores) -> None:
        self.config = config
        self.stores = stores
        self.started_unix_s = time.time()
        self.prompts = PromptBook()
        self.pin_watch = PinWatch(self.prompts, self.state_of, stores.timings.durable)
        self.namespaces: dict[str, Namespace] = {}
        self.room = Room(stores, self.namespaces)
        self.compactor = Compactor(stores, lambda: list(self.namespaces.values()))
        self.scrubber = Scrubber(stores, lambda: list(self.namespaces.values()), config.disk.disk_dir / CURSOR_FILE)
        self._tasks = Tasks()
        self._changing = asyncio.Lock()
        self._draining = False
        self._ending: list[Namespace] = []  # ephemeral ones that are being closed, by a task that a stop cancels
        self._verified = asyncio.Event()  # nothing of a dead daemon's memory comes to be served from now on

    @classmethod
    async def open(cls, config: DaemonConfig) -> "Cache":
        """Open ledger and packs, reconcile them, and take up what they hold.

        The caller holds the single-instance lock: arenas of a dead daemon are taken over, orphans of it swept.

        Raises:
            LedgerError: The ledger cannot be opened.
            FormatVersionError: It was written by a newer kvtier.
            TierIOError: The disk tier cannot be read.
        """
        sweep_scratch(config.disk.disk_dir)
        counters, timings = Counters(), Timings()
        ops = ObservedFileOps(counters, timings.fsync)
        disk = PackTier(config.disk.disk_dir / "packs", zstd_level=config.disk.zstd_level, ops=ops)
        ledger_path = config.disk.disk_dir / "ledger.sqlite"
        _refuse_packs_without_ledger(ledger_path, disk)
        cache = cls(config, Stores.create(config, disk, Ledger.open(ledger_path), counters, timings))
        await recover(cache)
        adoption = Adoption(cache.stores, cache.namespaces, cache.prompts)
        await adoption.open(config.host.arena_dir)
        cache._tasks.start("adoption", cache._adopt(adoption))
        cache._tasks.start("expiry", cache._expire())
        cache._tasks.start("room", cache._keep_room())
        cache._tasks.start("probe", cache.stores.disk_health.run())
        cache._tasks.start("pin-watch", cache.pin_watch.run())
        cache._tasks.start("loop-lag", watch_loop_lag(timings.loop_lag))
        if config.disk.compact_bytes_per_s:
            cache.stores.holes.set()  # an earlier run may have left packs with holes
            cache._tasks.start("compact", cache.compactor.run())
        if config.disk.scrub_bytes_per_s:
            cache._tasks.start("scrub", cache.scrubber.run())
        return cache

    async def _adopt(self, adoption: Adoption) -> None:
        """Serve what a dead daemon left in host memory, then bring in what is missing, then clear up after it."""
        try:
            await adoption.verify()
        finally:
            self._verified.set()
        self._prewarm()
        if await adoption.release():
            self._prewarm()  # what did not fit beside the rows that are gone now

    def _prewarm(self) -> None:
        if self.config.host.prewarm:
            prewarmer = Prewarmer(self.prompts, self.config.host.arena_dir)
            self._tasks.start("prewarm", prewarmer.run(list(self.namespaces.values())))

    @property
    def sessions(self) -> list[Session]:
        """Sessions of all namespaces, quarantined ones too."""
        return [session for namespace in self.namespaces.values() for session in namespace.sessions]

    @property
    def live_sessions(self) -> list[Session]:
        """Engines attached now."""
        return [session for session in self.sessions if not session.ended]

    @property
    def shared_files(self) -> list[Path]:
        """What attached engines and those to come reach by its path: arenas and session locks."""
        arenas = [namespace.arena.path for namespace in self.namespaces.values() if namespace.has_arena]
        return [*arenas, *(session.lock.path for session in self.live_sessions)]

    def adopt_namespace(self, row: NamespaceRow, *, ephemeral: bool) -> Namespace:
        """Take a namespace in."""
        namespace = Namespace(
            row,
            self.stores,
            ephemeral=ephemeral,
            find_room=self.room.find_host_room,
            find_disk_room=self.room.find_disk_room,
            top_up_all=self._top_up_all,
        )
        self.namespaces[row.namespace_id] = namespace
        return namespace

    def _top_up_all(self) -> None:
        for session in self.sessions:
            session.top_up()

    async def _keep_room(self) -> None:
        """Keep free slots and disk space ahead of those who will ask, and forget namespaces that hold nothing."""
        while True:
            await asyncio.sleep(_ROOM_POLL_S)
            await self._keep_room_once()

    async def _keep_room_once(self) -> None:
        if self.room.trim_host():
            self._top_up_all()
        await self.stores.measure_disk()
        await self.room.trim_disk()
        for namespace in self.namespaces.values():
            namespace.spiller.retry_if_room()
        await self._forget_empty_namespaces()

    async def _forget_empty_namespaces(self) -> None:
        """A namespace without chunks, prompts and engines, left alone for a while, is not worth a row."""
        for namespace in list(self.namespaces.values()):
            if not self._is_over(namespace):
                continue
            async with self._changing:
                if self._is_over(namespace):
                    await self._forget_namespace(namespace)

    def _is_over(self, namespace: Namespace) -> bool:
        if namespace.keep_pages:  # its arena is still being taken over from a dead daemon
            return False
        if namespace.sessions or len(namespace.table) or self.prompts.bindings_in(namespace.namespace_id):
            return False
        return time.time() - namespace.row.seen_unix_s > _EMPTY_GRACE_S

    async def _forget_namespace(self, namespace: Namespace) -> None:
        if not namespace.ephemeral:
            try:
                await self.stores.in_ledger(self.stores.ledger.delete_namespace, namespace.namespace_id)
            except LedgerError as error:  # the next turn tries again
                log_event(logger, "namespace_not_forgotten", level=logging.ERROR, problem=str(error))
                return
            with suppress(OSError):  # a copy more is no harm
                await self.stores.in_io(forget_namespace, self.config.disk.disk_dir, namespace.namespace_id)
        await self._close_namespace(namespace)
        log_event(logger, "namespace_forgotten", namespace=namespace.namespace_id, model=namespace.row.model)

    # Engines

    async def attach(self, hello: EngineHello, peer: EnginePeer) -> Session:
        """Open a session.

        Raises:
            DrainingError: The daemon is stopping.
            NamespaceMismatchError: The namespace exists with another layout, or is ephemeral and shall not be.
            ArenaError: No arena can be had.
            TierIOError: The session's lock file cannot be made.
        """
        async with self._changing:
            if self._draining:
                raise DrainingError
            namespace = await self._namespace_of(hello)
            session_id = uuid.uuid4().hex
            try:
                arena = namespace.open_arena(self.config.host.arena_dir)
                lock = SessionLock.create(self.config.host.arena_dir, session_id)
            except KvtierError:
                await self._end_if_over(namespace)
                raise
            session = Session(session_id, namespace, hello, peer, lock)
            namespace.sessions.append(session)
            self.stores.counters.sessions_opened += 1
        log_event(
            logger,
            "session_opened",
            session=session_id,
            engine=hello.engine_id,
            pid=hello.pid,
            namespace=namespace.namespace_id,
            model=hello.model_names[0],
            vllm=hello.vllm_version,
            arena=arena.path,
        )
        return session

    async def _namespace_of(self, hello: EngineHello) -> Namespace:
        found_id = namespace_id(hello.fingerprint)
        namespace = self.namespaces.get(found_id)
        now_unix_s = time.time()
        if namespace is None:
            row = NamespaceRow(
                namespace_id=found_id,
                model=hello.model_names[0],
                fingerprint=dict(hello.fingerprint),
                layout=hello.layout,
                created_unix_s=now_unix_s,
                seen_unix_s=now_unix_s,
            )
            namespace = self.adopt_namespace(row, ephemeral=hello.ephemeral)
        elif namespace.layout != hello.layout:
            raise NamespaceMismatchError(
                f"namespace {found_id} has another layout than this engine states for the same fingerprint; "
                "the engine's connector and the one that created it are of different versions: upgrade both"
            )
        elif namespace.ephemeral != hello.ephemeral:
            raise NamespaceMismatchError(
                f"namespace {found_id} is {'' if namespace.ephemeral else 'not '}ephemeral and this engine's is not to "
                "share it; give an ephemeral engine a fingerprint of its own"
            )
        namespace.row = replace(namespace.row, seen_unix_s=now_unix_s)
        if not namespace.ephemeral:
            await self.stores.in_ledger(self.stores.ledger.put_namespace, namespace.row)
            await self._save_namespace(namespace.row)
        return namespace

    async def _save_namespace(self, row: NamespaceRow) -> None:
        try:
            await self.stores.in_io(save_namespace, self.config.disk.disk_dir, row)
        except OSError as error:  # what it is for, a lost ledger, has not happened
            log_event(logger, "namespace_not_saved", level=logging.WARNING, problem=str(error))

    async def exclusively(self, name: str, change: Callable[[], Awaitable[T]]) -> T:
        """Run a change as the only one, and to its end even when the caller leaves meanwhile.

        Raises:
            DrainingError: The daemon is stopping.
        """

        async def alone() -> T:
            async with self._changing:
                return await change()

        return await self._tasks.complete(name, alone())

    async def to_end(self, name: str, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end even when the caller leaves meanwhile; not exclusively.

        Raises:
            DrainingError: The daemon is stopping.
        """
        return await self._tasks.complete(name, coroutine)

    def pins_for(self, session: Session) -> list[PromptRow]:
        """Return the prompts that the engine shall recognize."""
        return [prompt for prompt in self.prompts if session.serves(prompt)]

    def differences(self, session: Session) -> list[NamespaceDifference]:
        """Explain an empty namespace: others of the same model that hold chunks, and what differs."""
        mine = session.namespace
        if any(chunk.held for chunk in mine.table):
            return []
        return [
            NamespaceDifference(
                namespace_id=other.namespace_id,
                fields=tuple(differing_fields(mine.fingerprint, other.fingerprint)),
                num_prompts=sum(self.prompts.binding(p.pin_id, other.namespace_id) is not None for p in self.prompts),
            )
            for other in self.namespaces.values()
            if other is not mine and other.row.model in session.hello.model_names and any(c.held for c in other.table)
        ]

    async def bind(
        self, session: Session, pin_id: str, keys: Sequence[ChunkKey], covered_tokens: int, error: str
    ) -> None:
        """An engine recognizes a prompt by these keys (or says why it cannot).

        Raises:
            InvalidArgumentError: A key is of no group of the namespace.
            LedgerError: The ledger refused.
        """
        await self._tasks.complete("bind", self._bind(session, pin_id, keys, covered_tokens, error))

    async def _bind(
        self, session: Session, pin_id: str, keys: Sequence[ChunkKey], covered_tokens: int, error: str
    ) -> None:
        namespace = session.namespace
        async with self._changing:
            prompt = self.prompts.by_pin_id(pin_id)
            if prompt is None or session.ended:
                return
            if error:
                session.bind_errors[pin_id] = error
                log_event(logger, "pin_not_bound", level=logging.WARNING, name=prompt.name, problem=error)
                return
            namespace.check_keys("bind_pin.keys", keys)
            row = BindingRow(
                pin_id=pin_id, namespace_id=namespace.namespace_id, keys=tuple(keys), covered_tokens=covered_tokens
            )
            old = self.prompts.binding(pin_id, namespace.namespace_id)
            if old != row:
                if not namespace.ephemeral:
                    await self.stores.in_ledger(self.stores.ledger.put_binding, row)
                if prompt.pinned:
                    namespace.table.pin(row.keys)
                    namespace.table.unpin(old.keys if old else ())
                    namespace.spiller.add(row.keys)
                self.prompts.bind(row)
            session.bind_errors.pop(pin_id, None)
            session.bound.add(pin_id)
        held = [key for key in keys if namespace.table.holds(key)]
        missing = [key for key in keys if not namespace.table.holds(key)]
        if not session.ended:
            session.peer.chunks_held(held, True)
            session.peer.chunks_held(missing, False)

    def end(self, session: Session, how: SessionEnd = SessionEnd.CLOSED) -> None:
        """The stream is gone; its slots are freed when the engine's processes let go."""
        if session.ended:
            return
        counters, had_some = self.stores.counters, session.num_leases or session.num_store_grants
        session.lost()
        counters.sessions_lost += bool(had_some)
        counters.sessions_closed += how is SessionEnd.CLOSED
        counters.sessions_cut += how is SessionEnd.CUT
        counters.sessions_refused += how is SessionEnd.REFUSED
        counters.sessions_drained += how is SessionEnd.DRAINED
        self._tasks.start(f"quarantine-{session.session_id[:8]}", self._quarantine(session))

    async def _quarantine(self, session: Session) -> None:
        await session.wait_until_let_go()
        namespace = session.namespace
        namespace.sessions.remove(session)
        namespace.row = replace(namespace.row, seen_unix_s=time.time())
        self._top_up_all()
        await self._end_if_over(namespace)

    async def _end_if_over(self, namespace: Namespace) -> None:
        """An ephemeral namespace goes with its last session; its prompts forget that it was."""
        if namespace.ephemeral and not namespace.sessions:
            await self._close_namespace(namespace)

    async def _close_namespace(self, namespace: Namespace) -> None:
        del self.namespaces[namespace.namespace_id]
        self.prompts.forget_namespace(namespace.namespace_id)
        self._ending.append(namespace)
        await namespace.close()
        self._ending.remove(namespace)
        self.stores.budget.give_back(namespace.slots.num_backed * namespace.layout.row_bytes)
        self._top_up_all()

    # Operators

    async def pin(self, wish: PinWish) -> PromptView:
        """Make a prompt a pinned one; durable on return.

        Raises:
            PromptExistsError: The name is taken.
            QuotaExceededError: It would not fit on disk.
        """
        await self._tasks.complete("pin", self._pin(wish))
        return self.view(wish.name)

    async def _pin(self, wish: PinWish) -> None:
        async with self._changing:
            prompt, old = self.prompts.draft(wish, time.time())
            check_quota(self.prompts, self.namespaces, prompt, self.config.disk.disk_bytes)
            await self.stores.in_ledger(self.stores.ledger.put_prompt, prompt)
            self.take_in(prompt, old)
        log_event(logger, "pin_registered", name=prompt.name, num_tokens=len(prompt.tokens), model=prompt.model)

    def take_in(self, prompt: PromptRow, old: PromptRow | None) -> None:
        """A pin is in the ledger, in place of `old`: make memory follow, and tell engines."""
        if old is not None and old.pin_id != prompt.pin_id:
            self._let_go(old)
        elif old is not None and not old.pinned:
            self._count_pins(prompt, pinned=True)
        self.prompts.put(prompt)
        self.pin_watch.pinned(prompt.pin_id)
        if old != prompt:
            self._announce(prompt)

    async def unpin(self, name: str) -> PromptView:
        """End the promise; the chunks stay as evictable cache.

        Raises:
            PromptNotFoundError: There is no such prompt.
        """
        await self._tasks.complete("unpin", self._unpin_named(name))
        return self.view(name)

    async def _unpin_named(self, name: str) -> None:
        async with self._changing:
            await self._unpin(self.prompts.get(name))

    async def _unpin(self, prompt: PromptRow) -> None:
        if prompt.pinned:
            unpinned = replace(prompt, pinned=False, expires_unix_s=0.0)
            await self.stores.in_ledger(self.stores.ledger.put_prompt, unpinned)
            self.prompts.put(unpinned)
            self._count_pins(unpinned, pinned=False)
            self._announce(unpinned)
            self._retry_refused()
            log_event(logger, "pin_ended", name=prompt.name)

    def _retry_refused(self) -> None:
        """What the disk quota refused may fit now."""
        for namespace in self.namespaces.values():
            namespace.spiller.retry_refused()

    async def evict(self, name: str, *, force: bool, tier: EvictTier = EvictTier.ANY) -> EvictionView:
        """Drop a prompt's chunks from the tier, except what other pinned prompts share.

        Raises:
            PromptNotFoundError: There is no such prompt.
            PromptPinnedError: It is pinned, its chunks would leave the last tier, and `force` is not set.
            LedgerError: The ledger refused.
        """
        return await self._tasks.complete("evict", self._evict(name, force=force, tier=tier))

    async def _evict(self, name: str, *, force: bool, tier: EvictTier) -> EvictionView:
        await self._verified.wait()  # or what is dropped now would be adopted a moment later, its prompt being pinned
        done = Evicted()
        async with self._changing:
            prompt = self.prompts.get(name)
            if prompt.pinned and not force and tier is not EvictTier.HOST:
                raise PromptPinnedError(name)
            for row in self.prompts.bindings_of(prompt.pin_id):
                namespace = self.namespaces.get(row.namespace_id)
                if namespace is None:  # ephemeral, and ended while the one before was dealt with
                    continue
                chunks = [chunk for key in row.keys if (chunk := namespace.table.get(key)) is not None and chunk.held]
                dropped = [chunk.key for chunk in chunks if chunk.num_pins <= prompt.pinned]
                done.num_shared_chunks += len(chunks) - len(dropped)
                await evict_chunks(namespace, dropped, tier, done)
            if not prompt.pinned and tier is EvictTier.ANY:
                await self._forget_prompt(prompt)
            self._retry_refused()
        log_event(logger, "prompt_evicted", name=name, tier=tier.name, chunks=done.num_chunks, forced=force)
        return EvictionView(**asdict(done))

    async def evict_all(self, *, force: bool, tier: EvictTier = EvictTier.ANY) -> EvictionView:
        """Drop every chunk that no pinned prompt has from the tier; with `force` those of pinned prompts too.

        Raises:
            LedgerError: The ledger refused; what was dropped until then stays dropped.
        """
        return await self._tasks.complete("evict", self._evict_all(force=force, tier=tier))

    async def _evict_all(self, *, force: bool, tier: EvictTier) -> EvictionView:
        await self._verified.wait()  # see _evict
        done = Evicted()
        async with self._changing:
            for namespace in list(self.namespaces.values()):
                chunks = [chunk for chunk in namespace.table if chunk.held]
                dropped = [chunk.key for chunk in chunks if force or not chunk.num_pins]
                done.num_shared_chunks += len(chunks) - len(dropped)
                await evict_chunks(namespace, dropped, tier, done)
            if tier is EvictTier.ANY:
                for prompt in [prompt for prompt in self.prompts if not prompt.pinned]:
                    await self._forget_prompt(prompt)
            self._retry_refused()
        log_event(logger, "all_evicted", tier=tier.name, chunks=done.num_chunks, forced=force)
        return EvictionView(**asdict(done))

    async def _forget_prompt(self, prompt: PromptRow) -> None:
        await self.stores.in_ledger(self.stores.ledger.delete_prompt, prompt.name)
        self._let_go(prompt)

    def view(self, name: str) -> PromptView:
        """Return a prompt's status.

        Raises:
            PromptNotFoundError: There is no such prompt.
        """
        prompt = self.prompts.get(name)
        bindings = [view_binding(namespace, row) for namespace, row in self._bound(prompt)]
        return view_prompt(prompt, bindings, self.live_sessions)

    def state_of(self, prompt: PromptRow) -> PromptState:
        """Return a prompt's state alone; quicker than `view`."""
        serving = [session for session in self.live_sessions if session.serves(prompt)]
        return state_of(prompt, [durability_of(namespace, row) for namespace, row in self._bound(prompt)], serving)

    def _bound(self, prompt: PromptRow) -> list[tuple[Namespace, BindingRow]]:
        """Return a prompt's bindings, that in the namespace used last at the end."""
        rows = self.prompts.bindings_of(prompt.pin_id)
        bound = [(self.namespaces[row.namespace_id], row) for row in rows if row.namespace_id in self.namespaces]
        return sorted(bound, key=lambda each: each[0].row.seen_unix_s)

    def _let_go(self, prompt: PromptRow) -> None:
        """A prompt's row is gone from the ledger: forget it, and tell engines."""
        if prompt.pinned:
            self._count_pins(prompt, pinned=False)
        self.prompts.forget(prompt)
        for session in self.live_sessions:
            session.bound.discard(prompt.pin_id)
            session.bind_errors.pop(prompt.pin_id, None)
            session.peer.pin_removed(prompt.pin_id)

    def _count_pins(self, prompt: PromptRow, *, pinned: bool) -> None:
        for row in self.prompts.bindings_of(prompt.pin_id):
            namespace = self.namespaces[row.namespace_id]
            if pinned:
                namespace.table.pin(row.keys)
                namespace.spiller.add(row.keys)  # what lost its place on disk while it was not pinned
            else:
                namespace.table.unpin(row.keys)

    def _announce(self, prompt: PromptRow) -> None:
        for session in self.live_sessions:
            if session.serves(prompt):
                session.peer.pin_added(prompt)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRY_POLL_S)
            await self._end_expired()

    async def _end_expired(self) -> None:
        for prompt in self.prompts.expired(time.time()):
            async with self._changing:
                if self.prompts.by_pin_id(prompt.pin_id) == prompt:
                    await self._try_to_unpin(prompt)

    async def _try_to_unpin(self, prompt: PromptRow) -> None:
        try:
            await self._unpin(prompt)
        except LedgerError as error:  # the next turn tries again
            log_event(logger, "pin_not_ended", level=logging.ERROR, name=prompt.name, problem=str(error))

    # The end

    async def close(self) -> None:
        """Take no new engines, make durable what is committed (within the drain timeout), free everything.

        With `host.keep_arena` the arenas stay, and with them the locks of sessions whose engines may still use them.
        """
        self._draining = True
        keep_arena = self.config.host.keep_arena
        with suppress(TimeoutError):
            async with asyncio.timeout(self.config.server.drain_timeout_s):
                for namespace in list(self.namespaces.values()):  # ephemeral ones may end meanwhile
                    await namespace.tasks.settle()
                    await namespace.spiller.flush()
        await self._tasks.close()
        for namespace in [*self.namespaces.values(), *self._ending]:
            await namespace.close(keep_arena=keep_arena)
        self.stores.close()
        if not keep_arena:
            sweep_arena_directory(self.config.host.arena_dir)


def _refuse_packs_without_ledger(ledger_path: Path, disk: PackTier) -> None:
    """A start sweeps packs that the ledger does not know: a lost ledger must not mean that all of them are deleted."""
    # An empty file is a new database to SQLite; a ledger has had a page since before its first pack.
    is_empty = ledger_path.exists() and not ledger_path.stat().st_size
    if (is_empty or not ledger_path.exists()) and (num_packs := len(disk.list_packs())):
        raise LedgerError(
            f"{ledger_path} is {'empty' if is_empty else 'missing'}, but {disk.directory} holds {num_packs} packs; put "
            "the ledger back, rebuild it with `kvtier fsck --offline --repair`, or move the packs away to begin anew"
        )
