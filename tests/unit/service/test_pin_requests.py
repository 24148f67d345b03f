"""What may be pinned: each bound holds where it says, and is named by its field."""

from typing import Any

import pytest

from kvtier.core import limits
from kvtier.errors import InvalidArgumentError
from kvtier.prompts.book import RequestedPin

RECIPE = '{"kind": "text"}'


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "a" * 128},
        {"name": "0/b_c.d-e@f"},
        {"tokens": (), "recipe_json": RECIPE},
        {"tokens": (1,), "recipe_json": RECIPE},
        {"tokens": (1, 2, 3, 4)},
        {"lora_name": "sql", "lora_path": "/loras/sql"},
        {"priority": 100},
        {"priority": -100},
        {"public": True},
    ],
)
def test_what_lies_within_the_bounds_is_accepted(monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]) -> None:
    monkeypatch.setattr(limits, "MAX_TOKENS", 4)
    RequestedPin(**({"name": "p", "tokens": (1,)} | fields))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"name": "a" * 129}, "name"),
        ({"name": ""}, "name"),
        ({"name": "-p"}, "name"),
        ({"name": "p\n"}, "name"),
        ({"name": "p q"}, "name"),
        ({"tokens": ()}, "tokens"),
        ({"tokens": (1, 2, 3, 4, 5)}, "tokens"),
        ({"tokens": (1, 2, 3, 4, 5), "recipe_json": RECIPE}, "tokens"),
        ({"lora_name": "sql"}, "lora_path"),
        ({"lora_path": "/loras/sql"}, "lora_path"),
        ({"priority": 101}, "priority"),
        ({"priority": -101}, "priority"),
        ({"public": True, "cache_salt": "s"}, "public"),
    ],
)
def test_what_lies_beyond_is_refused_by_field(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], field: str
) -> None:
    monkeypatch.setattr(limits, "MAX_TOKENS", 4)
    with pytest.raises(InvalidArgumentError) as refused:
        RequestedPin(**({"name": "p", "tokens": (1,)} | fields))
    assert refused.value.field == field
