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
from dataclasses import asdict
from pathlib import Path

from safetensors.torch import save_file

from benchmarks.harness.model_families import FAMILIES, common_config, weight_maker
from benchmarks.harness.model_specs import ModelSpec
from benchmarks.harness.tokenizer import SPECIAL_TOKENS, write_tokenizer

MODELS_DIR = Path(__file__).resolve().parents[2] / ".models"


def cached_model(name: str, spec: ModelSpec) -> Path:
    """Return the folder of a model under `.models/`, made on first use."""
    path = MODELS_DIR / f"{name}-{_digest(spec)}"
    if not path.exists():
        MODELS_DIR.mkdir(exist_ok=True)
        for old in set(MODELS_DIR.glob(f"{name}-*")) - {path}:  # another process may just have made it, and read it
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


def _digest(spec: ModelSpec) -> str:
    """Return a short name of the spec and of the code that makes models of it."""
    sources = ("models.py", "model_families.py", "tokenizer.py", "prompts.py")
    code = b"".join(Path(__file__).with_name(name).read_bytes() for name in sources)
    return hashlib.sha256(json.dumps([asdict(spec), sys.version_info[:2]]).encode() + code).hexdigest()[:12]
