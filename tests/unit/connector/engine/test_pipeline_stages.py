"""Pipelines whose stages hold different KV are refused at the start; they never hit, and warned of each job."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.errors import ConfigError
from kvtier_connector.engine.pipeline_stages import check_pipeline_stages


def config(num_layers: int, num_stages: int, *, layer_types: list[str] | None = None, method: str | None = None) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=num_stages),
        speculative_config=None if method is None else SimpleNamespace(method=method),
        model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(layer_types=layer_types), get_total_num_hidden_layers=lambda: num_layers
        ),
    )


def test_equal_stages_are_taken() -> None:
    check_pipeline_stages(config(31, 1, method="eagle"))
    check_pipeline_stages(config(32, 4))
    check_pipeline_stages(config(32, 2, method="ngram"))
    check_pipeline_stages(config(4, 2, layer_types=["full", "window"] * 2))


def test_stages_of_other_sizes_are_refused_with_what_they_have() -> None:
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size = 3.*11 attention, 11 attention, 10 attention"):
        check_pipeline_stages(config(32, 3))


def test_a_partition_that_an_operator_names_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "20,12")
    with pytest.raises(ConfigError, match="20 attention, 12 attention"):
        check_pipeline_stages(config(32, 2))
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "16,16")
    check_pipeline_stages(config(32, 2))


def test_stages_with_other_kinds_of_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"1 full \+ 1 window, 2 window"):
        check_pipeline_stages(config(4, 2, layer_types=["full", "window", "window", "window"]))


def test_a_draft_model_behind_the_last_stage_is_refused() -> None:
    with pytest.raises(ConfigError, match="draft model's KV is on the last stage only"):
        check_pipeline_stages(config(32, 2, method="eagle"))
