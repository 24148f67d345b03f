"""A daemon in a process of its own whose event loop records its longest turn."""

import asyncio
import multiprocessing
import selectors
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

from kvtier.collector import freeze_index
from kvtier.config import DaemonConfig
from kvtier.rpc.server import serve

TIMEOUT_S = 120.0


@dataclass(frozen=True)
class LoopTurn:
    """The longest one, in seconds."""

    wall_s: float = 0.0
    cpu_s: float = 0.0


class TurnTimer(selectors.DefaultSelector):
    """A loop's selector that measures how long the loop was away from it."""

    def __init__(self) -> None:
        super().__init__()
        self._began_s, self._began_cpu_s = time.perf_counter(), time.thread_time()
        self.longest_wall_s = self.longest_cpu_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """See selectors."""
        self.longest_wall_s = max(self.longest_wall_s, time.perf_counter() - self._began_s)
        self.longest_cpu_s = max(self.longest_cpu_s, time.thread_time() - self._began_cpu_s)
        try:
            return super().select(timeout)
        finally:
            self._began_s, self._began_cpu_s = time.perf_counter(), time.thread_time()

    def take(self) -> LoopTurn:
        """Return the longest turn since the last call. Any thread."""
        longest = LoopTurn(self.longest_wall_s, self.longest_cpu_s)
        self.longest_wall_s = self.longest_cpu_s = 0.0
        return longest


def run_daemon(config: DaemonConfig, pipe: Connection) -> None:
    """Serve until the pipe sends False; answer True with the longest turn since the last answer."""
    timer = TurnTimer()

    async def served() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()

        def answer() -> None:
            while pipe.recv():
                pipe.send(timer.take())
            loop.call_soon_threadsafe(stop.set)

        def ready() -> None:
            freeze_index()
            pipe.send(timer.take())
            threading.Thread(target=answer, daemon=True).start()

        await serve(config, stop=stop, ready=ready)

    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(timer)) as runner:
        runner.run(served())


@contextmanager
def daemon(config: DaemonConfig) -> Iterator[Callable[[], LoopTurn]]:
    """Run a daemon; yield a function that returns its longest turn since it was last called."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_daemon, args=(config, theirs))
    process.start()
    try:
        if not ours.poll(TIMEOUT_S):
            raise TimeoutError(f"the daemon did not start within {TIMEOUT_S:g} s")
        ours.recv()

        def longest() -> LoopTurn:
            ours.send(True)
            turn: LoopTurn = ours.recv()
            return turn

        yield longest
        ours.send(False)
        process.join(TIMEOUT_S)
    finally:
        process.kill()
        process.join()
