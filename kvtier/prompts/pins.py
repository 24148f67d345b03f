"""The operators' side: pins from their promise to its end, and how each prompt stands."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from kvtier.concurrency.tasks import Changes
from kvtier.concurrency.turns import Breather, slices
from kvtier.core.layout import ChunkKey
from kvtier.core.limits import parse_version, version_name
from kvtier.errors import PromptNotFoundError, QuotaExceededError
from kvtier.ledger import BindingRow, PromptRow
from kvtier.obs.clock_steps import ClockSteps
from kvtier.obs.log import log_event
from kvtier.prompts.book import PinUpdate, PromptBook, RequestedPin, ended, updated
from kvtier.prompts.planned_pins import PlannedPin, plan_pin
from kvtier.prompts.quota import check_owner_quotas, check_quota
from kvtier.prompts.states.pin_watch import PinWatch
from kvtier.prompts.states.status import PromptState, PromptView, durability_of, state_of, view_binding, view_prompt
from kvtier.sessions.session import Session
from kvtier.tiering.namespace import Namespace
from kvtier.tiering.resources import Resources

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Pins:
    """Carries out what operators ask. Loop thread only.

    Args:
        prompts: All prompts; the cache's own, which change, as do its namespaces.
        live_sessions: Returns the engines attached now.
        retry_refused: Called when what the disk quota refused may fit.

    Attributes:
        watch: How far each pin is durable, known ahead.
        end_automatic_pins: Ends automatic pins for another that did not fit; says whether it may fit now.
        ask_fleet: Brings the pins of other hosts up to date, as far as that is quick: names and quotas are the fleet's.
        now_unix_s: The clock by which pins end: whatever computes an end reads it, and whatever judges one. Of a fleet
            it is the store's.
        host_clock: The host's, without steps ahead that may be taken back.
    """

    def __init__(
        self,
        resources: Resources,
        prompts: PromptBook,
        namespaces: Mapping[str, Namespace],
        live_sessions: Callable[[], Sequence[Session]],
        changes: Changes,
        retry_refused: Callable[[], None],
    ) -> None:
        self.end_automatic_pins: Callable[[QuotaExceededError], Awaitable[bool]] | None = None
        self.ask_fleet: Callable[[], Awaitable[None]] | None = None
        self.host_clock = ClockSteps()
        self.now_unix_s: Callable[[], float] = self.host_clock.now_unix_s
        self.watch = PinWatch(prompts, self.state_of, resources.timings.durable)
        resources.disk_health.when_off(self.watch.look_again)
        self._resources, self._prompts, self._namespaces = resources, prompts, namespaces
        self._live_sessions, self._changes = live_sessions, changes
        self._retry_refused = retry_refused

    async def pin(self, requested: RequestedPin) -> PromptView:
        """Make a prompt a pinned one; durable on return.

        Raises:
            PromptExistsError: The name is taken.
            QuotaExceededError: It would not fit on disk.
        """

        (made,) = await self.apply([requested])
        return await self.view_of(made)

    async def apply(
        self,
        requested: Sequence[RequestedPin],
        unpinned: Sequence[str] = (),
        *,
        dry_run: bool = False,
        precondition: Callable[[], None] | None = None,
    ) -> list[PromptRow]:
        """Make prompts pinned ones, and end pins, all in one transaction; durable on return.

        Args:
            requested: Each has another name.
            unpinned: Names of pins that end; what is not known, or has ended, has come to its end.
            dry_run: Only check.
            precondition: Raises if nothing is to change; called while no other change runs. Who gives one has asked
                the fleet already.

        Returns:
            What each of the requested ones was made: the prompt, or the version that is to replace it.

        Raises:
            KvtierError: As `pin`, or of the precondition; nothing has changed.
        """

        async def change() -> list[PromptRow]:
            _require(precondition)
            return await self._apply(requested, unpinned, dry_run=dry_run)

        def attempt() -> Awaitable[list[PromptRow]]:
            return self._changes.exclusively("pin", change)

        is_named = all(each.origin == "named" for each in requested)
        if is_named and precondition is None and self.ask_fleet is not None:
            await self.ask_fleet()
        is_automatic = any(each.origin == "auto" for each in requested)
        return await (attempt() if dry_run or is_automatic else self.within_quota(attempt))

    async def _apply(
        self, requested: Sequence[RequestedPin], unpinned: Sequence[str], *, dry_run: bool
    ) -> list[PromptRow]:
        breather, now_unix_s, plans = Breather(), self.now_unix_s(), list[PlannedPin]()
        for wanted in requested:
            plans.append(plan_pin(self._prompts, wanted, self._stays, now_unix_s))
            await breather.pause()
        prompts = [plan.prompt for plan in plans]
        named = [prompt for name in unpinned if (prompt := self._prompts.find(name)) is not None]
        ending = [prompt for prompt in named if prompt.pinned]
        over = [ended(prompt) for prompt in named if not prompt.pinned and prompt.expires_unix_s]  # see `unpin_now`
        gone = [each for prompt in ending if (each := self._prompts.replacements.get(prompt.name)) is not None]
        gone += [plan.ended for plan in plans if plan.ended is not None]
        also = [plan.also for plan in plans if plan.also is not None]
        config = self._resources.config
        # A dry run ends no automatic pin, and counts none: what it says fits does when they have ended.
        pinned = self._prompts.pinned() if dry_run else []
        ending_names = [*unpinned, *(prompt.name for prompt in pinned if prompt.origin == "auto")]
        await check_quota(self._prompts, self._namespaces, prompts, config.disk.disk_bytes, ending=ending_names)
        await check_owner_quotas(self._prompts, self._namespaces, config.owners, plans, [*ending, *gone])
        if dry_run:
            return prompts
        rows = [plan.prompt for plan in plans if plan.prompt != plan.old]
        await self._resources.in_ledger(
            self._resources.ledger.promises.change_prompts,
            deleted=[prompt.name for prompt in gone],
            put=[*also, *map(ended, ending), *over, *rows],
        )
        for prompt in over:
            self._prompts.put(prompt)
        for prompt in gone:
            await self.forgotten(prompt)
        for prompt in also:
            await self.take_in(prompt, self._prompts.find(prompt.name))
        for plan in plans:
            await self.take_in(plan.prompt, plan.old)
            log_event(
                logger,
                "pin_registered",
                name=plan.prompt.name,
                num_tokens=len(plan.prompt.tokens),
                model=plan.prompt.model,
            )
            await breather.pause()
        for prompt in ending:
            await self._take_out(ended(prompt))
        return prompts

    def _stays(self, pin: PromptRow) -> bool:
        """Return whether a pin serves until its replacement is durable: it is durable itself, somewhere."""
        is_durable = any(durability_of(namespace, row).durable for namespace, row in self.bound(pin))
        return pin.pinned and pin.origin == "named" and is_durable

    async def finish_replacement(self, staged: PromptRow) -> None:
        """Give a replacement the name of its pin, which becomes the version before it, unpinned; both or neither.

        Raises:
            LedgerError: The ledger refused; nothing has changed.
        """

        async def change() -> None:
            known = self._prompts.standing(staged)
            version = parse_version(known.name) if known is not None else None
            if known is None or version is None:  # it has ended meanwhile
                return
            pin = self._prompts.find(version[0])
            if pin is None:  # the ledger has lost it; what was to replace it is what is left of the promise
                row = replace(known, name=version[0], origin="named")
                await self._resources.in_ledger(
                    self._resources.ledger.promises.change_prompts, moved=[(known.name, row)]
                )
                self._prompts.rename(known.name, row)
                self.announce(row)
                return
            if not pin.pinned:
                return
            name = version_name(pin.name, version[1] - 1)
            if self.state_of(known) is not PromptState.DURABLE or self._prompts.find(name) is not None:
                return
            row = replace(known, name=pin.name, origin="named")
            old = replace(ended(pin), name=name)
            moved = [(pin.name, old), (known.name, row)]
            await self._resources.in_ledger(self._resources.ledger.promises.change_prompts, moved=moved)
            self._prompts.rename(pin.name, old)
            self._prompts.rename(known.name, row)
            await self._count_pins(old, pinned=False)
            for each in (row, old):
                self.announce(each)
            self._retry_refused()
            log_event(logger, "pin_replaced", name=row.name, version=version[1], num_tokens=len(row.tokens))

        await self._changes.exclusively("replace", change)

    async def within_quota(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Do what a pin that was asked for needs: while it does not fit, automatic pins end in its favour.

        Raises:
            QuotaExceededError: It would not fit without them either.
        """
        while True:
            try:
                return await attempt()
            except QuotaExceededError as error:
                if self.end_automatic_pins is None or not await self.end_automatic_pins(error):
                    raise

    async def take_in(self, prompt: PromptRow, old: PromptRow | None) -> None:
        """A pin is in the ledger, in place of `old`: make memory follow, and notify engines. Under the change lock."""
        if old is not None and old.pin_id != prompt.pin_id:
            await self.forgotten(old)
        elif old is not None and not old.pinned:
            await self._count_pins(prompt, pinned=True)
        self._prompts.put(prompt)
        self.watch.pinned(prompt.pin_id)
        if old != prompt:
            self.announce(prompt)

    async def update(self, update: PinUpdate, *, precondition: Callable[[], None] | None = None) -> PromptView:
        """Change how an operator's prompt is pinned; durable on return. `precondition`: see `apply`.

        Raises:
            PromptNotFoundError: There is no such prompt.
            KvtierError: As `updated`.
            LedgerError: The ledger refused; nothing has changed.
        """

        async def change() -> None:
            _require(precondition)
            old, now_unix_s = self._prompts.get(update.name), self.now_unix_s()
            staged = self._prompts.replacements.get(update.name)
            changed = [(updated(each, update, now_unix_s), each) for each in (old, staged) if each is not None]

            await check_owner_quotas(
                self._prompts,
                self._namespaces,
                self._resources.config.owners,
                [PlannedPin(prompt=prompt, old=before) for prompt, before in changed],
            )
            rows = [prompt for prompt, _ in changed]
            await self._resources.in_ledger(self._resources.ledger.promises.change_prompts, put=rows)
            for prompt, before in changed:
                await self.take_in(prompt, before)
            log_event(logger, "pin_updated", name=update.name)

        await self._changes.exclusively("update", change)
        return await self.view(update.name)

    async def extend(self, prompt: PromptRow, expires_unix_s: float | None, priority: int) -> PromptRow:
        """Change when a pin ends (None: it stays), and its priority; durable on return. Returns it as it stands then.

        Raises:
            LedgerError: The ledger refused; nothing has changed.
        """

        async def change() -> PromptRow:
            if (known := self._prompts.standing(prompt)) is None:
                return prompt
            ends_unix_s = known.expires_unix_s if expires_unix_s is None else expires_unix_s
            extended = replace(known, expires_unix_s=ends_unix_s, priority=priority)
            await self._resources.in_ledger(self._resources.ledger.promises.put_prompt, extended)
            self._prompts.put(extended)
            if known.priority != priority:  # engines know it; of its end they know nothing
                self.announce(extended)
            return extended

        return await self._changes.exclusively("extend", change)

    async def forget(self, prompt: PromptRow) -> bool:
        """End a pin and forget its prompt; the chunks stay as evictable cache. Unpinned or taken over, it stays.

        Returns:
            Whether it has ended.

        Raises:
            LedgerError: The ledger refused; the pin stands.
        """
        return await self._changes.exclusively("forget", lambda: self.end_now(prompt))

    async def end_now(self, prompt: PromptRow) -> bool:
        """Do what `forget` does; under the change lock."""
        if (known := self._prompts.standing(prompt)) is None:
            return False
        await self.forget_now(known)
        self._retry_refused()
        log_event(logger, "pin_ended", name=known.name)
        return True

    async def unpin(
        self, name: str, *, forget: bool = False, precondition: Callable[[], None] | None = None
    ) -> PromptView:
        """End the promise, with `forget` also forget the prompt; its chunks stay as evictable cache.

        `precondition`: see `apply`.

        Raises:
            PromptNotFoundError: There is no such prompt.
        """
        prompt = self._prompts.get(name)
        if prompt.origin == "replacement":  # what was never served is no version
            view = await self.view_of(prompt)
            if not await self.forget(prompt):  # it has just taken over
                raise PromptNotFoundError(name)
            return replace(view, prompt=replace(prompt, pinned=False))

        async def change() -> None:
            _require(precondition)
            prompt = self._prompts.get(name)
            await self.unpin_now(prompt)
            if forget:
                await self.forget_now(self._prompts.get(name))

        last_view = await self.view_of(prompt) if forget else None
        await self._changes.exclusively("unpin", change)
        return await self.view(name) if last_view is None else replace(last_view, prompt=ended(prompt))

    async def unpin_now(self, prompt: PromptRow, *, by_ttl: bool = False) -> None:
        """Do what `unpin` does; under the change lock. `by_ttl`: no one asked for it."""
        if prompt.pinned:
            unpinned = ended(prompt, by_ttl=by_ttl)
            staged = self._prompts.replacements.get(prompt.name)
            await self._resources.in_ledger(
                self._resources.ledger.promises.change_prompts,
                deleted=[] if staged is None else [staged.name],
                put=[unpinned],
            )
            await self._take_out(unpinned)
            if staged is not None:
                await self.forgotten(staged)
        elif prompt.expires_unix_s:  # its TTL has ended it: from now on an operator has
            await self._resources.in_ledger(self._resources.ledger.promises.change_prompts, put=[ended(prompt)])
            self._prompts.put(ended(prompt))

    async def _take_out(self, unpinned: PromptRow) -> None:
        """A pin has ended in the ledger, and its prompt stays: make memory follow, and notify engines."""
        self._prompts.put(unpinned)
        await self._count_pins(unpinned, pinned=False)
        self.announce(unpinned)
        self._retry_refused()
        log_event(logger, "pin_ended", name=unpinned.name)

    async def forget_now(self, *prompts: PromptRow) -> None:
        """Forget prompts, pinned or not, all of them or none; under the change lock.

        Raises:
            LedgerError: The ledger refused; they stand.
        """
        names, breather = [prompt.name for prompt in prompts], Breather()
        await self._resources.in_ledger(self._resources.ledger.promises.change_prompts, deleted=names)
        for prompt in prompts:
            await self.forgotten(prompt)
            await breather.pause()

    async def view(self, name: str) -> PromptView:
        """Return a prompt's status.

        Raises:
            PromptNotFoundError: There is no such prompt.
        """
        return await self.view_of(self._prompts.get(name))

    async def view_of(self, prompt: PromptRow) -> PromptView:
        """Return the status of a prompt that may be forgotten meanwhile."""
        bindings = [await view_binding(namespace, row, pinned=prompt.pinned) for namespace, row in self.bound(prompt)]
        view, staged = view_prompt(prompt, bindings, self._live_sessions()), self._prompts.replacements.get(prompt.name)
        return view if staged is None else replace(view, replacement=staged.name)

    def state_of(self, prompt: PromptRow) -> PromptState:
        """Return a prompt's state alone; quicker than `view`."""
        serving = [session for session in self._live_sessions() if session.serves(prompt)]
        return state_of(prompt, [durability_of(namespace, row) for namespace, row in self.bound(prompt)], serving)

    def bound(self, prompt: PromptRow) -> list[tuple[Namespace, BindingRow]]:
        """Return a prompt's bindings, that in the namespace used last at the end."""
        rows = self._prompts.bindings_of(prompt.pin_id)
        bound = [(self._namespaces[row.namespace_id], row) for row in rows if row.namespace_id in self._namespaces]
        return sorted(bound, key=lambda each: each[0].row.seen_unix_s)

    async def forgotten(self, prompt: PromptRow) -> None:
        """A prompt's row is gone from the ledger: forget it, and notify engines."""
        if prompt.pinned:
            await self._count_pins(prompt, pinned=False)
        self._prompts.forget(prompt)
        for session in self._live_sessions():
            session.bound.discard(prompt.pin_id)
            session.bind_errors.pop(prompt.pin_id, None)
            session.peer.pin_removed(prompt.pin_id)

    async def _count_pins(self, prompt: PromptRow, *, pinned: bool) -> None:
        for row in self._prompts.bindings_of(prompt.pin_id):
            if (namespace := self._namespaces.get(row.namespace_id)) is not None:  # else it has ended meanwhile
                await self.count(namespace, row.keys, pinned=pinned)

    async def count(self, namespace: Namespace, keys: Sequence[ChunkKey], *, pinned: bool) -> None:
        """Count a pin for these chunks, or end one, with turns of the loop in between. Under the change lock.

        What looks at a chunk then finds it pinned, or not yet, or no more: as if the change came earlier or later.
        """
        for part in slices(keys):
            if pinned:
                namespace.table.pin(part)
                namespace.write_back.add(part)  # what lost its place on disk while it was not pinned
            else:
                namespace.table.unpin(part)
            await asyncio.sleep(0)

    def announce(self, prompt: PromptRow) -> None:
        """Notify engines of how a prompt stands now."""
        for session in self._live_sessions():
            if session.serves(prompt):
                session.peer.pin_added(prompt)


def _require(precondition: Callable[[], None] | None) -> None:
    if precondition is not None:
        precondition()
