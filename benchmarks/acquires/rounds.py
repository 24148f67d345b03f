"""Starts the processes of engines that run at the same time."""

import contextlib
import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection

from benchmarks.acquires.engines import TIMEOUT_S, Load, be_engine


@contextlib.contextmanager
def engine_process(load: Load, number: int) -> Iterator[Connection]:
    """Run an engine in a process of its own; it says when it is attached, runs when asked, and sends what came."""
    context = multiprocessing.get_context("spawn")  # gRPC does not survive a fork
    pipe, other = context.Pipe()
    process = context.Process(target=be_engine, args=(load, number, other), daemon=True)
    process.start()
    try:
        yield pipe
        pipe.send(None)
    finally:
        process.join(TIMEOUT_S)
