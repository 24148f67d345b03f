"""Writes what is pinned as a file of prompts, which `apply` reads again without a difference."""

from collections.abc import Iterable, Sequence
from typing import Any

import yaml

from kvtier.core.limits import SET_LABEL
from kvtier.core.ttl import duration_text
from kvtier.library.declared.file_schema import DEFAULT_SET
from kvtier.library.rendering.recipe import Recipe, SourceKind
from kvtier.library.values.public_values import Prompt


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML has no types  # type: ignore[misc]  # PyYAML has no types
    """Writes text of several lines as it is, without aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _write_text(dumper: yaml.SafeDumper, text: str) -> Any:
    # YAML reads a next line character as a line break, except in double quotes.
    style = '"' if "\x85" in text else "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


class _Tokens(list[int]):
    """Token ids, on few lines."""


_Dumper.add_representer(str, _write_text)
_Dumper.add_representer(
    _Tokens, lambda dumper, ids: dumper.represent_sequence("tag:yaml.org,2002:seq", ids, flow_style=True)
)


def declared_yaml(prompts: Iterable[tuple[Prompt, Sequence[int]]]) -> str:
    """Return YAML: one document for each set, and one for the prompts of none.

    Args:
        prompts: With their recipes, and the token ids of those that were pinned by them.
    """
    sets: dict[str, list[dict[str, Any]]] = {}
    for prompt, tokens in prompts:
        sets.setdefault(prompt.labels.get(SET_LABEL, ""), []).append(_entry(prompt, tokens))
    documents = [_document(name, entries) for name, entries in sets.items()] or [{"prompts": []}]
    return str(yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100))


def _document(name: str, entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return ({"set": name} if name != DEFAULT_SET else {}) | {"prompts": list(entries)}


def _entry(prompt: Prompt, tokens: Sequence[int]) -> dict[str, Any]:
    recipe = Recipe.from_values(prompt.recipe) if prompt.recipe else Recipe(kind=SourceKind.TOKENS)
    entry: dict[str, Any] = {"name": prompt.name}
    if recipe.kind is SourceKind.TOKENS:
        entry["tokens"] = _Tokens(tokens)
    else:
        entry[recipe.kind.value] = recipe.content
    optional = {
        "tools": recipe.tools,
        "chat_template_kwargs": recipe.chat_template_kwargs,
        "model": prompt.lora_name or prompt.model,
        "cache_salt": prompt.cache_salt,
        "ttl": duration_text(prompt.ttl_s) if prompt.ttl_s else None,
        "sliding": prompt.sliding,
        "priority": prompt.priority,
        "public": prompt.public,
        "owner": prompt.owner,
        "labels": {key: value for key, value in prompt.labels.items() if key != SET_LABEL},
    }
    return entry | {name: value for name, value in optional.items() if value}
