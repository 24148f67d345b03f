"""What a caller with an owner sees and may change: prompts of that owner, and nothing of others (ADR 38)."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from kvtier._pb import cache_pb2 as pb
from kvtier.access.caller import Caller, current_caller
from kvtier.concurrency.turns import Breather, breathing
from kvtier.discovery.auto_pins import NamespaceAdvice
from kvtier.discovery.choices import Selection
from kvtier.errors import ForbiddenError, NameTakenError, PromptNotFoundError
from kvtier.ledger import PromptRow
from kvtier.prompts.book import PromptBook
from kvtier.prompts.versions import family

_PAGE = 1000


class OwnerRules:
    """Of the caller of the call that runs. What raises is called right before what it guards, or as a precondition."""

    def __init__(self, prompts: PromptBook) -> None:
        """Take all prompts, the cache's own, which change."""
        self._prompts = prompts

    def may_see(self, prompt: PromptRow | None) -> bool:
        """Return whether a prompt exists for the caller; None: one that is not known any longer."""
        return sees(current_caller(), prompt)

    def check_visible(self, name: str) -> None:
        """Raise PromptNotFoundError for a prompt of others; one that there is not is the next one's to find."""
        prompt = self._prompts.find(name)
        if prompt is not None and not self.may_see(prompt):
            raise PromptNotFoundError(name)

    def check_names(self, taken: Iterable[str], visible: Iterable[str] = ()) -> Callable[[], None] | None:
        """Return a precondition of a change, for a caller with an owner: it is about no prompt of others.

        Args:
            taken: Names that prompts get: NameTakenError where others have them, or versions of them.
            visible: Names of prompts that change: PromptNotFoundError where they are those of others.
        """
        caller, taken, visible = current_caller(), list(taken), list(visible)
        if not caller.owner:
            return None

        def check() -> None:
            for name in visible:
                prompt = self._prompts.find(name)
                if prompt is not None and not sees(caller, prompt):
                    raise PromptNotFoundError(name)
            for name in taken:
                self._check_free(caller, name)

        return check

    def _check_free(self, caller: Caller, name: str) -> None:
        if caller.owner:
            for prompt in (self._prompts.find(name), *family(self._prompts, name)):
                if prompt is not None and not sees(caller, prompt):
                    raise NameTakenError(name)

    def owner_for(self, call: str, given: str | None) -> str | None:
        """Return whose prompt a caller makes: that of its grant; without one, what is given.

        Raises:
            ForbiddenError: Another one is given.
        """
        caller = current_caller()
        if not caller.owner:
            return given
        if given not in (None, caller.owner):
            remedy = f"this grant is for owner {caller.owner}; leave the owner out"
            raise ForbiddenError(f"{call} for owner {given[:64]}", caller.name, caller.role, remedy)
        return caller.owner

    async def visible_after(self, name: str, max_prompts: int) -> list[PromptRow]:
        """Return the next prompts behind this name that exist for the caller, in the order of names."""
        caller, breather, found = current_caller(), Breather(), list[PromptRow]()
        if not caller.owner:
            return self._prompts.after(name, max_prompts)
        while len(found) < max_prompts and (part := self._prompts.after(name, _PAGE)):
            found += [prompt for prompt in part if sees(caller, prompt)]
            name = part[-1].name
            await breather.pause()
        return found[:max_prompts]

    def is_visible_event(self, event: Any) -> bool:
        """Return whether a caller may see an event: one that names a prompt of its owner, or is about the stream."""
        if not current_caller().owner or event.name == "dropped":
            return True
        name = event.fields.get("name")
        return name is not None and self.may_see(self._prompts.find(name))

    def shown_advice(self, advice: NamespaceAdvice) -> NamespaceAdvice:
        """Return advice about the caller's own prompts: totals and changing places are of all requests.

        A caller who may read no text of prompts learns where they change, and not what stands there.
        """
        caller = current_caller()
        if not caller.owner:
            places = [each if caller.sees_text else replace(each, before="", examples=()) for each in advice.places]
            return replace(advice, places=places)
        names = advice.pin_names
        own = tuple(each for each in advice.selection.choices if self._is_own(names.get(each.digest, "")))
        selection = Selection(choices=own, total_bytes=0, saved_s_per_hour=0.0, saved_share=0.0)
        return replace(advice, requests_per_hour=0.0, prompt_tokens_per_hour=0.0, selection=selection, places=())

    def _is_own(self, name: str) -> bool:
        return self.may_see(self._prompts.find(name))

    async def shown_status(self, status: pb.DaemonStatus) -> pb.DaemonStatus:
        """Return a status with the numbers of the caller's prompts."""
        caller = current_caller()
        if caller.owner:
            own = [prompt async for prompt in breathing(list(self._prompts)) if sees(caller, prompt)]
            status.num_prompts, status.num_pinned = len(own), sum(prompt.pinned for prompt in own)
            status.prompt_bytes = sum(prompt.token_ids.num_bytes + len(prompt.recipe_json) for prompt in own)
        return status


def sees(caller: Caller, prompt: PromptRow | None) -> bool:
    """Return whether a prompt exists for a caller; None: one that is not known any longer."""
    return not caller.owner or (prompt is not None and caller.may_see(prompt.owner))
