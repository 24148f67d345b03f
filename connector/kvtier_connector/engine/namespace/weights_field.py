"""The field `weights` of a namespace: what vLLM reads as it loads the model, by its content where that can be read."""

import hashlib
import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs

from kvtier_connector.engine.namespace.canonical_json import canonical
from kvtier_connector.engine.vllm_compat import built_max_model_len
from kvtier_connector.engine.weights.weights_fingerprint import fingerprint_files, local_files, weight_files
from kvtier_connector.settings import WeightsFingerprint

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_ELSEWHERE = frozenset({"tensorizer"})
"""Formats whose loader reads other files than those of the model's folder."""
_READ_FORMATS = _ELSEWHERE | {
    "auto",
    "bitsandbytes",
    "dummy",
    "fastsafetensors",
    "gguf",
    "hf",
    "instanttensor",
    "mistral",
    "npcache",
    "pt",
    "runai_streamer",
    "runai_streamer_sharded",
    "safetensors",
    "sharded_state",
}
"""Formats whose weights are those that the field `weights` is made from; others may be of another process or server."""
_SOURCE_OPTIONS = ("tensorizer_uri", "tensorizer_dir", "pattern")
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_OTHER_MODELS = ("text_model_id", "audio_model_id")
"""Of the model's configuration: models whose weights vLLM loads into parts of it (Ultravox)."""

logger = logging.getLogger(__name__)

_Read = Callable[[str, str | None], object]
"""Fingerprints the weights of another model, by its name and revision."""


def weights_field(vllm_config: "VllmConfig", mode: WeightsFingerprint, cache_path: Path | None = None) -> str:
    """Return the canonical `weights` field. Reads files: background thread only."""
    model, load, load_format = vllm_config.model_config, vllm_config.load_config, _load_format(vllm_config)
    if load_format == "dummy":
        return canonical({"load_format": "dummy", "seed": model.seed})
    source = _source_of_weights(model, load) | _temperature_tuning(model)
    entries: list[dict[str, object]] = []
    try:
        folder = local_files(model.model, model.revision, getattr(load, "download_dir", None))
        if getattr(model, "multimodal_config", None) is not None:
            source |= _processor_files(folder)
        if load_format not in _ELSEWHERE:
            cache_path = cache_path or platformdirs.user_cache_path("kvtier") / "fingerprints.json"
            entries = fingerprint_files(weight_files(folder, load_format), mode, cache_path)
            read = partial(_other_weights, vllm_config, load_format, mode, cache_path)
            source |= _draft_weights(vllm_config, read) | _weights_of_parts(model.hf_config, read)
    except OSError as exc:
        logger.warning("kvtier: cannot read the weights of %s (%s)", model.model, exc)
    if not entries:
        logger.warning(
            "kvtier: no weight files found for %s; chunks are distinguished by its name and revision only: a changed "
            "model under the same name would not be noticed",
            model.model,
        )
        return canonical({"unreadable": model.model, "revision": model.revision, "load_format": load_format, **source})
    return canonical({"files": entries, "load_format": load_format, "mode": mode.value, **source})


def weights_are_known(vllm_config: "VllmConfig") -> bool:
    """Return whether `weights_field` says what vLLM computes with; if not, its KV must not outlive the engine."""
    return _load_format(vllm_config) in _READ_FORMATS


def _load_format(vllm_config: "VllmConfig") -> str:
    load_format = vllm_config.load_config.load_format
    return str(getattr(load_format, "value", load_format))


def _draft_weights(vllm_config: "VllmConfig", read: _Read) -> dict[str, object]:
    """Return the field of a draft model's weights, where that is another model: its KV is stored too. Reads files."""
    speculative = getattr(vllm_config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    if draft is None or draft.model == vllm_config.model_config.model:
        return {}
    return {"draft": read(draft.model, draft.revision)}


def _weights_of_parts(hf_config: Any, read: _Read) -> dict[str, object]:
    """Return the field of the models that vLLM loads into parts of this one. Reads files.

    Source: `UltravoxModel.__init__` of vLLM 0.32: no revision.
    """
    named = {key: getattr(hf_config, key, None) for key in _OTHER_MODELS}
    parts = {key: read(name, None) for key, name in named.items() if isinstance(name, str)}
    return {"parts": parts} if parts else {}


def _other_weights(
    vllm_config: "VllmConfig",
    load_format: str,
    mode: WeightsFingerprint,
    cache_path: Path,
    name: str,
    revision: str | None,
) -> object:
    try:
        folder = local_files(name, revision, getattr(vllm_config.load_config, "download_dir", None))
        return fingerprint_files(weight_files(folder, load_format), mode, cache_path)
    except OSError as exc:
        logger.warning("kvtier: cannot read the weights of %s, which this model loads too (%s)", name, exc)
        return {"unreadable": name, "revision": revision}


def _source_of_weights(model: Any, load: Any) -> dict[str, object]:
    """Return what says where vLLM reads the weights, beside the name of the model; as a digest, for it may be secret.

    Other options of loaders say how fast, and with which keys of a store.
    """
    options = _as_mapping(getattr(load, "model_loader_extra_config", None))
    nested = _as_mapping(options.get("tensorizer_config"))
    named = {name: options.get(name) or nested.get(name) for name in _SOURCE_OPTIONS}
    named["model_weights"] = getattr(model, "model_weights", None)
    given = {name: str(value) for name, value in named.items() if value}
    return {"source": hashlib.sha256(canonical(given).encode()).hexdigest()} if given else {}


def _as_mapping(options: Any) -> Mapping[str, Any]:
    return options if isinstance(options, Mapping) else getattr(options, "__dict__", {})


def _processor_files(folder: Path) -> dict[str, object]:
    """Return digests of the files that say what vLLM makes of an image: its block hash has the image as it came.

    Source: `transformers_utils/processor.py` of vLLM 0.32.
    """
    files = (folder / name for name in _PROCESSOR_FILES) if folder.is_dir() else ()
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.exists()}
    return {"processor": found} if found else {}


def _temperature_tuning(model: Any) -> dict[str, object]:
    """Return Llama 4's tuning of queries by position, which vLLM decides by options of the engine. Reads a file.

    Source: `Llama4ForCausalLM.__init__` of vLLM 0.32.
    """
    text_config = getattr(model, "hf_text_config", model.hf_config)
    if not str(getattr(text_config, "model_type", "")).startswith("llama4"):
        return {}
    chosen = {**(model.try_get_generation_config() or {}), **(model.override_generation_config or {})}
    return {"temperature_tuning": chosen.get("attn_temperature_tuning", built_max_model_len(model) > 32768)}
