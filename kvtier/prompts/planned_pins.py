"""What a pin that is asked for changes: decided before anything is written."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvtier.ledger import PromptRow
from kvtier.prompts.book import PromptBook, RequestedPin
from kvtier.prompts.versions import beside


@dataclass(frozen=True, kw_only=True)
class PlannedPin:
    """One pin.

    Attributes:
        prompt: As it will be.
        old: Whose place it takes: the prompt of its name before.
        ended: A replacement under way, which comes to nothing.
        extended: The pin that `prompt` is to replace, which must not end before that.
    """

    prompt: PromptRow
    old: PromptRow | None = None
    ended: PromptRow | None = None
    extended: PromptRow | None = None


def plan_pin(
    prompts: PromptBook, requested: RequestedPin, stays: Callable[[PromptRow], bool], now_unix_s: float
) -> PlannedPin:
    """Decide.

    Args:
        stays: Says whether a pin serves until its replacement is durable.

    Raises:
        InvalidArgumentError, PromptExistsError: As `PromptBook.draft`, `beside`.
    """
    prompt, old = prompts.draft(requested, now_unix_s)
    staged = prompts.replacements.get(prompt.name)
    if old is None or old.pin_id == prompt.pin_id or not stays(old):
        return PlannedPin(prompt=prompt, old=old, ended=staged)
    pin = old
    prompt, staged = beside(prompts, prompt)
    is_same = staged is not None and staged.name == prompt.name
    # It must not end before what replaces it.
    outlives = pin.expires_unix_s and not 0 < prompt.expires_unix_s <= pin.expires_unix_s
    return PlannedPin(
        prompt=prompt,
        old=staged if is_same else None,
        ended=None if is_same else staged,
        extended=replace(pin, expires_unix_s=prompt.expires_unix_s) if outlives else None,
    )
