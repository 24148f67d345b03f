"""Time to first token of system prompts by what has happened to them, for one system at a time.

A round of a system has three phases. In the first, vLLM computes every prompt and answers a second question on it; a
flood of other prompts follows, then another question, then the prefix cache is emptied, then another. In the second,
vLLM was restarted while its server kept running; then that server is killed and started under the running vLLM. Before
the third, everything was stopped, and host memory and page cache are emptied, so only the disk has the prompts. Every
question is new: only the system prompt can come from a cache.

Every system has its memory for KV in use before it is asked for what the disk alone has, as when more prompts are kept
than memory holds: the peers fill theirs before they serve, and kvtier has by then prefetched what is pinned, which is
evicted again. What is asked straight after a restart, `benchmarks.peers` measures.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import httpx
import openai

from benchmarks.harness.engine import Engine
from benchmarks.harness.process import Process
from benchmarks.measuring.chat_requests import ANSWER_TIMEOUT_S, ask, forget_device_cache, greet, question
from benchmarks.measuring.process_usage import cpu_s, memory_of, pids_of
from benchmarks.measuring.sized_prompts import SystemPrompt, make_prompt
from benchmarks.measuring.storage import allocated_bytes, drop_page_cache
from benchmarks.suite.profiles import BLOCK_TOKENS, MatrixShape
from benchmarks.systems.system import System

FLOOD_RATIO = 1.3
# Of prompts that are not measured: they share no first word with those that are.
FLOOD_VARIANT = 500
# Of a request after the server was killed and started, one that is computed included: longer is no answer.
REVIVED_TIMEOUT_S = 30
# Errors that show that vLLM ended or does not answer.
LOST = (httpx.HTTPError, openai.OpenAIError, TimeoutError)


def first_line(error: BaseException) -> str:
    """Return the first line of an error, for a table."""
    return next(iter(str(error).splitlines()), type(error).__name__)


class Condition(Enum):
    """What has happened to the prompt before the request."""

    COLD = "cold"
    PREFIX_CACHE_HIT = "prefix-cache hit"
    PRESSURE = "after GPU pressure"
    HOST = "GPU cache emptied"
    ENGINE_RESTARTED = "engine restarted"
    SERVER_RESTARTED = "server killed, started"
    DISK = "disk only"


@dataclass(frozen=True, kw_only=True)
class MatrixRun:
    """One system in one round.

    Attributes:
        add: Takes the samples: a kind and its fields.
    """

    system: System
    shape: MatrixShape
    model: Path
    round: int
    add: Callable[..., None]
    questions: Iterator[str] = field(default_factory=lambda: map(question, itertools.count()))

    def measure(self) -> None:
        """Go through the three phases; vLLM alone has one."""
        system, prompts = self.system, self._prompts()
        with system.server() as servers:
            with system.engine() as engine:
                self._first_phase(servers, engine, prompts)
            if system.keeps and not self.shape.disk_only:
                with system.engine() as engine:
                    self._second_phase(servers, engine, prompts)
        if system.keeps:
            self._third_phase(prompts)

    def _prompts(self) -> list[SystemPrompt]:
        """Return the prompts of this round; no other round has them, so they are cold."""
        # Prompts of other lengths differ from the first words on, too: none is a prefix of another.
        texts = list(itertools.product(range(self.shape.prompts), self.shape.lengths))
        first = self.round * len(texts)
        return [make_prompt(self.model, tokens, variant) for variant, (_, tokens) in enumerate(texts, first)]

    def _first_phase(self, servers: Sequence[Process], engine: Engine, prompts: Sequence[SystemPrompt]) -> None:
        greet(engine)
        self._note_memory([*servers, engine], "before the first prompt")
        for prompt in prompts:
            self._compute_and_keep(prompt, engine, servers)
            greet(engine)  # a vLLM that has idled is slower, and some systems need no time to store a prompt
            self._ask(Condition.PREFIX_CACHE_HIT, [prompt], engine, servers)
        if self.shape.disk_only:
            return
        self._flood(engine)
        self._ask(Condition.PRESSURE, prompts, engine, servers)
        if self.system.keeps:
            forget_device_cache(engine)
            self._ask(Condition.HOST, prompts, engine, servers)
        self._note_memory([*servers, engine], "after all prompts")

    def _second_phase(self, servers: Sequence[Process], engine: Engine, prompts: Sequence[SystemPrompt]) -> None:
        greet(engine)
        self._ask(Condition.ENGINE_RESTARTED, prompts, engine, servers)
        if not servers:
            return
        try:
            for server in servers:
                server.kill()
                self.system.revive(server, engine)
            greet(engine, REVIVED_TIMEOUT_S)
            forget_device_cache(engine)
            self._ask(Condition.SERVER_RESTARTED, prompts, engine, servers, REVIVED_TIMEOUT_S)
        except LOST as error:  # a result too: vLLM did not survive
            condition, reason = Condition.SERVER_RESTARTED.value, first_line(error)
            for prompt in prompts:
                self.add("lost", **self._labels(prompt), condition=condition, reason=reason)

    def _third_phase(self, prompts: Sequence[SystemPrompt]) -> None:
        self.system.forget_host_memory()
        with self.system.serving() as (engine, processes):
            self.system.evict_prefetched([prompt.name for prompt in prompts])
            drop_page_cache(self.system.disk_dir)
            greet(engine)
            self._ask(Condition.DISK, prompts, engine, processes[:-1])

    def _compute_and_keep(self, prompt: SystemPrompt, engine: Engine, servers: Sequence[Process]) -> None:
        bytes_before, cpu_before_s = allocated_bytes(self.system.disk_dir), _cpu_s(servers)
        self._ask(Condition.COLD, [prompt], engine, servers)
        if self.system.keeps:
            self.system.keep(engine, prompt.name, prompt.text)
            self.add(
                "kept",
                **self._labels(prompt),
                disk_bytes=allocated_bytes(self.system.disk_dir) - bytes_before,
                server_cpu_s=_cpu_s(servers) - cpu_before_s,
            )

    def _flood(self, engine: Engine) -> None:
        wanted = int(FLOOD_RATIO * self.shape.pool_blocks * BLOCK_TOKENS)
        tokens = min(2000, max(self.shape.lengths))
        for number in range(-(-wanted // tokens)):
            variant = FLOOD_VARIANT + 100 * self.round + number
            ask(engine, [], make_prompt(self.model, tokens, variant).messages(next(self.questions)))

    def _ask(
        self,
        condition: Condition,
        prompts: Sequence[SystemPrompt],
        engine: Engine,
        servers: Sequence[Process],
        timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> None:
        for prompt in prompts:
            servers_s, engine_s = _cpu_s(servers), cpu_s({engine.pid})
            answer = ask(engine, [*servers, engine], prompt.messages(next(self.questions)), timeout_s)
            self.add(
                "ttft",
                **self._labels(prompt),
                condition=condition.value,
                ttft_s=answer.ttft_s,
                prompt_tokens=answer.prompt_tokens,
                cached_tokens=answer.cached_tokens,
                by_source=answer.by_source,
                read_bytes=answer.read.calls,
                device_bytes=answer.read.device,
                server_cpu_s=_cpu_s(servers) - servers_s,
                engine_cpu_s=cpu_s({engine.pid}) - engine_s,
            )

    def _note_memory(self, processes: Sequence[Process], when: str) -> None:
        for process in processes:
            memory = memory_of(list(pids_of({process.pid})))
            self.add(
                "memory",
                system=self.system.name,
                matrix=self.shape.name,
                process=process.name,
                when=when,
                resident=memory.resident,
                proportional=memory.proportional,
                anonymous=memory.anonymous,
            )

    def _labels(self, prompt: SystemPrompt) -> dict[str, object]:
        return {
            "system": self.system.name,
            "matrix": self.shape.name,
            "tokens": prompt.tokens,
            "round": self.round,
            "variant": prompt.variant,
        }


def _cpu_s(processes: Sequence[Process]) -> float:
    return cpu_s({process.pid for process in processes})
