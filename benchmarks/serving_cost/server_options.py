"""How every compared vLLM is run, except for its connector."""

from benchmarks.harness.engine import EngineOptions
from benchmarks.harness.model_specs import SERVED, ModelSpec
from benchmarks.harness.models import cached_model

POOL_BLOCKS = 288
BLOCK_TOKENS = 32
MAX_MODEL_LEN = 4096
WARM_SEED = 1_000_000
MODELS = {
    "8x512": SERVED,
    # A quarter of its computing, for slow machines: there a connector's cost would not be seen beside that of 8x512.
    "8x256": ModelSpec(
        num_layers=8, hidden=256, intermediate=512, num_heads=4, num_kv_heads=2, vocab_size=8192, max_positions=16384
    ),
}


def engine_options(dtype: str, omp_cpus: str, model: str = "8x512") -> EngineOptions:
    """Return how every side's vLLM is run, but for its connector."""
    return EngineOptions(
        model=str(cached_model(f"suite-{model}", MODELS[model])),
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_TOKENS,
        pool_blocks=POOL_BLOCKS,
        max_batched_tokens=MAX_MODEL_LEN,
        dtype=dtype,
        extra_env={"VLLM_CPU_OMP_THREADS_BIND": omp_cpus} if omp_cpus else {},
    )
