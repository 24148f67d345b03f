"""Stopping a vLLM at a moment at which the daemon says that it holds something: in mid-store, in mid-load."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import openai
import pytest

from benchmarks.harness.engine import Engine
from benchmarks.harness.process import wait_until
from kvtier._pb.cache_pb2 import SessionStatus
from tests.e2e.harness import HANG_S, Stack, Tokens, is_of
from tests.e2e.traffic import Client

NUM_TRIES = 200
STOPPED_S = 0.1
EVICT_PERIOD_S = 0.2


def session_of(stack: Stack, engine: Engine) -> SessionStatus:
    """Return the engine's session."""
    (found,) = (each for each in stack.status().sessions if is_of(each, engine))
    return found


def standing_credits(stack: Stack, engine: Engine) -> int:
    """Return how many slots an idle engine may write; credits are topped up as stores begin, so more is in use."""
    wait_until(lambda: session_of(stack, engine).num_store_grants > 0, HANG_S, "standing credits")
    return session_of(stack, engine).num_store_grants


def stop_while(stack: Stack, engine: Engine, client: Client, condition: Callable[[SessionStatus], bool]) -> None:
    """Stop (SIGSTOP) an engine that is asked by `client` at a moment at which its session meets a condition."""
    session_id = session_of(stack, engine).session_id

    failures = list[Exception]()

    def meets() -> bool:
        assert not failures, failures
        return any(each.session_id == session_id and condition(each) for each in stack.status().sessions)

    stop = threading.Event()
    # A daemon: its last request is never answered.
    thread = threading.Thread(target=_ask_until, args=(stop, client, failures), daemon=True)
    thread.start()
    try:
        for _ in range(NUM_TRIES):
            wait_until(meets, HANG_S, "the moment")
            os.killpg(engine.pid, signal.SIGSTOP)
            time.sleep(STOPPED_S)
            if meets():
                return
            os.killpg(engine.pid, signal.SIGCONT)
        pytest.fail(f"the moment was gone {NUM_TRIES} times")
    finally:
        stop.set()


def _ask_until(stop: threading.Event, client: Client, failures: list[Exception]) -> None:
    try:
        while not stop.is_set():
            client.ask()
    except (openai.OpenAIError, httpx.HTTPError, TimeoutError) as error:
        failures.append(error)


@contextmanager
def storing_again(stack: Stack, name: str, prompt: Tokens) -> Iterator[None]:
    """Pin a prompt and drop it again and again, so that every request for it stores it."""
    stack.pin(name, prompt, None, "--no-warm")
    stop = threading.Event()

    def evict() -> None:
        with stack.admin() as client:
            while not stop.wait(EVICT_PERIOD_S):
                client.evict(name, force=True)

    thread = threading.Thread(target=evict)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
