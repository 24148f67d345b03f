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
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file

from benchmarks.tokenizer import SPECIAL_TOKENS, write_tokenizer

MODELS_DIR = Path(__file__).resolve().parent.parent / ".models"

# Gains over 1/sqrt(fan-in), so that attention is sharp, activations stay bounded and logits are several nats apart.
QUERY_KEY_GAIN = 1.7
ATTENTION_OUT_GAIN = 2.0
LOGITS_GAIN = 3.0


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model to make; equal specs give equal files.

    Attributes:
        family: `llama`, or `gemma3`: layers with a sliding window, every `full_every`-th with full attention. vLLM
            sorts such layers into several KV cache groups.
    """

    family: Literal["llama", "gemma3"] = "llama"
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
            Path(__file__).with_name(name).read_bytes() for name in ("models.py", "tokenizer.py", "prompts.py")
        )
        spec = json.dumps([asdict(self), sys.version_info[:2]]).encode()
        return hashlib.sha256(spec + code).hexdigest()[:12]


DEMO = ModelSpec(
    num_layers=16, hidden=1024, intermediate=2048, num_heads=16, num_kv_heads=8, vocab_size=8192, max_positions=16384
)
TINY = ModelSpec()
TINY_HYBRID = ModelSpec(family="gemma3")

Weights = dict[str, torch.Tensor]
MakeWeight = Callable[..., torch.Tensor]


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
    (path / "config.json").write_text(json.dumps(_config(spec), indent=2))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": SPECIAL_TOKENS.index("<|end|>")}))
    make = _llama_weights if spec.family == "llama" else _gemma3_weights
    save_file(make(spec, _weight_maker(spec.seed)), path / "model.safetensors", metadata={"format": "pt"})


def make_lora_adapter(path: Path, base: ModelSpec, *, seed: int, rank: int = 8) -> None:
    """Write a LoRA adapter (PEFT format) for the attention projections of a Llama made from `base`."""
    path.mkdir(parents=True, exist_ok=True)
    weight = _weight_maker(seed)
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


def _config(spec: ModelSpec) -> dict[str, object]:
    config: dict[str, object] = {
        "num_hidden_layers": spec.num_layers,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_positions,
        "rope_theta": spec.rope_theta,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "pad_token_id": SPECIAL_TOKENS.index("<|pad|>"),
        "bos_token_id": SPECIAL_TOKENS.index("<|begin|>"),
        "eos_token_id": SPECIAL_TOKENS.index("<|end|>"),
        "torch_dtype": "bfloat16",
    }
    if spec.family == "llama":
        return config | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
    is_full = [(layer + 1) % spec.full_every == 0 for layer in range(spec.num_layers)]
    return config | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": spec.head_dim,
        "sliding_window": spec.sliding_window,
        "layer_types": ["full_attention" if full else "sliding_attention" for full in is_full],
        "rope_local_base_freq": 10_000.0,
    }


def _weight_maker(seed: int) -> MakeWeight:
    generator = torch.Generator().manual_seed(seed)

    def weight(rows: int, cols: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, cols, generator=generator).mul_(gain / cols**0.5).bfloat16()

    return weight


def _projections(spec: ModelSpec, weight: MakeWeight, prefix: str) -> Weights:
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return {
        f"{prefix}.self_attn.q_proj.weight": weight(q_rows, spec.hidden, QUERY_KEY_GAIN),
        f"{prefix}.self_attn.k_proj.weight": weight(kv_rows, spec.hidden, QUERY_KEY_GAIN),
        f"{prefix}.self_attn.v_proj.weight": weight(kv_rows, spec.hidden),
        f"{prefix}.self_attn.o_proj.weight": weight(spec.hidden, q_rows, ATTENTION_OUT_GAIN),
        f"{prefix}.mlp.gate_proj.weight": weight(spec.intermediate, spec.hidden),
        f"{prefix}.mlp.up_proj.weight": weight(spec.intermediate, spec.hidden),
        f"{prefix}.mlp.down_proj.weight": weight(spec.hidden, spec.intermediate),
    }


def _llama_weights(spec: ModelSpec, weight: MakeWeight) -> Weights:
    ones = torch.ones(spec.hidden).bfloat16()
    weights = {
        "model.embed_tokens.weight": weight(spec.vocab_size, spec.hidden, spec.hidden**0.5),
        "model.norm.weight": ones.clone(),
        "lm_head.weight": weight(spec.vocab_size, spec.hidden, LOGITS_GAIN),
    }
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}"
        weights |= _projections(spec, weight, prefix)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}.{norm}.weight"] = ones.clone()
    return weights


def _gemma3_weights(spec: ModelSpec, weight: MakeWeight) -> Weights:
    # Gemma's norms scale by 1 + weight, and it multiplies embeddings by sqrt(hidden).
    zeros = torch.zeros(spec.hidden).bfloat16()
    weights = {
        "model.embed_tokens.weight": weight(spec.vocab_size, spec.hidden),
        "model.norm.weight": zeros.clone(),
        "lm_head.weight": weight(spec.vocab_size, spec.hidden, LOGITS_GAIN),
    }
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}"
        weights |= _projections(spec, weight, prefix)
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            weights[f"{prefix}.{norm}_layernorm.weight"] = zeros.clone()
        # Queries and keys are normed per head, so the sharpness has to come from those norms.
        for norm in ("q_norm", "k_norm"):
            weights[f"{prefix}.self_attn.{norm}.weight"] = torch.full((spec.head_dim,), QUERY_KEY_GAIN - 1).bfloat16()
    return weights
