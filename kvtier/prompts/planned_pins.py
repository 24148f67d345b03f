"""What a pin that is asked for changes, and whether it still may: decided before anything is written."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from kvtier.core.limits import SET_LABEL
from kvtier.errors import PromptExistsError, PromptNotFoundError
from kvtier.ledger import PromptRow
from kvtier.prompts.book import PromptBook, RequestedPin, changed_how, difference
from kvtier.prompts.versions import beside


@dataclass(frozen=True, kw_only=True)
class PlannedPin:
    """One pin.

    Attributes:
        prompt: As it will be.
        old: Whose place it takes: the prompt of its name before.
        ended: A replacement under way, which comes to nothing.
        also: The pin that `prompt` is to replace, as it will be; None: it stays as it is.
    """

    prompt: PromptRow
    old: PromptRow | None = None
    ended: PromptRow | None = None
    also: PromptRow | None = None


def plan_pin(
    prompts: PromptBook, requested: RequestedPin, stays: Callable[[PromptRow], bool], now_unix_s: float
) -> PlannedPin:
    """Decide.

    Args:
        stays: Says whether a pin serves until its replacement is durable.

    Raises:
        InvalidArgumentError, PromptExistsError: As `PromptBook.draft`, `beside`.
    """
    staged = prompts.replacements.get(requested.name)
    if staged is not None and not requested.tokens and difference(staged, requested) is None:
        return _plan_how(prompts, staged, requested, now_unix_s)
    prompt, old = prompts.draft(requested, now_unix_s)
    if old is None or old.pin_id == prompt.pin_id or not _serves_on(old, prompt, stays):
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
        also=replace(pin, expires_unix_s=prompt.expires_unix_s) if outlives else None,
    )


def _serves_on(old: PromptRow, prompt: PromptRow, stays: Callable[[PromptRow], bool]) -> bool:
    """Return whether a pin stays until what replaces it is durable: also while that is not rendered."""
    is_rendered_pin = old.pinned and old.origin == "named" and bool(old.tokens)
    return stays(old) or (is_rendered_pin and not prompt.tokens)


def _plan_how(prompts: PromptBook, staged: PromptRow, requested: RequestedPin, now_unix_s: float) -> PlannedPin:
    """Plan for the source of a replacement that is under way: it goes on, and it and its pin are pinned as asked."""
    how, pin = changed_how(staged, requested, now_unix_s), prompts.find(requested.name)
    return PlannedPin(
        prompt=replace(staged, **how), old=staged, also=replace(pin, **how) if pin is not None and pin.pinned else None
    )


@dataclass(frozen=True, kw_only=True)
class ExpectedPin:
    """A pin as a client has seen it: ExpectedPin of proto/kvtier/v1/cache.proto.

    Attributes:
        absent: There is no pin of operators.
        pin_id: Id of the pin, or of what is to replace it; empty: any.
        set: The set that its label names; empty: none.
    """

    absent: bool = False
    pin_id: str = ""
    set: str = ""


def check_expected(
    prompts: PromptBook, expected: Mapping[str, ExpectedPin], requested: Iterable[RequestedPin], unpinned: Iterable[str]
) -> None:
    """Compare what a client has seen with what there is, by name. What is done already is no reason to refuse.

    Raises:
        PromptExistsError: There is another pin where none was expected.
        PromptNotFoundError: There is none, or another one.
    """
    for wanted in requested:
        if (seen := expected.get(wanted.name)) is None:
            continue
        pin = prompts.find(wanted.name)
        if pin is None or not pin.pinned or pin.origin != "named":
            if not seen.absent:
                raise PromptNotFoundError(wanted.name)
        elif not _is_as_seen(prompts, pin, seen, wanted):
            raise (PromptExistsError if seen.absent else PromptNotFoundError)(wanted.name)
    for name in unpinned:
        if (seen := expected.get(name)) is None:
            prompts.get(name)
            continue
        pin = prompts.find(name)
        is_over = pin is None or not pin.pinned
        if pin is not None and not is_over and (pin.origin != "named" or not _is_as_seen(prompts, pin, seen)):
            raise PromptNotFoundError(name)


def _is_as_seen(prompts: PromptBook, pin: PromptRow, seen: ExpectedPin, wanted: RequestedPin | None = None) -> bool:
    newest = prompts.replacements.get(pin.name, pin)
    if dict(newest.labels).get(SET_LABEL, "") != seen.set:
        return False
    is_seen = not seen.absent and (not seen.pin_id or prompts.has_pin(pin.name, seen.pin_id))
    return is_seen or (wanted is not None and _is_same(newest, wanted))


def _is_same(prompt: PromptRow, wanted: RequestedPin) -> bool:
    """Return whether a prompt is the one that is wanted: by its source, if one of them is not rendered yet."""
    if prompt.tokens and wanted.tokens:
        return difference(prompt, wanted) is None
    models = {prompt.model, prompt.lora_name} & {wanted.model, wanted.lora_name} - {""}
    is_of_model = bool(models) or "" in (prompt.model, wanted.model)
    return is_of_model and (prompt.recipe_json, prompt.cache_salt) == (wanted.recipe_json, wanted.cache_salt)
