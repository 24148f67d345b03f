"""Prompts that get another name: by an operator's request, or because an automatic pin becomes one with a name."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from kvtier.concurrency.tasks import Changes
from kvtier.core.limits import check_name
from kvtier.errors import InvalidArgumentError, PromptExistsError, PromptNotFoundError, PromptNotPinnedError
from kvtier.ledger import PromptRow
from kvtier.obs.log import log_event
from kvtier.prompts.book import PromptBook, RequestedPin
from kvtier.prompts.pins import Pins
from kvtier.prompts.planned_pins import PlannedPin
from kvtier.prompts.quota import check_owner_quotas
from kvtier.prompts.states.status import PromptView
from kvtier.prompts.versions import family
from kvtier.tiering.namespace import Namespace
from kvtier.tiering.resources import Resources

logger = logging.getLogger(__name__)


class Renames:
    """Pin ids, bindings and chunks stay. Loop thread only.

    Args:
        pins: Makes memory follow the ledger.
        prompts: All prompts; the cache's own, which change, as do its namespaces.
    """

    def __init__(
        self,
        pins: Pins,
        prompts: PromptBook,
        namespaces: Mapping[str, Namespace],
        resources: Resources,
        changes: Changes,
    ) -> None:
        self._pins, self._prompts, self._namespaces = pins, prompts, namespaces
        self._resources, self._changes = resources, changes

    async def take_over(self, prompt: PromptRow, requested: RequestedPin) -> PromptView:
        """Make a pinned prompt the one that is asked for, which has its content: id, bindings and chunks stay.

        Raises:
            PromptNotFoundError: It has ended meanwhile.
            PromptExistsError: The name is taken.
            OwnerQuotaError: Its owner would have too much.
            LedgerError: The ledger refused; nothing has changed.
        """

        async def change() -> None:
            if (known := self._prompts.standing(prompt)) is None:
                raise PromptNotFoundError(prompt.name)
            drafted, old = self._prompts.draft(requested, self._pins.now_unix_s())
            plan = PlannedPin(prompt=drafted, old=old)
            await check_owner_quotas(self._prompts, self._namespaces, self._resources.config.owners, [plan])
            promises = self._resources.ledger.promises
            staged = self._prompts.replacements.get(requested.name)
            gone = [staged] if staged is not None else []
            if old is not None and old.pin_id == drafted.pin_id:  # the same content has the name already
                gone.append(known)
                names = [each.name for each in gone]
                await self._resources.in_ledger(promises.change_prompts, deleted=names, put=[drafted])
                await self._pins.take_in(drafted, old)
            else:
                renamed = replace(drafted, pin_id=known.pin_id, created_unix_s=known.created_unix_s)
                await self._resources.in_ledger(
                    promises.change_prompts,
                    deleted=[each.name for each in gone],
                    moved=[(known.name, renamed)],
                )
                if old is not None:
                    await self._pins.forgotten(old)
                self._prompts.rename(known.name, renamed)
                self._pins.announce(renamed)
            for each in gone:
                await self._pins.forgotten(each)
            log_event(logger, "pin_registered", name=drafted.name, num_tokens=len(drafted.tokens), model=drafted.model)

        await self._changes.exclusively("take_over", change)
        return await self._pins.view(requested.name)

    async def rename(self, name: str, new_name: str, *, precondition: Callable[[], None] | None = None) -> PromptView:
        """Give an operator's prompt another name; its versions, and what is to replace it, go with it.

        `precondition` raises if nothing is to change; it is called while no other change runs.

        Raises:
            PromptNotFoundError: There is no such prompt.
            PromptExistsError: The new name, or one of its versions, is taken.
            InvalidArgumentError: It has that name already.
            PromptNotPinnedError: It is no operator's.
            LedgerError: The ledger refused; nothing has changed.
        """

        async def change() -> None:
            if precondition is not None:
                precondition()
            prompt = self._prompts.get(name)
            if new_name == name:
                raise InvalidArgumentError("new_name", new_name, "it has this name already; give another one")
            if prompt.origin != "named":
                raise PromptNotPinnedError(name, prompt.origin)
            taken = self._prompts.find(new_name)
            # Besides it, versions of a prompt of that name that was forgotten.
            for other in [*([taken] if taken else []), *family(self._prompts, new_name)]:
                raise PromptExistsError(other.name, new_name=new_name)
            members = [prompt, *family(self._prompts, name)]
            moved = [(each.name, replace(each, name=new_name + each.name[len(name) :])) for each in members]
            for _, each in moved:
                check_name(each.name)
                if self._prompts.find(each.name) is not None:
                    raise PromptExistsError(each.name, new_name=new_name)
            await self._resources.in_ledger(self._resources.ledger.promises.change_prompts, moved=moved)
            for before, each in moved:
                self._prompts.rename(before, each)
            log_event(logger, "pin_renamed", name=new_name, before=name)

        await self._changes.exclusively("rename", change)
        return await self._pins.view(new_name)
