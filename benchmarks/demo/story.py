"""The story of the demo, step by step: what is done to the prompt, what is asked, and how that is shown."""

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import openai
from openai.types.chat import ChatCompletionMessageParam
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.harness.daemon import Daemon, run_cli
from benchmarks.harness.engine import Engine, EngineOptions
from benchmarks.harness.prompts import QUESTIONS, system_prompt
from benchmarks.measuring.bar_chart import Bar, draw_chart
from benchmarks.measuring.chat_requests import forget_device_cache
from benchmarks.measuring.machine import hardware, versions

PROMPT_NAME = "harbour-support"
PINNED_VARIANT = 0
MAX_MODEL_LEN = 4096
POOL_BLOCKS = 288  # a pin may have half of them, and a prompt of the flood needs as many beside it
BLOCK_TOKENS = 32
FLOOD_RATIO = 1.2
ANSWER_TOKENS = 8
# What may be missing at the end of a restored prompt: less than a chunk, and the template's last tokens.
SLACK_TOKENS = 2 * BLOCK_TOKENS
CHART_PATH = Path(__file__).resolve().parents[2] / ".demo" / "demo.png"
SOURCES = {
    "computed": ("computed", "#f97352"),
    "device": ("vLLM's own cache", "#a3adbd"),
    "host": ("kvtier, host memory", "#34d399"),
    "disk": ("kvtier, disk", "#60a5fa"),
}
"""What supplied a prompt's tokens, by vLLM's name for it: in words, and its colour in the chart."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One question and how it went.

    Attributes:
        cached_tokens: Prompt tokens that vLLM did not compute, as the API reports them.
        by_tier: The same by the tier that had them, from vLLM's /metrics.
    """

    prompt_tokens: int
    cached_tokens: int
    by_tier: dict[str, int]
    ttft_s: float

    @property
    def served_by(self) -> str:
        """The tiers that supplied tokens, most first."""
        used = sorted((tier for tier, tokens in self.by_tier.items() if tokens), key=lambda tier: -self.by_tier[tier])
        return " + ".join(used) or "computed"

    @property
    def source(self) -> tuple[str, str]:
        """`served_by` in words, and its colour."""
        return SOURCES.get(self.served_by, (self.served_by, "#e5e7eb"))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row of the table: what happened before the question, and where the answer must come from."""

    name: str
    expected: str
    turn: Turn


class DemoError(Exception):
    """The demo cannot go on; the message says why."""


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
        self.cases: list[Case] = []
        self.cold: list[Turn] = []
        self._num_engines = 0
        self._next_variant = PINNED_VARIANT + 1

    def run(self) -> None:
        """Run all cases.

        Raises:
            DemoError: A step failed.
        """
        with self.daemon:
            self.say(f"kvtier-daemon is ready after {self.daemon.ready_s:.2f} s")
            with self.engine() as engine:
                self.measure_cold(engine)
                self.pin(engine)
                self.record(engine, "right after kvtier pin", "device", QUESTIONS[0])
                self.flood(engine)
                self.record(engine, "flooded with other prompts", "device", QUESTIONS[1])
                forget_device_cache(engine)
                self.record(engine, "vLLM's own cache emptied", "host", QUESTIONS[5])
            with self.engine() as engine:
                self.record(engine, "vLLM restarted", "host", QUESTIONS[2])
                self.measure_cold(engine)
            self.say("kill -9 kvtier-daemon, start it again")
            self.daemon.kill()
            self.daemon.start()
            with self.engine() as engine:
                self.record(engine, "daemon killed (-9), both restarted", "host", QUESTIONS[3])
                self.measure_cold(engine)
                self.say("taking the prompt out of host memory: it is only on disk now")
                self.leave_only_on_disk(engine)
                self.record(engine, "only on disk", "disk", QUESTIONS[4])

    @contextmanager
    def engine(self) -> Iterator[Engine]:
        """Run a vllm serve, with one small request behind it."""
        self._num_engines += 1
        self.say("starting vllm serve ...")
        with Engine(self.options, self.home / f"vllm-{self._num_engines}.log") as engine:
            self.say(f"vllm serve is ready after {engine.ready_s:.0f} s")
            ask(engine, [{"role": "user", "content": "Hello!"}])
            yield engine

    def measure_cold(self, engine: Engine) -> None:
        """Ask with a system prompt of the same length that was never seen."""
        turn = ask(engine, self.unseen(QUESTIONS[4]))
        self.say(f"a comparable prompt without kvtier's help: {turn.prompt_tokens} tokens, TTFT {turn.ttft_s:.2f} s")
        if turn.cached_tokens > SLACK_TOKENS:
            raise DemoError(f"the cold prompt was not cold: {turn.cached_tokens} tokens came from {turn.served_by}")
        self.cold.append(turn)

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
        """Ask the pinned assistant something new and note where its prompt came from."""
        turn = ask(engine, conversation(PINNED_VARIANT, question))
        self.say(
            f"{name}: {turn.cached_tokens} of {turn.prompt_tokens} tokens from {turn.served_by}, {turn.ttft_s:.2f} s"
        )
        self.cases.append(Case(name=name, expected=expected, turn=turn))

    def flood(self, engine: Engine) -> None:
        """Send other long prompts until vLLM's whole KV cache has been overwritten."""
        wanted = int(POOL_BLOCKS * BLOCK_TOKENS * FLOOD_RATIO)
        sent = 0
        while sent < wanted:
            sent += ask(engine, self.unseen(QUESTIONS[5])).prompt_tokens
        self.say(f"flooded vLLM's cache of {POOL_BLOCKS * BLOCK_TOKENS} tokens with {sent} tokens of other prompts")

    def leave_only_on_disk(self, engine: Engine) -> None:
        """Drop the prompt from host memory with the CLI, and everything from vLLM's own cache."""
        done = run_cli(self.daemon.socket, "evict", PROMPT_NAME, "--tier", "host", "--force", timeout_s=60)
        if done.returncode:
            raise DemoError(f"kvtier evict ended with status {done.returncode}: {done.stderr}")
        forget_device_cache(engine)

    def unseen(self, question: str) -> list[ChatCompletionMessageParam]:
        """Return a conversation that shares no system prompt with any before."""
        self._next_variant += 1
        return conversation(self._next_variant, question)

    def say(self, text: str) -> None:
        """Print a line of progress."""
        self.console.print(f"[dim]{time.strftime('%H:%M:%S')}[/dim] {escape(text)}", highlight=False)

    def cold_ttft_s(self) -> float:
        """Return the median time to first token of the cold prompts."""
        return statistics.median(turn.ttft_s for turn in self.cold)

    def cold_spread(self) -> str:
        """Return how often the cold prompts were measured, and from where to where."""
        times_s = [turn.ttft_s for turn in self.cold]
        return f"median of {len(times_s)}, {min(times_s):.2f}-{max(times_s):.2f} s"

    def failures(self) -> list[str]:
        """Return what did not come from where it should have."""
        problems = []
        for case in self.cases:
            tokens = case.turn.by_tier.get(case.expected, 0)
            least = self.pinned_tokens() - SLACK_TOKENS
            if tokens < least:
                problems.append(f"{case.name}: {tokens} tokens came from {case.expected}, expected at least {least}")
        return problems

    def pinned_tokens(self) -> int:
        """Return how many tokens vLLM itself found again right after the pin: all but the question."""
        return self.cases[0].turn.cached_tokens

    def table(self) -> Table:
        """Return the result."""
        cold_s = self.cold_ttft_s()
        table = Table(
            title=f"\nA pinned system prompt of about {self.pinned_tokens()} tokens, always with a new question"
        )
        table.add_column("case")
        for column in ("cached tokens", "TTFT", "of cold"):
            table.add_column(column, justify="right")
        table.add_column("served by")
        table.add_row(
            f"cold: a prompt not pinned ({self.cold_spread()})",
            f"{self.cold[0].cached_tokens} of {self.cold[0].prompt_tokens}",
            f"{cold_s:.2f} s",
            "100 %",
            self.cold[0].served_by,
        )
        for case in self.cases:
            turn = case.turn
            table.add_row(
                case.name,
                f"{turn.cached_tokens} of {turn.prompt_tokens}",
                f"{turn.ttft_s:.2f} s",
                f"{turn.ttft_s / cold_s:.0%}".replace("%", " %"),
                turn.source[0],
            )
        return table

    def draw(self, model: str, dtype: str) -> None:
        """Draw the result at CHART_PATH."""
        word, color = self.cold[0].source
        cold = Bar(
            label="cold: a prompt not pinned",
            note=f"{word}; {self.cold_spread()}",
            value_s=self.cold_ttft_s(),
            color=color,
        )
        others = [
            Bar(label=case.name, note=case.turn.source[0], value_s=case.turn.ttft_s, color=case.turn.source[1])
            for case in self.cases
        ]
        draw_chart(
            f"Time to first token, with a system prompt of {self.pinned_tokens():,} tokens",
            "Shorter is better. Every question is new, so only the system prompt can come from a cache.",
            [cold, *others],
            [f"{hardware()}; model {model}, {dtype}", versions()],
            CHART_PATH,
        )


def conversation(variant: int, question: str) -> list[ChatCompletionMessageParam]:
    """Return the messages of a first user turn."""
    return [{"role": "system", "content": system_prompt(variant)}, {"role": "user", "content": question}]


def ask(engine: Engine, messages: list[ChatCompletionMessageParam]) -> Turn:
    """Ask through the openai client, streaming, and time the first token."""
    before = engine.cached_by_source()
    with openai.OpenAI(base_url=f"{engine.url}/v1", api_key="none", timeout=600, max_retries=0) as client:
        start_s = time.perf_counter()
        stream = client.chat.completions.create(
            model="model",
            messages=messages,
            max_tokens=ANSWER_TOKENS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        ttft_s, usage = 0.0, None
        for chunk in stream:
            if not ttft_s and chunk.choices:
                ttft_s = time.perf_counter() - start_s
            usage = chunk.usage or usage
    if usage is None:
        raise DemoError("vLLM sent no usage")
    after = engine.cached_by_source()
    details = usage.prompt_tokens_details
    return Turn(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=(details.cached_tokens or 0) if details else 0,
        by_tier={tier: after[tier] - before[tier] for tier in after},
        ttft_s=ttft_s,
    )
