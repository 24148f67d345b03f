"""More pinned prompts than fit into vLLM's cache, and more requests than it can run: none of them is computed."""

import random

from benchmarks.harness.engine import EngineOptions
from benchmarks.harness.model_specs import TINY
from benchmarks.harness.models import cached_model
from tests.e2e.conftest import Note
from tests.e2e.harness import PATIENT, ask_all, running_stack, tokens

PREFIX_TOKENS = 640
# Of vLLM's 63 blocks a prefix takes 20 and its question 2: two and a half of five fit.
PREFIXES = [tokens(seed, PREFIX_TOKENS) for seed in range(50, 55)]
ROUNDS, USERS = 4, 16


def test_requests_that_wait_for_blocks_are_restored(note: Note) -> None:
    """While one waits, vLLM evicts what the others need: also what it had of this request's own prompt.

    It was computed again if that happened before the daemon's answer, which in a crowded engine it often did.
    """
    options = EngineOptions(model=str(cached_model("tiny", TINY)), connector_config=PATIENT)
    chance = random.Random(1)
    with running_stack(options) as stack, stack.engine() as engine:
        stack.wait_attached(engine)
        for number, prefix in enumerate(PREFIXES):
            stack.pin(f"crowd-{number}", prefix, engine)
        before = engine.cached_by_source()
        for number in range(ROUNDS):
            seeds = range(100 * number, 100 * number + USERS)
            answers = ask_all(engine, [chance.choice(PREFIXES) + tokens(seed, 60) for seed in seeds], max_tokens=8)
            assert [answer.cached_tokens for answer in answers] == [PREFIX_TOKENS] * USERS
        sources = {source: count - before[source] for source, count in engine.cached_by_source().items()}
        assert sources["host"]
        assert sources["device"]
        num_passed = engine.metric("kvtier_connector_passed_requests_total")
        assert 0 < num_passed < ROUNDS * USERS
        note(f"{ROUNDS * USERS} requests of {PREFIX_TOKENS} tokens: {sources}, {num_passed:.0f} passed")
