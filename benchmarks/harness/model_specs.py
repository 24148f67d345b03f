"""What a model to make consists of, and the specs that tests and benchmarks share."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model to make; equal specs give equal files.

    Attributes:
        family: Of `model_families`. In `mistral` every layer has a sliding window. `gemma3` (sliding window) and
            `lfm2` (short convolutions) have full attention in every `full_every`-th layer only; vLLM sorts such layers
            into several KV cache groups. `mixtral` has experts, `deepseek` latent attention (MLA).
    """

    family: str = "llama"
    num_layers: int = 4
    hidden: int = 256
    intermediate: int = 512
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    vocab_size: int = 2048
    max_positions: int = 8192
    rope_theta: float = 10_000.0
    sliding_window: int = 128
    full_every: int = 2
    seed: int = 0


DEMO = ModelSpec(
    num_layers=16, hidden=1024, intermediate=2048, num_heads=16, num_kv_heads=8, vocab_size=8192, max_positions=16384
)
# For benchmarks of a serving vLLM: small enough for two cores, with a context for long prompts.
SERVED = ModelSpec(
    num_layers=8, hidden=512, intermediate=1024, num_heads=8, num_kv_heads=4, vocab_size=8192, max_positions=16384
)
TINY = ModelSpec()
TINY_HYBRID = ModelSpec(family="gemma3")
TINY_WINDOW = ModelSpec(family="mistral")
TINY_EXPERTS = ModelSpec(family="mixtral")
TINY_CONV = ModelSpec(family="lfm2")
TINY_LATENT = ModelSpec(family="deepseek")
