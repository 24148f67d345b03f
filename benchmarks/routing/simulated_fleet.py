"""Engines with pinned prompts in host memory, requests for these prompts, and what a policy makes of them."""

import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.routing.policies import AllIsKnown, Load, Policy
from benchmarks.routing.simulated_host import BLOCK_TOKENS, ServedTokens, SimulatedHost
from tests.subscribers.wire import AskedPrompt

NUM_UNDER_WAY = 8
"""Requests at once, over all engines: what a router knows of load."""


@dataclass(frozen=True, kw_only=True)
class FleetShape:
    """What is served by what."""

    num_engines: int = 4
    num_prompts: int = 8
    prompt_tokens: int = 188 * BLOCK_TOKENS
    question_tokens: int = 4 * BLOCK_TOKENS
    pool_prompts: int = 4
    """vLLM's cache of one engine holds this many prompts with their questions."""
    zipf_exponent: float = 1.0
    num_requests: int = 400
    num_early: int = 40


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Drawn from a seed, equal for all policies."""

    homes: Sequence[Sequence[int]]  # engines whose host memory has a prompt, by prompt
    prompts: Sequence[AskedPrompt]
    requests: Sequence[tuple[int, AskedPrompt]]  # the prompt, and it with a question
    restart_at: int  # before this request
    restarted: int  # this engine


@dataclass(kw_only=True)
class Hits:
    """Of some requests."""

    served: list[ServedTokens] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Tokens of their prompts that were not computed, of all."""
        return sum(each.hit for each in self.served) / sum(each.total for each in self.served)

    @property
    def from_host_memory(self) -> float:
        """Tokens of their prompts that were restored from host memory, of all."""
        return sum(each.from_host_memory for each in self.served) / sum(each.total for each in self.served)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a policy has achieved."""

    first: Hits  # the first request of each prompt
    early: Hits  # the first `FleetShape.num_early`
    first_again: Hits  # after the restart, the first of each prompt whose last request went to the restarted engine
    all: Hits
    busiest: float  # share of the requests that the busiest engine was sent


def draw_workload(shape: FleetShape, seed: int) -> Workload:
    """Draw prompts, where they are, and requests; half of the prompts are on two engines, half on one."""
    rng = random.Random(seed)
    prompts = [AskedPrompt(tokens=_tokens(rng, shape.prompt_tokens)) for _ in range(shape.num_prompts)]
    homes = _homes(shape, rng)
    weights = [1 / rank**shape.zipf_exponent for rank in range(1, shape.num_prompts + 1)]
    rng.shuffle(weights)
    requests: list[tuple[int, AskedPrompt]] = []
    for number in rng.choices(range(shape.num_prompts), weights, k=shape.num_requests):
        question = _tokens(rng, shape.question_tokens)
        requests.append((number, replace(prompts[number], tokens=[*prompts[number].tokens, *question])))
    return Workload(
        homes=homes,
        prompts=prompts,
        requests=requests,
        restart_at=shape.num_requests // 2,
        restarted=rng.randrange(shape.num_engines),
    )


def _homes(shape: FleetShape, rng: random.Random) -> list[list[int]]:
    """Deal prompts to engines, so that each engine has as many as the others, or one more."""
    dealt = itertools.chain.from_iterable(
        rng.sample(range(shape.num_engines), shape.num_engines) for _ in itertools.count()
    )
    homes = [[next(dealt)] for _ in range(shape.num_prompts)]
    for home in homes[: shape.num_prompts // 2]:
        home.append(next(engine for engine in dealt if engine not in home))
    rng.shuffle(homes)
    return homes


def _tokens(rng: random.Random, number: int) -> list[int]:
    return [rng.randrange(1000, 100_000) for _ in range(number)]


MakePolicy = Callable[["Fleet"], Policy]


class Fleet:
    """Engines behind a router.

    Args:
        shape: Sizes.
        workload: What is where, and is asked.
        make_policy: Makes the router's.
        announces: Engines publish what kvtier announces, beside vLLM's own events.
    """

    def __init__(self, shape: FleetShape, workload: Workload, make_policy: MakePolicy, *, announces: bool) -> None:
        self._workload, self._num_early = workload, shape.num_early
        pool_blocks = shape.pool_prompts * (shape.prompt_tokens + shape.question_tokens) // BLOCK_TOKENS + 1
        self.hosts = {
            name: SimulatedHost(name, pool_blocks, announces=announces)
            for name in (f"engine-{number}" for number in range(shape.num_engines))
        }
        self._names = list(self.hosts)
        for number, (prompt, home) in enumerate(zip(workload.prompts, workload.homes, strict=True)):
            for engine in home:
                self.hosts[self._names[engine]].pin(str(number), prompt)
        self._policy = make_policy(self)
        self._under_way: deque[str] = deque(maxlen=NUM_UNDER_WAY - 1)
        self._num_sent = Counter[str]()

    def ask(self, name: str, prompt: AskedPrompt) -> int:
        """Return how many tokens of a prompt an engine would not have to compute."""
        return self.hosts[name].cached(prompt).hit

    def run(self) -> Outcome:
        """Serve all requests. Before each, the router has received what the engines have published."""
        outcome = Outcome(first=Hits(), early=Hits(), first_again=Hits(), all=Hits(), busiest=0.0)
        restarted = self._names[self._workload.restarted]
        sent: dict[int, str] = {}
        lost: set[int] = set()
        for index, (number, request) in enumerate(self._workload.requests):
            if index == self._workload.restart_at:
                self.hosts[restarted].restart()
                self._policy.restarted(restarted)
                lost = {each for each, name in sent.items() if name == restarted}
            self._publish()
            name = self._choose(request)
            served = self.hosts[name].serve(request)
            outcome.all.served.append(served)
            if index < self._num_early:
                outcome.early.served.append(served)
            if number not in sent:
                outcome.first.served.append(served)
            if number in lost:
                lost.remove(number)
                outcome.first_again.served.append(served)
            sent[number] = name
        return replace(outcome, busiest=max(self._num_sent.values()) / len(self._workload.requests))

    def _publish(self) -> None:
        for name, host in self.hosts.items():
            for message in host.take_messages():
                self._policy.receive(name, message)

    def _choose(self, request: AskedPrompt) -> str:
        loads: dict[str, Load] = {name: (self._under_way.count(name), self._num_sent[name]) for name in self._names}
        name = self._policy.choose(request, loads)
        self._under_way.append(name)
        self._num_sent[name] += 1
        return name


def ask_all(fleet: Fleet) -> Policy:
    """Return the policy to which all is known."""
    return AllIsKnown(fleet.ask)


def outcomes(shape: FleetShape, seeds: Iterable[int], make_policy: MakePolicy, *, announces: bool) -> list[Outcome]:
    """Return what a policy achieves with the workload of each seed."""
    return [Fleet(shape, draw_workload(shape, seed), make_policy, announces=announces).run() for seed in seeds]
