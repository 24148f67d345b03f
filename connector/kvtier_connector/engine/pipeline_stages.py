"""Whether the stages of a pipeline hold the same KV: one arena row has a region of one size for each rank."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_WITHOUT_LAYERS = ("ngram", "ngram_gpu", "suffix")
"""Ways of speculation that keep no KV of their own."""


def check_pipeline_stages(config: "VllmConfig") -> None:
    """Refuse stages that differ: vLLM's scheduler describes all ranks by the first one's KV cache.

    On the others no load or store would match its tensors: nothing would hit, with a warning for each.

    Raises:
        ConfigError: Stages have other numbers or kinds of layers, or the last one has those of a draft model too.
    """
    num_stages = config.parallel_config.pipeline_parallel_size
    if num_stages == 1:
        return
    key = "pipeline_parallel_size"
    draft = config.speculative_config
    if draft is not None and draft.method not in _WITHOUT_LAYERS:
        remedy = "the draft model's KV is on the last stage only; use --pipeline-parallel-size 1, or run without kvtier"
        raise ConfigError(key, num_stages, "vLLM", remedy)
    layers = _layer_kinds(config)
    stages = [Counter(layers[begin:end]) for begin, end in _bounds(len(layers), num_stages)]
    if any(stage != stages[0] for stage in stages):
        sizes = ", ".join(" + ".join(f"{count} {kind}" for kind, count in sorted(stage.items())) for stage in stages)
        remedy = (
            f"its stages have different layers ({sizes}), and kvtier needs as much KV in each; choose a number that "
            "divides them, set VLLM_PP_LAYER_PARTITION to equal parts, or run without kvtier"
        )
        raise ConfigError(key, num_stages, "vLLM", remedy)


def _layer_kinds(config: "VllmConfig") -> Sequence[str]:
    """Return what kind of attention each layer has, in order; models of one kind do not say."""
    model = config.model_config
    kinds: Sequence[str] | None = getattr(model.hf_text_config, "layer_types", None)
    num_layers = model.get_total_num_hidden_layers()
    return kinds if kinds is not None and len(kinds) == num_layers else ["attention"] * num_layers


def _bounds(num_layers: int, num_stages: int) -> list[tuple[int, int]]:
    from vllm.distributed.utils import get_pp_indices

    return [get_pp_indices(num_layers, stage, num_stages) for stage in range(num_stages)]
