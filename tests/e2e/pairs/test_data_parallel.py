"""Two data-parallel ranks of one vLLM: two engines in one namespace of one daemon; what one stores, both load."""

from collections.abc import Sequence

from benchmarks.harness.daemon import wait_attached
from benchmarks.harness.engine import EngineOptions
from benchmarks.harness.model_specs import TINY
from benchmarks.harness.models import cached_model
from tests.e2e.equality import Comparisons
from tests.e2e.harness import EVICTING, Answer, ask, forget_gpu, running_stack, tokens

PREFIX_TOKENS = 640
PREFIX, QUESTION = tokens(1, PREFIX_TOKENS), tokens(2, 40)


def test_ranks_share_what_one_of_them_has_stored(compare: Comparisons) -> None:
    """The rank that computed the prompt answers from its prefix cache, the other from host memory, equally."""
    options = EngineOptions(
        model=str(cached_model("tiny", TINY)),
        connector_config=EVICTING,
        extra_args=("--data-parallel-size", "2"),
        extra_env={"VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    )
    with running_stack(options) as stack, stack.engine() as engine:
        wait_attached(stack.daemon, 2)
        stack.wait_attached(engine)
        assert len({session.namespace_id for session in stack.status().sessions}) == 1

        def ask_rank(rank: int, prompt: Sequence[int]) -> Answer:
            return ask(engine, prompt, headers={"X-data-parallel-rank": str(rank)})

        stack.pin("prompt", PREFIX)
        stack.wait_attached(engine)
        assert ask_rank(0, [*PREFIX, *tokens(3, 10)]).cached_tokens == 0
        stack.wait_durable("prompt")
        cached, restored = (ask_rank(rank, [*PREFIX, *QUESTION]) for rank in (0, 1))
        assert cached.by_source["device"] == PREFIX_TOKENS
        compare.restored_equals_prefix_cache_hit(restored, cached, "host")
        forget_gpu(engine)
        for rank in (0, 1):
            compare.restored_equals_prefix_cache_hit(ask_rank(rank, [*PREFIX, *QUESTION]), cached, "host")
        assert stack.counters()["stored_chunks"] == PREFIX_TOKENS // 32
