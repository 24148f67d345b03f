"""What files of prompts would change in what the daemon has: decided here, printed by the command, done by `apply`."""

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

import xxhash

from kvtier.core.limits import SET_LABEL
from kvtier.core.tokens import TokenIds
from kvtier.library.declared.documents import NO_VALUE, DeclaredError
from kvtier.library.declared.entries import DeclaredPrompt
from kvtier.library.declared.files import DeclaredSet
from kvtier.library.rendering.recipe import Recipe, SourceKind
from kvtier.library.rendering.vllm_client import ServedModel
from kvtier.library.values.public_values import Prompt, PromptState

_HOW = ("ttl_s", "sliding", "priority", "public", "owner", "labels")


class ChangeKind(StrEnum):
    CREATE = "create"
    """There is no pin of this name."""
    REPLACE = "replace"
    """Its content is another: a new version."""
    UPDATE = "update"
    """How it is pinned changes, or for which model."""
    UNPIN = "unpin"
    """With pruning: a pin of the set that no file names."""
    UNCHANGED = "unchanged"


@dataclass(frozen=True, kw_only=True)
class Change:
    """One prompt.

    Attributes:
        declared: As the files want it; None for UNPIN.
        standing: As it is, or as what is to replace it will be; None for CREATE.
        fields: For UPDATE and REPLACE: what differs, by name, as (before, after).
    """

    kind: ChangeKind
    name: str
    declared: DeclaredPrompt | None = None
    standing: Prompt | None = None
    fields: Mapping[str, tuple[object, object]]


def differences(
    declared: DeclaredSet, prompts: Iterable[Prompt], *, prune: bool, served: Mapping[str, ServedModel] | None = None
) -> list[Change]:
    """Return one change for each declared prompt, and with `prune` for each pin of the same sets beside them.

    Args:
        served: What vLLM serves, by name, where `needs_served` asks for it: a model may have several names, of which
            pins have the first, and a name may be an adapter's.
    """
    known = {prompt.name: prompt for prompt in prompts}
    changes = [_change(each, known, served or {}) for each in declared.prompts.values()]
    ending = not_in_files(declared, known.values()) if prune else []
    changes += [
        Change(kind=ChangeKind.UNPIN, name=name, standing=_newest(known[name], known), fields={}) for name in ending
    ]
    return sorted(changes, key=lambda change: change.name)


def not_in_files(declared: DeclaredSet, prompts: Iterable[Prompt]) -> list[str]:
    """Return the names of operators' pins of the same sets that no file names."""
    known = {prompt.name: prompt for prompt in prompts}
    return sorted(
        prompt.name
        for prompt in known.values()
        if set_of(_newest(prompt, known)) in declared.set_names
        and prompt.pinned
        and prompt.origin == "named"
        and prompt.name not in declared.prompts
    )


def of_other_sets(changes: Iterable[Change]) -> Iterator[DeclaredError]:
    """Yield an error for each declared prompt that another set has already."""
    for change in changes:
        wanted, standing = change.declared, change.standing
        owning = set_of(standing) if standing is not None else ""
        if wanted is not None and owning not in ("", wanted.set_name):
            shown = f"the set {wanted.set_name!r}" if wanted.set_name else "no set"
            yield wanted.error(
                NO_VALUE,
                f"belongs to the set {owning!r}, and this file is of {shown}; take it out of the file, or move it "
                "here with --take-over",
            )


def set_of(prompt: Prompt) -> str:
    """Return the set that a prompt belongs to; empty: none."""
    return prompt.labels.get(SET_LABEL, "")


def _newest(pin: Prompt, known: Mapping[str, Prompt]) -> Prompt:
    """Return what is to replace a pin, else the pin: it is as the last client wanted it, its set too."""
    return known.get(pin.replacement, pin)


def needs_served(change: Change) -> bool:
    """Return whether only vLLM knows if a pin is for the model that is wanted."""
    wanted, standing = change.declared, change.standing
    if wanted is None or standing is None or wanted.model in ("", standing.lora_name):
        return False
    return wanted.model != standing.model or standing.state is PromptState.WAITING


def _change(wanted: DeclaredPrompt, known: Mapping[str, Prompt], served: Mapping[str, ServedModel]) -> Change:
    standing = known.get(wanted.name)
    if standing is None or not standing.pinned or standing.origin != "named":
        return Change(kind=ChangeKind.CREATE, name=wanted.name, declared=wanted, standing=None, fields={})
    standing = _newest(standing, known)
    fields = {
        name: (getattr(standing, name), getattr(wanted, name))
        for name in _HOW
        if getattr(standing, name) != getattr(wanted, name)
    }
    kind = ChangeKind.UPDATE if fields else ChangeKind.UNCHANGED
    if not _has_content(standing, wanted, served.get(wanted.model)):
        kind = ChangeKind.REPLACE
    return Change(kind=kind, name=wanted.name, declared=wanted, standing=standing, fields=fields)


def _has_content(standing: Prompt, wanted: DeclaredPrompt, served: ServedModel | None) -> bool:
    if standing.cache_salt != wanted.cache_salt:
        return False
    if served is not None and served.lora_name and standing.state is not PromptState.UNRENDERED:
        is_of_model = standing.lora_name == served.lora_name  # token ids may have been pinned before vLLM ran
    else:
        is_alias = served is not None and served.base == standing.model and not standing.lora_name
        is_of_model = is_alias or wanted.model in ("", standing.model, standing.lora_name)
    if not is_of_model:
        return False
    if wanted.recipe.kind is SourceKind.TOKENS:
        return standing.tokens_digest == TokenIds(wanted.tokens).digest
    return standing.source_digest == source_digest(wanted.recipe)


def source_digest(recipe: Recipe) -> str:
    """Return what the daemon says of a prompt with this source."""
    return xxhash.xxh3_128_hexdigest(recipe.to_json().encode())


def source_lines(recipe: Recipe | None) -> list[str]:
    """Return a source as lines for people to compare; other than text as indented JSON."""
    if recipe is None or recipe.kind is SourceKind.TOKENS:
        return []
    lines = recipe.content.splitlines() if isinstance(recipe.content, str) else _json_lines(recipe.content)
    for name, value in (("tools", recipe.tools), ("chat_template_kwargs", recipe.chat_template_kwargs)):
        lines += [f"{name}:", *_json_lines(value)] if value else []
    return lines


def source_diff(name: str, before: Recipe | None, after: Recipe | None) -> Iterator[str]:
    """Yield a unified diff of two sources."""
    lines = difflib.unified_diff(
        source_lines(before), source_lines(after), f"{name} (pinned)", f"{name} (declared)", lineterm=""
    )
    yield from lines


def _json_lines(value: object) -> list[str]:
    return json.dumps(value, indent=2, ensure_ascii=False).splitlines()
