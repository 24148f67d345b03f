"""A whole service that is driven step by step: held up, refused, stopped and killed, with engines beside it.

Sessions, arenas, packs and ledger are real; gRPC and vLLM are left out. A death is a copy of what the kernel has: the
next daemon opens the copy, and engines that survive go on in its files.
"""

import asyncio
import logging
import shutil
import tempfile
import threading
import types
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import kvtier.concurrency.turns
import kvtier.core.chunks.acquire
import kvtier.obs.clock_steps
import kvtier.prompts.expiry
import kvtier.prompts.replacements
import kvtier.service.arenas
import kvtier.service.cache
import kvtier.sessions.session
import kvtier.tiering.write_back
import kvtier.upkeep.arena_recovery
from kvtier.config import DaemonConfig
from kvtier.disk import disk_health
from kvtier.errors import KvtierError
from kvtier.service.cache import Cache
from kvtier.tiering.namespace import Namespace
from tests.fakes.gated_stores import Faults, GatedLedger, GatedTier
from tests.fakes.in_process_engine import InProcessEngine
from tests.fakes.rig import eventually

T = TypeVar("T")
SHM = Path("/dev/shm")
STALL_S = 0.004
"""How long a step that is held up lets others act."""


class Problems(logging.Handler):
    """Collects what failed where no one waits for it: in tasks and callbacks of the loop."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[BaseException | str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        if record.exc_info and record.exc_info[1]:
            self.found.append(record.exc_info[1])

    def in_callback(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Exception handler of the loop."""
        self.found.append(context.get("exception") or context["message"])


class Clock:
    """Wall time, set by hand."""

    def __init__(self) -> None:
        self.unix_s = 1e9

    def time(self) -> float:
        """See time.time."""
        return self.unix_s


class LivingService:
    """One daemon after the other, and their engines.

    Args:
        config_in: Makes the configuration of a daemon whose files are in a folder.
        max_arenas: As many have descriptors.

    Attributes:
        cache: The daemon that lives now.
        faults: What is held and refused of its disk and ledger.
        engines: Attached now.
        orphans: Engines whose session is over and whose processes hold its lock.
        doing: What operators wait for, and whose prompt it is about.
        num_evicting: How many of these drop chunks.
        clock: The daemon's wall clock.
        problems: What failed unseen.
    """

    cache: Cache
    faults: Faults
    config: DaemonConfig

    def __init__(self, config_in: Callable[[Path], DaemonConfig], max_arenas: int = 100) -> None:
        self._config_in, self._max_arenas = config_in, max_arenas
        self._loop = asyncio.new_event_loop()
        self._stack = ExitStack()
        self._folder = Path(tempfile.mkdtemp(prefix="kvtier-test-", dir=SHM if SHM.is_dir() else None))
        self.num_lives = self.num_evicting = 0
        self.problems, self.clock = Problems(), Clock()
        self.engines: list[InProcessEngine] = []
        self.orphans: list[InProcessEngine] = []
        self.doing: dict[asyncio.Task[None], str | None] = {}
        self._loop.set_exception_handler(self.problems.in_callback)
        logging.getLogger("kvtier").addHandler(self.problems)
        self._patch()
        self.open(self._new_config())

    def close(self) -> None:
        """Remove everything; the daemon was stopped before, if nothing went wrong."""
        for engine in [*self.engines, *self.orphans]:
            engine.end_processes()
        logging.getLogger("kvtier").removeHandler(self.problems)
        self._stack.close()
        self._loop.close()
        shutil.rmtree(self._folder)

    def _new_config(self) -> DaemonConfig:
        folder = self._folder / str(self.num_lives)
        folder.mkdir(exist_ok=True)
        return self._config_in(folder)

    def _patch(self) -> None:
        """No loop of the service turns by itself; what waits for a while waits shortly."""
        now = self.clock.time
        clocks = types.SimpleNamespace(time=now, clock_gettime=lambda _: now(), CLOCK_BOOTTIME=0)
        for module, name, value in (
            (kvtier.prompts.expiry, "SLOW_POLL_S", 1e6),
            (kvtier.prompts.replacements, "SLOW_POLL_S", 1e6),
            (kvtier.service.cache, "_CAPACITY_POLL_S", 1e6),
            (kvtier.service.arenas, "max_open_arenas", lambda: self._max_arenas),
            (kvtier.service.cache, "time", types.SimpleNamespace(time=self.clock.time)),
            (kvtier.obs.clock_steps, "time", clocks),
            (kvtier.prompts.expiry, "time", clocks),
            (kvtier.sessions.session, "POLL_S", 0.001),
            (kvtier.upkeep.arena_recovery, "POLL_S", 0.001),
            (kvtier.tiering.write_back, "_RETRY_S", 0.001),
            (kvtier.concurrency.turns, "SLICE_KEYS", 2),
            (kvtier.core.chunks.acquire, "SLICE_CHUNKS", 2),
            (disk_health, "FIRST_PROBE_S", 0.001),
            (disk_health, "LAST_PROBE_S", 0.002),
            (kvtier.service.cache, "_COPIES_S", 0.0),  # engines here hold their locks for as long as they live
        ):
            self._stack.enter_context(mock.patch.object(module, name, value))

    def open(self, config: DaemonConfig) -> None:
        """Start a daemon."""
        self.config, self.faults = config, Faults()
        tier = partial(GatedTier, faults=self.faults)
        with (
            mock.patch.object(kvtier.service.cache, "PackTier", tier),
            mock.patch.object(kvtier.service.cache, "Ledger", GatedLedger.under(self.faults)),
        ):
            self.cache = self.run(Cache.open(config))
        self.num_lives += 1
        for engine in self.orphans:
            engine.asked.clear()  # a reader of adopted rows sees by their generation when it loses them
        self.go_on()

    # Time

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run something while the service lives on."""
        return self._loop.run_until_complete(coroutine)

    def go_on(self) -> None:
        """Let the service work: to the end of all that was begun, or until it is held up."""

        async def work() -> None:
            if self.faults.is_calm:
                await eventually(self.is_quiet)
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(STALL_S):
                    while not self.is_quiet():  # noqa: ASYNC110
                        await asyncio.sleep(0)

        self.run(work())
        while self.faults.is_calm and not self.is_quiet():  # the loop's last turn may have begun something
            self.run(work())

    def is_quiet(self) -> bool:
        """Nothing is going on but what goes on for ever, or waits for an engine's processes."""
        cache = self.cache
        going_on = [task.get_name() for task in cache._tasks._tasks]
        waiting = {
            "expiry",
            "replacements",
            "capacity",
            "preallocation",
            "probe",
            "pin-watch",
            "loop-lag",
            "ledger-upkeep",
            "auto-pins",
            "bindings",
            "usage",
        }
        waiting |= {"auto-pins", "recovery"} if self.orphans else {"auto-pins"}
        return (
            not self.doing
            and not cache.registry.ending
            and (cache._verified.is_set())
            and all(name in waiting or (name.startswith("quarantine") and self.orphans) for name in going_on)
            and not cache.resources.disk_health.breaker_open_reason
            and not cache.resources.ledger.is_behind  # or its thread uses the connection that tests read with
            and not cache.resources.ledger_thread.is_busy
            and all(_is_quiet(namespace) for namespace in cache.namespaces.values())
        )

    def do(
        self,
        work: Awaitable[object],
        about: str | None = None,
        *,
        refused: Callable[[], None] = lambda: None,
        evicts: bool = False,
    ) -> None:
        """Have an operator or engine do something, now and then in vain."""

        async def done() -> None:
            self.num_evicting += evicts
            try:
                await work
            except KvtierError:
                refused()
            except asyncio.CancelledError:
                pass  # it may happen yet
            finally:
                self.num_evicting -= evicts

        async def started() -> None:
            task = asyncio.create_task(done())
            self.doing[task] = about
            task.add_done_callback(self._ended)
            await asyncio.sleep(0)

        self.run(started())
        self.go_on()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.doing.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.problems.found.append(error)

    def be_calm(self) -> None:
        """Whatever is held or refused is so no more; everything that was begun ends."""
        self.faults.end()
        self.go_on()

    def sync(self, call: Callable[[], object]) -> None:
        """An engine's message: the service deals with it at once."""

        async def called() -> None:
            call()

        self.run(called())
        self.go_on()

    def stop(self) -> None:
        """SIGTERM: streams end, then the daemon drains; what is held up goes on meanwhile."""

        async def stopped() -> None:
            for engine in self.engines:
                self.cache.end(engine.session)
            callers = list(self.doing)
            for task in callers:  # as gRPC does with calls that go on
                task.cancel()
            # Not on the loop: the end of a stop waits for threads and blocks it.
            ending = threading.Timer(STALL_S, self.faults.end)
            ending.start()
            await asyncio.gather(self.cache.close(), *callers)
            ending.join()

        self.run(stopped())
        self.orphans += self.engines
        self.engines = []

    def die(self, *, processes_end: bool) -> None:
        """kill -9: the next daemon finds what the kernel had at this moment, and engines that go on."""
        self.faults.freeze()
        with suppress(RuntimeError):
            if not self.faults.held & {"commit", "committed", "drop", "dropped"}:
                self.cache.resources.ledger_thread.submit(int).result(10)
        folder = self._folder / str(self.num_lives)
        shutil.copytree(self.config.disk.disk_dir.parent, folder, ignore=shutil.ignore_patterns("*-shm", "*.sock"))
        old, old_doing = self.cache, list(self.doing)
        self.doing, self.num_evicting = {}, 0
        self.orphans += self.engines
        self.engines = []
        for engine in self.orphans:
            files = [folder / "arena" / path.name for path in (engine.lock.path, engine.arena.path)]
            survives = not processes_end and all(path.exists() for path in files)
            engine.move(folder / "arena") if survives else engine.end_processes()
        self.orphans = [engine for engine in self.orphans if engine.lock._fd >= 0]
        self._bury(old, old_doing)
        self.open(self._new_config())

    def _bury(self, old: Cache, doing: Sequence[asyncio.Task[None]]) -> None:
        """Have the previous daemon's threads and tasks end, in a folder that is not used any longer."""

        async def buried() -> None:
            for session in old.sessions:
                session.ended = True  # it says nothing any longer
            self.faults.end()
            for task in doing:
                task.cancel()
            await asyncio.gather(*doing, return_exceptions=True)
            await old.close()

        self.run(buried())
        self.num_evicting = 0
        shutil.rmtree(old.config.disk.disk_dir.parent)


def _is_quiet(namespace: Namespace) -> bool:
    promoter, write_back = namespace.promoter, namespace.write_back
    return not (
        write_back.queue.num_bytes
        or promoter._batches
        or promoter._queue
        or promoter._planner.prefetch
        or promoter._queue._waiters
        or namespace.tasks._tasks
        or any(chunk.writing_back for chunk in namespace.table)
    )
