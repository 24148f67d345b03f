"""What other parts of the connector take from vLLM's configuration."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvtier_connector.engine.facts import EngineFacts


def facts_of(*, served: object = None, num_groups: int = 1, known_tokens: int | None = None) -> EngineFacts:
    vllm_config: Any = SimpleNamespace(
        model_config=SimpleNamespace(served_model_name=served, model="/models/llama"),
        cache_config=SimpleNamespace(kv_cache_size_tokens=known_tokens, block_size=16),
    )
    others: Any = SimpleNamespace(num_blocks=100, kv_cache_groups=[None] * num_groups)
    nothing: Any = None
    return EngineFacts(
        settings=nothing,
        vllm_config=vllm_config,
        kv_cache_config=others,
        offloading=nothing,
        group_configs=(),
    )


@pytest.mark.parametrize(
    ("served", "names"),
    [
        (None, ["/models/llama"]),
        ([], ["/models/llama"]),
        ("llama", ["llama", "/models/llama"]),
        (["a", "b"], ["a", "b", "/models/llama"]),
        (["/models/llama", "b"], ["/models/llama", "b"]),
    ],
)
def test_a_model_has_the_names_it_is_served_under_and_its_path(served: object, names: list[str]) -> None:
    assert facts_of(served=served).model_names == names


@pytest.mark.parametrize(
    ("num_groups", "known_tokens", "num_tokens"), [(1, None, 1600), (3, None, 533), (3, 0, 533), (3, 777, 777)]
)
def test_the_groups_of_a_model_share_its_blocks(num_groups: int, known_tokens: int | None, num_tokens: int) -> None:
    assert facts_of(num_groups=num_groups, known_tokens=known_tokens).cache_tokens() == num_tokens
