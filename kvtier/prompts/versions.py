"""Versions of prompts: what replaces a pin, and what it has replaced (ADR 27). `limits.version_name` names them."""

from collections.abc import Callable
from dataclasses import replace

from kvtier.core import limits
from kvtier.errors import PromptNotFoundError
from kvtier.ledger import PromptRow
from kvtier.prompts.book import PromptBook, difference, how_of


def family(prompts: PromptBook, name: str) -> list[PromptRow]:
    """Return a prompt's versions, old ones and what is to replace it, by number."""
    return [each for _, each in _versions(prompts, name)]


def old_versions(prompts: PromptBook, name: str) -> list[tuple[int, PromptRow]]:
    """Return the versions that a prompt has replaced and that are known still, by number."""
    return [(number, each) for number, each in _versions(prompts, name) if not each.pinned]


def old_version(prompts: PromptBook, name: str, number: int, may_see: Callable[[PromptRow], bool]) -> PromptRow:
    """Return a prompt's version. `may_see` says whether a prompt exists for the caller.

    Raises:
        PromptNotFoundError: It is not known; the error names those that are.
    """
    if (found := prompts.find(limits.version_name(name, number))) is not None and may_see(found):
        return found
    known = [each.name for _, each in old_versions(prompts, name) if may_see(each)]
    raise PromptNotFoundError(limits.version_name(name, number), known)


def _versions(prompts: PromptBook, name: str) -> list[tuple[int, PromptRow]]:
    found = []
    for each in prompts.beginning_with(f"{name}@"):
        version = limits.parse_version(each.name)
        if version is not None and version[0] == name:
            found.append((version[1], each))
    return sorted(found, key=lambda version: version[0])


def beside(prompts: PromptBook, wanted: PromptRow) -> tuple[PromptRow, PromptRow | None]:
    """Return the version that is to take a pin's name, and the replacement that it takes the place of.

    The same replacement again keeps its id, and with it its bindings and chunks.

    Raises:
        InvalidArgumentError: The name is too long for versions.
    """
    staged = prompts.replacements.get(wanted.name)
    # Above all that has such a name, pins of others from before there were versions included; the number below stays
    # free for the present version.
    taken = [number for number, each in _versions(prompts, wanted.name) if staged is None or each.name != staged.name]
    name = limits.version_name(wanted.name, max(taken, default=0) + 2)
    limits.check_name(name)
    if staged is not None and difference(staged, wanted) is None:
        return replace(staged, recipe_json=wanted.recipe_json or staged.recipe_json, **how_of(wanted)), staged
    return replace(wanted, name=name, origin="replacement"), staged
