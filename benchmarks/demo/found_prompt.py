"""Act two: nothing is pinned by hand, and kvtier finds the system prompt that requests share."""

from collections.abc import Callable
from contextlib import suppress

from benchmarks.demo.named_prompt import PROMPT_NAME
from benchmarks.demo.stage import DemoError, Stage, describe
from benchmarks.demo.story import Act
from benchmarks.harness.process import wait_until
from kvtier._pb.cache_pb2 import PromptStatus

VARIANT = 1
TITLE = "Nothing pinned by hand"
MAX_REQUESTS = 12
PAUSE_S = 2.0
"""Between two requests: the daemon chooses once a second, and pins with the request that follows."""


def play(stage: Stage) -> Act:
    """Ask until kvtier has pinned the prompt by itself; then do to it what act one did to the other.

    Raises:
        DemoError: A step failed, or the prompt was not pinned.
    """
    stage.title(f"Act two. {TITLE}: users chat, and no one names their system prompt")
    stage.cli("unpin", PROMPT_NAME)
    stage.cli("evict", PROMPT_NAME)
    stage.say(f"request 1 under another system prompt: {describe(stage.ask_cold(VARIANT))}")
    num_requests = _ask_until(stage, lambda: bool(stage.pins()), 1, "kvtier has pinned no prompt by itself")
    pin = max(stage.pins(), key=lambda each: each.num_tokens)
    stage.say(f"after {num_requests} requests kvtier has pinned it by itself: {pin.name}, {pin.num_tokens} tokens")
    stage.cli("advise")
    num_stored = _ask_until(stage, lambda: _is_durable(stage), num_requests, f"{pin.name} is not durable")
    stage.say(f"request {num_stored} had its chunks stored: they are durable now")
    stage.cli("list")
    act = Act(title=f"{TITLE}: found after {num_requests} requests", variant=VARIANT, num_tokens=pin.num_tokens)
    stage.flood(act)
    stage.restart_vllm(act)
    stage.kill_daemon(act)
    return act


def _ask_until(stage: Stage, is_done: Callable[[], bool], num_before: int, otherwise: str) -> int:
    """Send one request after the other until a condition holds; return the number of the last one.

    Raises:
        DemoError: It does not hold after MAX_REQUESTS.
    """
    for number in range(num_before + 1, num_before + MAX_REQUESTS + 1):
        stage.say(f"request {number}, another question: {describe(stage.ask(VARIANT))}")
        with suppress(TimeoutError):
            wait_until(is_done, PAUSE_S, otherwise)
            return number
    advice = stage.cli_text("advise")
    raise DemoError(f"after {number} requests under one system prompt {otherwise}. kvtier advise says:\n{advice}")


def _is_durable(stage: Stage) -> bool:
    return all(pin.state == PromptStatus.DURABLE for pin in stage.pins())
