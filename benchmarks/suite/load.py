"""Many users, and more system prompts than the pool can hold: throughput, waiting times, and which tier served.

All on one start of a system, each run with another seed for its users. In the last one the server beside vLLM is killed
(-9) and started again when half of the turns are answered.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from benchmarks.harness.engine import Engine
from benchmarks.harness.process import Process, wait_until
from benchmarks.measuring.chat_requests import ask, greet, question
from benchmarks.measuring.process_usage import cpu_s
from benchmarks.measuring.sized_prompts import SystemPrompt, make_prompt
from benchmarks.suite.profiles import LoadShape, Users
from benchmarks.suite.traffic import Traffic, plan
from benchmarks.systems.system import System

KILLED = "server killed in the middle"
HALF_TIMEOUT_S = 180
_PREEMPTIONS = "vllm:num_preemptions_total"


@dataclass(frozen=True, kw_only=True)
class LoadRun:
    """One system in one round; `add` takes the samples."""

    system: System
    shape: LoadShape
    model: Path
    round: int
    add: Callable[..., None]

    def measure(self) -> None:
        """Store the prompts, then run the users."""
        with self.system.server() as servers, self.system.engine() as engine:
            prompts = self.store_prompts(engine)
            for number, users in enumerate(self.shape.users):
                self.run_users(users, users.name, servers, engine, prompts, number)
            if self.shape.kill and self.system.has_server:
                first, last = self.shape.users[0], len(self.shape.users)
                self.run_users(first, KILLED, servers, engine, prompts, last)

    def store_prompts(self, engine: Engine) -> list[SystemPrompt]:
        """Return the system prompts, of which the system keeps each."""
        prompts = [
            make_prompt(self.model, self.shape.prompt_tokens, number) for number in range(self.shape.system_prompts)
        ]
        greet(engine)
        for number, prompt in enumerate(prompts):
            ask(engine, [], prompt.messages(question(number)))
            if self.system.keeps:
                self.system.keep(engine, prompt.name, prompt.text)
        return prompts

    def run_users(
        self, users: Users, mode: str, servers: list[Process], engine: Engine, prompts: list[SystemPrompt], number: int
    ) -> None:
        """Run these users, whose chats depend on the round and `number`, and add a sample."""
        with _busy_loops(users.busy_loops, self.system.home):
            self._run_users(users, mode, servers, engine, prompts, number)

    def _run_users(
        self, users: Users, mode: str, servers: list[Process], engine: Engine, prompts: list[SystemPrompt], number: int
    ) -> None:
        chats = plan(users.count, self.shape.turns, prompts, seed=10 * self.round + number)
        traffic = Traffic(engine, chats, self.shape.answer_tokens)
        sources, engine_s, servers_s = engine.cached_by_source(), cpu_s({engine.pid}), _cpu_s(servers)
        preempted = engine.metric(_PREEMPTIONS)
        traffic.start()
        killed_at = 0
        if mode == KILLED:
            wait_until(lambda: 2 * len(traffic.turns) >= traffic.num_planned, HALF_TIMEOUT_S, "half of the turns")
            killed_at = len(traffic.turns)
            servers_s -= _cpu_s(servers)  # a killed process takes its CPU time along
            for server in servers:
                server.kill()
                self.system.revive(server, engine)
        wall_s = traffic.finish()
        try:
            after, preempted = engine.cached_by_source(), engine.metric(_PREEMPTIONS) - preempted
        except httpx.HTTPError:  # vLLM did not survive: its turns say so
            after, preempted = sources, 0
        self.add(
            "load",
            system=self.system.name,
            mode=mode,
            round=self.round,
            wall_s=wall_s,
            killed_at_turn=killed_at,
            system_tokens=self.shape.prompt_tokens,
            answer_tokens=self.shape.answer_tokens,
            by_source={source: after[source] - sources[source] for source in after},
            engine_cpu_s=cpu_s({engine.pid}) - engine_s,
            server_cpu_s=_cpu_s(servers) - servers_s,
            preempted=preempted,
            turns=[asdict(turn) for turn in traffic.turns],
        )


@contextmanager
def _busy_loops(count: int, home: Path) -> Iterator[None]:
    """Keep this many processes busy."""
    with ExitStack() as stack:
        for number in range(count):
            argv = [sys.executable, "-c", "while True: pass"]
            stack.enter_context(Process(f"busy loop {number}", argv, {}, home / "busy.log"))
        yield


def _cpu_s(processes: list[Process]) -> float:
    return cpu_s({process.pid for process in processes})
