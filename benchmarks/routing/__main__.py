"""Which share of their prompts requests find in a cache, by what the router in front of the engines knows.

usage: python -m benchmarks.routing [--seeds 20] [--requests 400] [--pool-prompts 4]

Four engines, eight pinned prompts of 3,008 tokens, each in the host memory of one or two of them, and the vLLMs have
just been started. Requests are drawn by Zipf's law, each with another question of 64 tokens; one vLLM is restarted in
the middle. Engines are simulated: vLLM's own block pool without a model, kvtier's own announcements, messages as vLLM's
publisher encodes them. Routers are models of what their sources do (tests/subscribers). Times are not simulated: the
router knows what was published before the request.
"""

import argparse
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from benchmarks.measuring.machine import machine_line, spread
from benchmarks.measuring.tables import table
from benchmarks.routing.policies import ByEvents, PrefixTree, RoundRobin
from benchmarks.routing.simulated_fleet import FleetShape, MakePolicy, Outcome, ask_all, outcomes
from benchmarks.routing.simulated_host import BLOCK_TOKENS
from tests.subscribers.aibrix_gateway import AibrixGateway, ProposedAibrixGateway
from tests.subscribers.llmd_router import LlmdRouter

HEADER = (
    "router",
    "first request of each prompt",
    "first 40 requests",
    "all requests",
    "first after the restart, of prompts sent there",
    "restored from host memory",
    "requests at the busiest engine",
)


class Router(NamedTuple):
    """A row of the table."""

    name: str
    make_policy: MakePolicy
    announces: bool


ROUTERS = (
    Router("round robin", lambda fleet: RoundRobin(), False),
    Router("prefix tree, keeps a restarted engine", lambda fleet: _tree(forgets_restarted=False), False),
    Router("prefix tree, forgets a restarted engine", lambda fleet: _tree(forgets_restarted=True), False),
    Router("llm-d, vLLM's events", lambda fleet: ByEvents(LlmdRouter(BLOCK_TOKENS)), False),
    Router("llm-d, and kvtier's", lambda fleet: ByEvents(LlmdRouter(BLOCK_TOKENS)), True),
    Router("AIBrix, refuses all events", lambda fleet: ByEvents(AibrixGateway(BLOCK_TOKENS)), True),
    Router("AIBrix #2587, vLLM's events", lambda fleet: ByEvents(ProposedAibrixGateway(BLOCK_TOKENS)), False),
    Router("AIBrix #2587, and kvtier's", lambda fleet: ByEvents(ProposedAibrixGateway(BLOCK_TOKENS)), True),
    Router("asks every engine", ask_all, False),
)


def _tree(*, forgets_restarted: bool) -> PrefixTree:
    return PrefixTree(BLOCK_TOKENS, forgets_restarted=forgets_restarted)


def row(name: str, results: Sequence[Outcome]) -> tuple[str, ...]:
    """Return a row: medians over seeds, and the spread."""
    columns: Iterable[list[float]] = (
        [each.first.share for each in results],
        [each.early.share for each in results],
        [each.all.share for each in results],
        [each.first_again.share for each in results if each.first_again.served],
        [each.all.from_host_memory for each in results],
        [each.busiest for each in results],
    )
    return (name, *(_percent(column) for column in columns))


def _percent(shares: Sequence[float]) -> str:
    return spread([100 * each for each in shares], "%", digits=0) if shares else ""


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--pool-prompts", type=int, default=4, help="that vLLM's cache of one engine holds")
    options = parser.parse_args()
    shape = FleetShape(num_requests=options.requests, pool_prompts=options.pool_prompts)
    print(machine_line())
    caches = f"vLLM caches {options.pool_prompts} prompts"
    print(f"{options.requests} requests, {options.seeds} seeds; {caches}; at most {most_share(shape):.1%} can be hit")
    rows: list[tuple[str, ...]] = []
    for router in ROUTERS:
        results = outcomes(shape, range(options.seeds), router.make_policy, announces=router.announces)
        rows.append(row(router.name, results))
    print(table(HEADER, rows), flush=True)


def most_share(shape: FleetShape) -> float:
    """Return the share of a prompt that is not the request's own question."""
    return shape.prompt_tokens / (shape.prompt_tokens + shape.question_tokens)


if __name__ == "__main__":
    main()
