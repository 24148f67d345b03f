"""Stopping a tier's call in its worker thread, or making it fail, while a test goes on."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

_DEADLINE_S = 60.0  # longer than a test waits for anything while it holds a call up


class Gate:
    """Calls of one method wait, before or after their work, until the gate is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._opened = threading.Event()

    def wait(self) -> None:
        """Worker thread: say that a call is here, and wait."""
        self.reached.set()
        assert self._opened.wait(_DEADLINE_S)

    def open(self) -> None:
        """Let calls through, now and later."""
        self._opened.set()


@contextmanager
def gated(monkeypatch: pytest.MonkeyPatch, owner: type, method: str) -> Iterator[Gate]:
    """Hold every call of a method before its work; the gate opens at the end at the latest."""
    gate, original = Gate(), getattr(owner, method)

    def held(*args: Any, **kwargs: Any) -> Any:
        gate.wait()
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, method, held)
    try:
        yield gate
    finally:
        gate.open()


@contextmanager
def begun(monkeypatch: pytest.MonkeyPatch, owner: type, method: str) -> Iterator[asyncio.Event]:
    """Yield what is set once a method of the loop thread, or a coroutine of it, has run to where it first waits."""
    event, original = asyncio.Event(), getattr(owner, method)

    def call(*args: Any, **kwargs: Any) -> Any:
        asyncio.get_running_loop().call_soon(lambda: asyncio.get_running_loop().call_soon(event.set))
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, method, call)
        yield event


def failing(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str, error: Callable[[], Exception], *, times: int
) -> None:
    """Make the first `times` calls of a method raise."""
    original, left = getattr(owner, method), [None] * times

    def call(*args: Any, **kwargs: Any) -> Any:
        if left:
            left.pop()
            raise error()
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, method, call)
