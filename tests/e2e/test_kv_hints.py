"""KV hints through vLLM's own engine API, which is the only way to it: pinned, demoted, prefetched."""

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness.engine import EngineOptions
from benchmarks.harness.model_specs import TINY
from benchmarks.harness.models import cached_model
from benchmarks.harness.process import wait_until
from kvtier._pb.cache_pb2 import PromptStatus
from tests.e2e.harness import HANG_S, Stack, running_stack, tokens

PREFIX_TOKENS = 320
NUM_CHUNKS = PREFIX_TOKENS // 32
PROGRAM = Path(__file__).with_name("hinting_engine.py")


class HintedEngine:
    """An engine in a process of its own that gets hints by its stdin."""

    def __init__(self, process: "subprocess.Popen[str]", log_path: Path) -> None:
        self._process = process
        self.log_path = log_path
        self._await_line("ready")

    def hint(self, action_type: str, **payload: Any) -> None:
        """Send a request with a hint; return when it is answered."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"action_type": action_type, "payload": payload}) + "\n")
        self._process.stdin.flush()
        self._await_line("done")

    def _await_line(self, expected: str) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip() == expected:
                return
        raise AssertionError("the engine has ended")


@contextmanager
def hinted_engine(stack: Stack) -> Iterator[HintedEngine]:
    """Run it."""
    config = stack.home / "hinted.json"
    config.write_text(
        json.dumps(
            {
                "model": stack.options.model,
                "prompt": tokens(1, PREFIX_TOKENS + 7),
                "kv_transfer_config": stack.options.kv_transfer_config(0),
            }
        )
    )
    log_path = stack.home / "hinted.log"
    with log_path.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            process_group=0,
            env=os.environ | stack.options.env() | {"VLLM_LOGGING_LEVEL": "DEBUG"},
        )
        try:
            yield HintedEngine(process, log_path)
        finally:
            # More than a failure shows of each log: where all threads of a start that hangs stand.
            print("\n".join(log_path.read_text(errors="replace").splitlines()[-300:]))
            try:
                process.communicate(timeout=30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # its EngineCore would keep the pipe open
                process.communicate()


def test_hints_of_an_orchestrator_are_carried_out() -> None:
    options = EngineOptions(model=str(cached_model("tiny", TINY)))
    with running_stack(options) as stack, hinted_engine(stack) as engine, stack.admin() as client:

        def has_credits() -> bool:
            return any(row.num_store_grants > NUM_CHUNKS for row in stack.status().sessions)

        def num_in_host() -> int:
            return stack.status().host.num_chunks

        def is_pinned() -> bool:
            # The daemon asks for the tokens, and vLLM sends them in its next step: the next request brings one.
            engine.hint("kv.pin", end=PREFIX_TOKENS, duration=600, priority=3)
            return any(each.state == PromptStatus.DURABLE for each in client.list())

        wait_until(has_credits, HANG_S, "store credits")
        wait_until(is_pinned, HANG_S, "the pin to be durable")
        (pin,) = client.list()
        assert (pin.num_tokens, pin.priority) == (PREFIX_TOKENS, 3)
        engine.hint("kv.demote", end=PREFIX_TOKENS)
        wait_until(lambda: client.get(pin.name).priority == -100, HANG_S, "the pin to be the least important")
        stack.cli("evict", pin.name, "--tier", "host")
        assert num_in_host() == 0
        engine.hint("kv.prefetch")
        wait_until(lambda: num_in_host() == NUM_CHUNKS, HANG_S, "the prefetch")
        engine.hint("kv.share")
        engine.hint("kv.pin", session_id="s")
        log = engine.log_path.read_text().splitlines()
        found = [line.partition("KV hint ")[2].split()[:2] for line in log if "KV hint " in line]
        assert [each for each, _ in itertools.groupby(found)] == [
            ["action=pin", "outcome=accepted"],
            ["action=demote", "outcome=accepted"],
            ["action=prefetch", "outcome=accepted"],
            ["action=other", "outcome=rejected"],
            ["action=pin", "outcome=rejected"],
        ]
