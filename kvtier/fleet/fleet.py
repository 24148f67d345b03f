"""This daemon's part in a fleet: it keeps pins and KV the same as in the store, in the background.

Nothing waits for the store but an operator's pin, and that for two seconds at most. While the store is away the daemon
serves as without it, and what was changed meanwhile is merged when it is back.
"""

import asyncio
import hashlib
import logging
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from kvtier.concurrency.tasks import Tasks
from kvtier.config.model import OFF, RemoteConfig
from kvtier.errors import DrainingError, KvtierError, LedgerError, RemoteRefusedError, RemoteStoreError
from kvtier.fleet.garbage import GarbageCollector
from kvtier.fleet.kv_sync import KVSync
from kvtier.fleet.local_pins import LocalPins
from kvtier.fleet.manifest import KV, PROMPTS, Claim
from kvtier.fleet.pin_sync import PinSync
from kvtier.fleet.store_clock import StoreClock
from kvtier.ledger import PromptRow
from kvtier.obs.log import LastProblem, log_event
from kvtier.prompts.book import shared_name
from kvtier.remote.base import RemoteStore
from kvtier.remote.metered_store import MeteredStore
from kvtier.remote.opening import check_conditional_writes, open_pool, open_store
from kvtier.remote.pooled_store import PooledStore
from kvtier.remote.remote_pool import RemotePool
from kvtier.remote.sealed_store import SealedStore
from kvtier.service import Cache
from kvtier.version import __version__

logger = logging.getLogger(__name__)

_LOOK_S = 0.25
"""Between two looks whether a pin was changed here."""
_GONE_S = 1.0
_KV_S = 2.0
_MAX_RETRY_S = 60.0
_CATCH_UP_S = 2.0
_HEARTBEAT_S = 300.0


def open_fleet(cache: Cache, config: RemoteConfig) -> "Fleet | None":
    """Return this daemon's part in the fleet of `remote.url`; None: it has none. RemoteRefusedError: it cannot."""
    if config.url == OFF:
        return None
    pool = open_pool(config.pool) if config.pool != OFF else None
    return Fleet(cache, config, open_store(config.url), pool, host=host_name(cache.config.disk.disk_dir))


def host_name(disk_dir: Path) -> str:
    """Return a name for this daemon that stays the same and that no other one has."""
    machine = b""
    with suppress(OSError):
        machine = Path("/etc/machine-id").read_bytes()
    name = socket.gethostname()
    digest = hashlib.sha256(b"\0".join((machine, name.encode(), str(disk_dir).encode()))).hexdigest()
    plain = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in name)
    return f"{plain[:40]}-{digest[:6]}"


class Fleet:
    """Loop thread only.

    Attributes:
        host: This host's name in the store.
        problem: Why the store cannot be used now; empty: it can.
        looked_unix_s: When what the store has was read last; 0: not yet.
    """

    def __init__(
        self, cache: Cache, config: RemoteConfig, store: RemoteStore, pool: RemotePool | None = None, *, host: str
    ) -> None:
        self.cache, self.config, self.host = cache, config, host
        self.problem, self.looked_unix_s = "", 0.0
        counters = cache.resources.counters
        self.store: RemoteStore = MeteredStore(
            store,
            counters,
            up_bytes_per_s=config.upload_bytes_per_s,
            down_bytes_per_s=config.download_bytes_per_s,
        )
        if pool is not None:
            self.store = PooledStore(self.store, pool, counters, pooled=KV)
        self.store = SealedStore(self.store, cache.resources.ledger.ring, sealed=(KV, PROMPTS))
        self.clock = StoreClock(self.store)
        self._local = local = LocalPins(cache)
        self.pins = PinSync(
            cache.resources,
            local,
            self.store,
            host=host,
            now_unix_s=self.clock.now_unix_s,
            claims_of=self._claims_of,
        )
        self.kv = KVSync(
            cache,
            self.store,
            local,
            self.pins,
            self.clock,
            host=host,
            max_upload_s=config.grace_s / 2,
            parallel=config.parallel,
        )
        self.kv.is_away = lambda: bool(self.problem)
        self.garbage = GarbageCollector(self.store, self.pins, self.clock, grace_s=config.grace_s)
        self._tasks = Tasks()
        self._is_loaded = self._is_checked = False

    def start(self) -> None:
        """Begin, in the background."""
        self.cache.pins.ask_fleet = self._catch_up
        self.cache.pins.watch.ignores = self._is_of_others
        self.cache.readiness.fleet_problem = self._why_not_ready
        self.cache.pins.now_unix_s = self._now_unix_s
        self.cache.expiry.may_end = self._may_end
        self.cache.expiry.confirmed_s = lambda: 0.0  # no step of this host's clock moves the store's
        self._tasks.keep("fleet-pins", self._keep_pins)
        self._tasks.keep("fleet-gone", self._keep_gone)
        self._tasks.keep("fleet-up", partial(self._repeat, _KV_S, self._upload))
        self._tasks.keep("fleet-down", partial(self._repeat, _KV_S, self._restore))
        self._tasks.keep("fleet-garbage", partial(self._repeat, self._collect_s, self._collect))

    async def close(self) -> None:
        """End what runs; what was changed here and has not gone up goes up after the next start."""
        await self._note_gone()  # first: the ledger is closed without waiting for a task that hangs
        await self._tasks.close()
        await self.store.close()

    @property
    def _collect_s(self) -> float:
        return min(3600.0, max(60.0, self.config.grace_s / 8))

    # Pins

    async def _keep_pins(self) -> None:
        due_s = heartbeat_due_s = 0.0
        pause_s = _LOOK_S
        while True:
            now_s = time.monotonic()
            try:
                if now_s >= heartbeat_due_s:
                    await self._prepare()
                    namespaces = [namespace.namespace_id for namespace in self.cache.namespaces.values()]
                    await self.clock.measure(self.host, __version__, namespaces)
                    heartbeat_due_s = now_s + _HEARTBEAT_S
                if now_s >= due_s or self.pins.is_behind:
                    await self.look(lists=now_s >= due_s)
                    due_s = now_s + self.config.poll_s if now_s >= due_s else due_s
                pause_s = _LOOK_S
            except KvtierError as error:
                self._failed(error)
                pause_s = min(_MAX_RETRY_S, 2 * pause_s if pause_s > _LOOK_S else 1.0)
                due_s = 0.0
            except Exception as error:  # it is logged, and this begins again
                self.problem = repr(error)
                raise
            await asyncio.sleep(pause_s)

    async def _keep_gone(self) -> None:
        """Note what has gone, however long the store does not answer, or is left alone meanwhile."""
        while True:
            await asyncio.sleep(_GONE_S)
            await self._note_gone()

    async def _note_gone(self) -> None:
        if self._is_loaded:
            with suppress(LedgerError):  # it is logged where the ledger is used
                await self.pins.gone.note()

    async def look(self, *, lists: bool = True) -> None:
        """Bring pins and store along; raises as `PinSync.look`."""
        await self.pins.look(lists=lists)
        if lists:
            self.looked_unix_s = time.time()
        if self.problem:
            log_event(logger, "remote_reachable", url=self.store.url)
            self.problem = ""

    async def _prepare(self) -> None:
        """Do once what must come before everything else."""
        if not self._is_loaded:
            await self.pins.load()
            self._is_loaded = True
        if not self._is_checked:
            await check_conditional_writes(self.store)
            self._is_checked = True

    def _failed(self, error: KvtierError) -> None:
        if isinstance(error, DrainingError):
            return
        if not self.problem or (isinstance(error, RemoteRefusedError) and self.problem != str(error)):
            level = logging.ERROR if isinstance(error, RemoteRefusedError | LedgerError) else logging.WARNING
            log_event(logger, "remote_unreachable", level=level, problem=str(error))
        self.problem = str(error)

    async def _catch_up(self) -> None:
        """Before a pin of an operator: names and quotas are the fleet's. A store that is away does not hold it up."""
        if self.problem or not self._is_checked:
            return
        with suppress(TimeoutError, RemoteStoreError):
            async with asyncio.timeout(_CATCH_UP_S):
                await self.look()

    def _claims_of(self, name: str) -> tuple[Claim, ...]:
        prompt = self._local.wanted(name)
        return self.kv.claims_of(prompt) if prompt is not None else ()

    def _now_unix_s(self) -> float:
        """Return the store's time; until it is known this host's, without a step ahead that may be taken back."""
        return self.clock.now_unix_s() if self.clock.is_measured else self.cache.pins.host_clock.now_unix_s()

    def _may_end(self, prompt: PromptRow) -> bool:
        """A shared pin ends on all hosts, so this host's clock does not end it: the store's must be known."""
        return self.clock.is_measured or shared_name(prompt) is None

    # Readiness

    def _is_of_others(self, prompt: PromptRow) -> bool:
        """Return whether a pin is another host's, and none of the engines attached here serves it."""
        manifest, sessions = self.pins.manifest(prompt.name), self.cache.live_sessions
        if manifest is None or manifest.changed_by == self.host or not sessions:
            return False
        return not any(session.serves(prompt) for session in sessions)

    def _why_not_ready(self) -> str:
        """Say that this host does not know the fleet's pins; one that has known them once serves without the store."""
        if self.pins.has_looked or self.pins.manifests():
            return ""
        return f"the pins of {self.store.url} are not known yet{': ' if self.problem else ''}{self.problem}"

    # KV and garbage

    async def _upload(self) -> bool:
        return await self.kv.upload_next()

    async def _restore(self) -> bool:
        await self.kv.claim_wanted()
        return await self.kv.restore_next()

    async def _collect(self) -> bool:
        await self.garbage.collect_if_due()
        return False

    async def _repeat(self, pause_s: float, work: Callable[[], Awaitable[bool]]) -> None:
        """Work while there is some, else pause; while the store is away wait for the pins to find it again."""
        wait_s, last = 0.0, LastProblem()
        while True:
            await asyncio.sleep(wait_s)
            wait_s = pause_s
            if self.problem or not self._is_checked or not self.pins.has_looked:
                wait_s = 1.0
                continue
            try:
                wait_s = 0.0 if await work() else pause_s
                last.becomes("")
            except KvtierError as error:
                if last.becomes(str(error)):
                    log_event(logger, "remote_work_failed", level=logging.WARNING, problem=str(error))
                wait_s = max(pause_s, 10.0)
