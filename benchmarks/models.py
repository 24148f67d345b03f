"""Small models with seeded weights whose output depends on their KV cache.

The query and key projections are scaled up, so attention is sharp: change one byte of the KV cache and the logprobs
change. (vLLM's `--load-format dummy` weights are so small that a zeroed KV cache gives the same tokens; no test of
equality may rest on them.) The models know nothing, and what they write is noise.
"""

import hashlib
import json
import os
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors.torch import save_file

from benchmarks.families import FAMILIES, common_config, weight_maker
from benchmarks.tokenizer import SPECIAL_TOKENS, write_tokenizer

MODELS_DIR = Path(__file__).resolve().parent.parent / ".models"


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model to make; equal specs give equal files.

    Attributes:
        family: Of `benchmarks.families`. In `mistral` every layer has a sliding window. `gemma3` (sliding window) and
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

    def digest(self) -> str:
        """Return a short name of everything in the spec and of this maker's code, for caches."""
        code = b"".join(
            Path(__file__).with_name(name).read_bytes()
            for name in ("models.py", "families.py", "tokenizer.py", "prompts.py")
        )
        spec = json.dumps([asdict(self), sys.version_info[:2]]).encode()
        return hashlib.sha256(spec + code).hexdigest()[:12]


DEMO = ModelSpec(
    num_layers=16, hidden=1024, intermediate=2048, num_heads=16, num_kv_heads=8, vocab_size=8192, max_positions=16384
)
# What benchmarks of a serving vLLM run: small enough for two cores, with room for long prompts.
SERVED = ModelSpec(
    num_layers=8, hidden=512, intermediate=1024, num_heads=8, num_kv_heads=4, vocab_size=8192, max_positions=16384
)
TINY = ModelSpec()
TINY_HYBRID = ModelSpec(family="gemma3")
TINY_WINDOW = ModelSpec(family="mistral")
TINY_EXPERTS = ModelSpec(family="mixtral")
TINY_CONV = ModelSpec(family="lfm2")
TINY_LATENT = ModelSpec(family="deepseek")


def cached_model(name: str, spec: ModelSpec) -> Path:
    """Return the folder of a model under `.models/`, made on first use."""
    path = MODELS_DIR / f"{name}-{spec.digest()}"
    if not path.exists():
        MODELS_DIR.mkdir(exist_ok=True)
        for old in MODELS_DIR.glob(f"{name}-*"):
            shutil.rmtree(old, ignore_errors=True)
        unfinished = MODELS_DIR / f"unfinished-{path.name}-{os.getpid()}"
        make_model(unfinished, spec)
        try:
            unfinished.rename(path)
        except OSError:  # another process made it at the same time
            shutil.rmtree(unfinished)
    return path


def make_model(path: Path, spec: ModelSpec) -> None:
    """Write config, tokenizer and weights to `path`, over what is there."""
    path.mkdir(parents=True, exist_ok=True)
    write_tokenizer(path, spec.vocab_size)
    family = FAMILIES[spec.family]
    (path / "config.json").write_text(json.dumps(common_config(spec) | family.config(spec), indent=2))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": SPECIAL_TOKENS.index("<|end|>")}))
    save_file(family.weights(spec, weight_maker(spec.seed)), path / "model.safetensors", metadata={"format": "pt"})


def make_lora_adapter(path: Path, base: ModelSpec, *, seed: int, rank: int = 8) -> None:
    """Write a LoRA adapter (PEFT format) for the attention projections of a Llama made from `base`."""
    path.mkdir(parents=True, exist_ok=True)
    weight = weight_maker(seed)
    q_rows, kv_rows = base.num_heads * base.head_dim, base.num_kv_heads * base.head_dim
    shapes = {"q_proj": (q_rows, base.hidden), "k_proj": (kv_rows, base.hidden), "v_proj": (kv_rows, base.hidden)}
    tensors = {}
    for layer in range(base.num_layers):
        for module, (rows, cols) in shapes.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{prefix}.lora_A.weight"] = weight(rank, cols)
            tensors[f"{prefix}.lora_B.weight"] = weight(rows, rank)
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(shapes),
        "base_model_name_or_path": "",
    }
    (path / "adapter_config.json").write_text(json.dumps(config, indent=2))
