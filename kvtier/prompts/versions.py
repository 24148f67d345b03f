"""Versions of prompts: what replaces a pin, and what it has replaced (ADR 27). `limits.version_name` names them."""

from dataclasses import replace

from kvtier.core import limits
from kvtier.ledger import PromptRow
from kvtier.prompts.book import PromptBook

_MAX_VERSIONS = 1000
_CONTENT = ("tokens", "model", "lora_name", "lora_path", "cache_salt")


def old_versions(prompts: PromptBook, name: str) -> list[tuple[int, PromptRow]]:
    """Return the versions that a prompt has replaced and that are known still, by number."""
    found = []
    for each in prompts.after(f"{name}@", _MAX_VERSIONS):
        version = limits.parse_version(each.name)
        if version is not None and version[0] == name and not each.pinned:
            found.append((version[1], each))
    return sorted(found, key=lambda version: version[0])


def beside(prompts: PromptBook, wanted: PromptRow) -> tuple[PromptRow, PromptRow | None]:
    """Return the version that is to take a pin's name, and the replacement that it takes the place of.

    The same replacement again keeps its id, and with it its bindings and chunks.

    Raises:
        InvalidArgumentError: The name is too long for versions.
    """
    old = old_versions(prompts, wanted.name)
    # One above the present version, which is one above the last that it replaced.
    name = limits.version_name(wanted.name, old[-1][0] + 2 if old else 2)
    limits.check_name(name)
    version, staged = replace(wanted, name=name, origin="replacement"), prompts.replacements.get(wanted.name)
    if staged is not None and all(getattr(staged, field) == getattr(wanted, field) for field in _CONTENT):
        version = replace(version, name=staged.name, pin_id=staged.pin_id, created_unix_s=staged.created_unix_s)
    return version, staged
