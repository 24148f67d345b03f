"""What both acts of the demo share: a daemon, one vLLM after another, and what is done to them."""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from benchmarks.demo.story import BLOCK_TOKENS, SLACK_TOKENS, Act, DemoCase
from benchmarks.harness.daemon import Daemon, run_cli
from benchmarks.harness.engine import Engine, EngineOptions
from benchmarks.harness.prompts import system_prompt
from benchmarks.measuring.chat_requests import Answer, ask, greet, question
from kvtier._pb.cache_pb2 import PromptStatus
from kvtier.client.admin import AdminClient

MAX_MODEL_LEN = 4096
POOL_BLOCKS = 288  # a pin may have half of them, and a prompt of the flood needs as many beside it
FLOOD_RATIO = 1.2
ANSWER_TIMEOUT_S = 600.0
CLI_TIMEOUT_S = 600.0
FIRST_UNPINNED_VARIANT = 2
"""System prompts from this one on are asked once each; those before it are the acts'."""


class DemoError(Exception):
    """The demo cannot continue; the message says why."""


class Stage:
    """The daemon and the vLLM of the moment.

    Attributes:
        engine: The vLLM that runs, while `running` is entered.
        cold: Answers to system prompts that were neither pinned nor seen before.
    """

    engine: Engine

    def __init__(self, model: str, dtype: str, home: Path, console: Console) -> None:
        """Prepare; nothing runs yet."""
        self.console = console
        self.home = home
        self.daemon = Daemon(home, host_bytes="2GiB")
        self.options = EngineOptions(
            model=model,
            max_model_len=MAX_MODEL_LEN,
            block_size=BLOCK_TOKENS,
            pool_blocks=POOL_BLOCKS,
            max_batched_tokens=MAX_MODEL_LEN,
            dtype=dtype,
            kvtier_socket=self.daemon.socket,
            extra_env={"HF_HUB_OFFLINE": "1" if Path(model).is_dir() else os.environ.get("HF_HUB_OFFLINE", "0")},
        )
        self.cold: list[Answer] = []
        self._engines = ExitStack()  # has one at most
        self._engine_numbers, self._questions = count(1), count()
        self._unseen_variants = count(FIRST_UNPINNED_VARIANT)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Start daemon and vLLM; end both."""
        with self.daemon, self._engines:
            self.say(f"kvtier-daemon started in {self.daemon.ready_s:.2f} s")
            self._start_vllm()
            yield

    def _start_vllm(self) -> None:
        """Run a vllm serve that has answered one small request."""
        self.say("starting vllm serve ...")
        log_path = self.home / f"vllm-{next(self._engine_numbers)}.log"
        self.engine = self._engines.enter_context(Engine(self.options, log_path))
        self.say(f"vllm serve started in {self.engine.ready_s:.0f} s")
        greet(self.engine)

    # What a prompt has to survive

    def flood(self, act: Act) -> None:
        """Send other long prompts until vLLM's whole KV cache has been overwritten; the pin stays in it."""
        pool_tokens = POOL_BLOCKS * BLOCK_TOKENS
        sent = 0
        while sent < pool_tokens * FLOOD_RATIO:
            sent += self.ask(next(self._unseen_variants)).prompt_tokens
        self.say(f"sent {sent} tokens of other prompts through vLLM's KV cache of {pool_tokens} tokens")
        self.record(act, "after a flood of other prompts", "device")

    def restart_vllm(self, act: Act) -> None:
        """End vLLM and start it again."""
        self._engines.close()
        self._start_vllm()
        self.record(act, "vLLM restarted", "host")

    def kill_daemon(self, act: Act) -> None:
        """End vLLM, kill the daemon, and start both again."""
        self._engines.close()
        self.say("kill -9 kvtier-daemon, then start it again")
        self.daemon.kill()
        self.daemon.start()
        self._start_vllm()
        self.record(act, "daemon killed (-9), both restarted", "host")

    # Questions

    def record(self, act: Act, name: str, expected: str) -> None:
        """Ask the act's assistant a new question and record where its prompt came from."""
        answer = self.ask(act.variant)
        self.say(f"{name}: {describe(answer)}")
        act.cases.append(DemoCase(name=name, expected=expected, answer=answer))

    def measure_cold(self) -> None:
        """Ask with an unpinned system prompt of the same length that vLLM has never seen."""
        answer = self.ask_cold(next(self._unseen_variants))
        self.say(f"a prompt of the same kind, not pinned: {describe(answer)}")

    def ask_cold(self, variant: int) -> Answer:
        """Ask with a system prompt that was never seen.

        Raises:
            DemoError: It was.
        """
        answer = self.ask(variant)
        if answer.cached_tokens > SLACK_TOKENS:
            raise DemoError(f"the cold prompt was not cold: {answer.cached_tokens} tokens from {answer.served_by}")
        self.cold.append(answer)
        return answer

    def ask(self, variant: int) -> Answer:
        """Ask a question that is asked once only; any model may serve it, on any CPU."""
        messages = [
            {"role": "system", "content": system_prompt(variant)},
            {"role": "user", "content": question(next(self._questions))},
        ]
        return ask(self.engine, [], messages, timeout_s=ANSWER_TIMEOUT_S)

    # kvtier

    def cli(self, *args: str) -> None:
        """Run the `kvtier` CLI as a user would, and show what it prints.

        Raises:
            DemoError: It failed.
        """
        shown = " ".join(args).replace(f"{self.home}/", "")
        self.console.print(f"\n[bold]$ kvtier {escape(shown)}", highlight=False)
        self.console.print(escape(self.cli_text(*args)), highlight=False)

    def cli_text(self, *args: str) -> str:
        """Run the `kvtier` CLI and return what it prints.

        Raises:
            DemoError: It failed.
        """
        done = run_cli(self.daemon.socket, *args, timeout_s=CLI_TIMEOUT_S)
        text = (done.stdout + done.stderr).strip("\n")
        if done.returncode:
            raise DemoError(f"kvtier {args[0]} ended with status {done.returncode}: {text}")
        return text

    def pins(self) -> list[PromptStatus]:
        """Return the pinned prompts."""
        with AdminClient(self.daemon.socket) as client:
            return [prompt for prompt in client.list() if prompt.pinned]

    def title(self, text: str) -> None:
        """Print the title of an act."""
        self.console.print(f"\n[bold cyan]{escape(text)}", highlight=False)

    def say(self, text: str) -> None:
        """Print a line of progress."""
        self.console.print(f"[dim]{time.strftime('%H:%M:%S')}[/dim] {escape(text)}", highlight=False)


def describe(answer: Answer) -> str:
    """Return where an answer's prompt came from, and when its first token came."""
    source = "computed" if answer.served_by == "computed" else f"from {answer.served_by}"
    return f"{answer.cached_tokens} of {answer.prompt_tokens} tokens {source}, TTFT {answer.ttft_s:.2f} s"
