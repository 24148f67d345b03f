"""The steps of the demo: what happens to the pinned prompt, and where vLLM finds it afterwards."""

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from benchmarks.harness.daemon import Daemon, run_cli
from benchmarks.harness.engine import Engine, EngineOptions
from benchmarks.harness.prompts import QUESTIONS, system_prompt
from benchmarks.measuring.chat_requests import Answer, Messages, ask, forget_device_cache, greet

PROMPT_NAME = "harbour-support"
PINNED_VARIANT = 0
MAX_MODEL_LEN = 4096
POOL_BLOCKS = 288  # a pin may have half of them, and a prompt of the flood needs as many beside it
BLOCK_TOKENS = 32
FLOOD_RATIO = 1.2
ANSWER_TIMEOUT_S = 600.0
# What may be missing at the end of a restored prompt: less than a chunk, and the template's last tokens.
SLACK_TOKENS = 2 * BLOCK_TOKENS


@dataclass(frozen=True, kw_only=True)
class DemoCase:
    """A row of the table: what happened before the question, and which tier must supply the prompt."""

    name: str
    expected: str
    answer: Answer


class DemoError(Exception):
    """The demo cannot continue; the message says why."""


class Demo:
    """The story, step by step."""

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
        self.cases: list[DemoCase] = []
        self.cold: list[Answer] = []
        self._num_engines = 0
        self._next_variant = PINNED_VARIANT + 1

    def run(self) -> None:
        """Run all cases.

        Raises:
            DemoError: A step failed.
        """
        with self.daemon:
            self.say(f"kvtier-daemon started in {self.daemon.ready_s:.2f} s")
            with self.engine() as engine:
                self.measure_cold(engine)
                self.pin(engine)
                self.record(engine, "right after kvtier pin", "device", QUESTIONS[0])
                self.flood(engine)
                self.record(engine, "after a flood of other prompts", "device", QUESTIONS[1])
                forget_device_cache(engine)
                self.record(engine, "vLLM's prefix cache emptied", "host", QUESTIONS[5])
            with self.engine() as engine:
                self.record(engine, "vLLM restarted", "host", QUESTIONS[2])
                self.measure_cold(engine)
            self.say("kill -9 kvtier-daemon, then start it again")
            self.daemon.kill()
            self.daemon.start()
            with self.engine() as engine:
                self.record(engine, "daemon killed (-9), both restarted", "host", QUESTIONS[3])
                self.measure_cold(engine)
                self.say("evicting the prompt from host memory and from vLLM: only the disk has it now")
                self.leave_only_on_disk(engine)
                self.record(engine, "only on disk", "disk", QUESTIONS[4])

    @contextmanager
    def engine(self) -> Iterator[Engine]:
        """Run a vllm serve that has answered one small request."""
        self._num_engines += 1
        self.say("starting vllm serve ...")
        with Engine(self.options, self.home / f"vllm-{self._num_engines}.log") as engine:
            self.say(f"vllm serve started in {engine.ready_s:.0f} s")
            greet(engine)
            yield engine

    def measure_cold(self, engine: Engine) -> None:
        """Ask with an unpinned system prompt of the same length that vLLM has never seen."""
        answer = self.ask(engine, self.unseen(QUESTIONS[4]))
        self.say(f"a prompt of the same kind, not pinned: {answer.prompt_tokens} tokens, TTFT {answer.ttft_s:.2f} s")
        if answer.cached_tokens > SLACK_TOKENS:
            raise DemoError(f"the cold prompt was not cold: {answer.cached_tokens} tokens from {answer.served_by}")
        self.cold.append(answer)

    def pin(self, engine: Engine) -> None:
        """Pin the system prompt with the CLI."""
        path = self.home / "system.md"
        path.write_text(system_prompt(PINNED_VARIANT))
        self.console.print(f"\n[bold]$ kvtier pin {PROMPT_NAME} --system system.md --url {engine.url}")
        done = run_cli(
            self.daemon.socket, "pin", PROMPT_NAME, "--system", str(path), "--url", engine.url, timeout_s=600
        )
        self.console.print(escape((done.stdout + done.stderr).rstrip()), highlight=False)
        if done.returncode:
            raise DemoError(f"kvtier pin ended with status {done.returncode}")

    def record(self, engine: Engine, name: str, expected: str, question: str) -> None:
        """Ask the pinned assistant a new question and record where its prompt came from."""
        answer = self.ask(engine, conversation(PINNED_VARIANT, question))
        tokens = f"{answer.cached_tokens} of {answer.prompt_tokens} tokens from {answer.served_by}"
        self.say(f"{name}: {tokens}, TTFT {answer.ttft_s:.2f} s")
        self.cases.append(DemoCase(name=name, expected=expected, answer=answer))

    def flood(self, engine: Engine) -> None:
        """Send other long prompts until vLLM's whole KV cache has been overwritten."""
        wanted = int(POOL_BLOCKS * BLOCK_TOKENS * FLOOD_RATIO)
        sent = 0
        while sent < wanted:
            sent += self.ask(engine, self.unseen(QUESTIONS[5])).prompt_tokens
        self.say(f"sent {sent} tokens of other prompts through vLLM's KV cache of {POOL_BLOCKS * BLOCK_TOKENS} tokens")

    def leave_only_on_disk(self, engine: Engine) -> None:
        """Drop the prompt from host memory with the CLI, and everything from vLLM's prefix cache."""
        done = run_cli(self.daemon.socket, "evict", PROMPT_NAME, "--tier", "host", "--force", timeout_s=60)
        if done.returncode:
            raise DemoError(f"kvtier evict ended with status {done.returncode}: {done.stderr}")
        forget_device_cache(engine)

    def ask(self, engine: Engine, messages: Messages) -> Answer:
        """Send a request; any model may serve it, on any CPU."""
        return ask(engine, [], messages, timeout_s=ANSWER_TIMEOUT_S)

    def unseen(self, question: str) -> Messages:
        """Return a conversation whose system prompt differs from all before."""
        self._next_variant += 1
        return conversation(self._next_variant, question)

    def say(self, text: str) -> None:
        """Print a line of progress."""
        self.console.print(f"[dim]{time.strftime('%H:%M:%S')}[/dim] {escape(text)}", highlight=False)

    def cold_ttft_s(self) -> float:
        """Return the median time to first token of the cold prompts."""
        return statistics.median(answer.ttft_s for answer in self.cold)

    def failures(self) -> list[str]:
        """Return a line for each case that another tier served than expected."""
        least = self.pinned_tokens() - SLACK_TOKENS
        found = [(case, case.answer.by_source.get(case.expected, 0)) for case in self.cases]
        return [
            f"{case.name}: {tokens} tokens came from {case.expected}, expected at least {least}"
            for case, tokens in found
            if tokens < least
        ]

    def pinned_tokens(self) -> int:
        """Return how many tokens vLLM itself found again right after the pin: all but the question."""
        return self.cases[0].answer.cached_tokens


def conversation(variant: int, question: str) -> Messages:
    """Return the messages of a first user turn."""
    return [{"role": "system", "content": system_prompt(variant)}, {"role": "user", "content": question}]
