"""Versions of prompts: what replaces a pin, and what it has replaced (ADR 27). `limits.version_name` names them."""

from dataclasses import replace

from kvtier.core import limits
from kvtier.errors import InvalidArgumentError
from kvtier.ledger import PromptRow
from kvtier.prompts.book import PromptBook, difference


def old_versions(prompts: PromptBook, name: str) -> list[tuple[int, PromptRow]]:
    """Return the versions that a prompt has replaced and that are known still, by number."""
    return [(number, each) for number, each in _versions(prompts, name) if not each.pinned]


def _versions(prompts: PromptBook, name: str) -> list[tuple[int, PromptRow]]:
    found = []
    for each in prompts.after(f"{name}@", len(prompts)):
        if not each.name.startswith(f"{name}@"):
            break
        version = limits.parse_version(each.name)
        if version is not None and version[0] == name:
            found.append((version[1], each))
    return sorted(found, key=lambda version: version[0])


def beside(prompts: PromptBook, wanted: PromptRow) -> tuple[PromptRow, PromptRow | None]:
    """Return the version that is to take a pin's name, and the replacement that it takes the place of.

    The same replacement again keeps its id, and with it its bindings and chunks.

    Raises:
        InvalidArgumentError: It is not rendered, or the name is too long for versions.
    """
    if not wanted.tokens:
        raise InvalidArgumentError("tokens", [], "a durable pin is replaced by tokens; render the prompt first")
    staged = prompts.replacements.get(wanted.name)
    # Above all that has such a name, pins of others from before there were versions included; the number below stays
    # free for the present version.
    taken = [number for number, each in _versions(prompts, wanted.name) if staged is None or each.name != staged.name]
    name = limits.version_name(wanted.name, max(taken, default=0) + 2)
    limits.check_name(name)
    version = replace(wanted, name=name, origin="replacement")
    if staged is not None and difference(staged, wanted) is None:
        version = replace(version, name=staged.name, pin_id=staged.pin_id, created_unix_s=staged.created_unix_s)
    return version, staged
