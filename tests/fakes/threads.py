"""A system that allows no more threads, as with a limit of processes (`ulimit -u`, a cgroup) that is reached."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def without_new_threads(monkeypatch: pytest.MonkeyPatch, *, named: str = "kvtier-") -> Iterator[None]:
    """Have no thread start during the block whose name begins so."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith(named):
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        yield
