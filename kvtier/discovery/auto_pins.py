"""Prompts that many requests begin with are pinned by themselves, within a budget (ADR 22).

    engine: RequestsSeen -> sketch -> selection -> PrefixesWanted -> engine: PrefixTokens -> a pin as any other

A pin that an operator or a request asks for comes first: it is never refused for the sake of automatic ones, and what
it begins with needs none. The tokens of a prefix come with the next request that begins with it; nothing keeps those of
others.
"""

import asyncio
import hashlib
import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.concurrency.pauses import SLOW_POLL_S, until_next
from kvtier.concurrency.turns import Breather, in_turns
from kvtier.config.model import CacheConfig
from kvtier.core.limits import AUTO_PIN_PREFIX, MAX_TOKENS, check_chosen_name
from kvtier.core.tokens import TokenIds
from kvtier.discovery.choices import PinCosts, PinnedPrefix, PinRules, Selection, Verdict
from kvtier.discovery.namespace_traffic import ChangingPlace, NamespaceTraffic, PinUse
from kvtier.discovery.pin_budget import PinBudget, shared, stored_ratio, worth_per_byte
from kvtier.discovery.seen import PrefixTokens, SeenRequest
from kvtier.discovery.selection import SelectionRun, first_wanted
from kvtier.discovery.traffic_book import TrafficBook, recipe_of
from kvtier.errors import (
    DrainingError,
    InvalidArgumentError,
    KvtierError,
    LedgerError,
    QuotaExceededError,
)
from kvtier.ledger import PromptRow
from kvtier.obs.log import log_event
from kvtier.prompts.book import CONTENT, PromptBook, RequestedPin
from kvtier.prompts.pins import Pins
from kvtier.prompts.quota import bytes_of_pin
from kvtier.prompts.renames import Renames
from kvtier.prompts.states.status import PromptView
from kvtier.sessions.session import Session
from kvtier.tiering.namespace import Namespace
from kvtier.tiering.resources import Resources

logger = logging.getLogger(__name__)

SAVE_INTERVAL_S = 300.0
"""What a crash forgets of the counts; pins themselves are in the ledger."""
_REFUSED_S = 3600.0
_REFRESH_SHARE = 0.1  # of the ttl: a pin's end is written again after so long, not at every request
_PLACE_LOG_PERIOD_S = 10.0


@dataclass(frozen=True, kw_only=True)
class NamespaceAdvice:
    """What is worth a pin in a namespace.

    Attributes:
        pin_names: Of the pins that keep prefixes, by digest; those of `covered` are not automatic.
        places: Where prompts change, the last one reported first.
    """

    namespace: Namespace
    requests_per_hour: float
    prompt_tokens_per_hour: float
    selection: Selection
    pin_names: Mapping[bytes, str]
    covered: frozenset[bytes]
    places: Sequence[ChangingPlace]


class AutoPins:
    """Counts, chooses and pins, for all namespaces. Loop thread only.

    Args:
        resources: Configuration, counters, threads.
        prompts: All prompts.
        pins: Makes and ends pins.
        renames: Gives them names.
        namespaces: By id; they come and go.
        live_sessions: Returns the engines attached now.
    """

    def __init__(
        self,
        resources: Resources,
        prompts: PromptBook,
        pins: Pins,
        renames: Renames,
        namespaces: Mapping[str, Namespace],
        live_sessions: Callable[[], Sequence[Session]],
    ) -> None:
        self._resources, self._prompts, self._pins, self._renames = resources, prompts, pins, renames
        self._namespaces, self._live_sessions = namespaces, live_sessions
        self._config: CacheConfig = resources.config.cache
        self._traffic = TrafficBook(resources, prompts, namespaces)
        self._place_log_due_s = 0.0
        self._budget = PinBudget(resources, prompts, namespaces)

    @property
    def is_on(self) -> bool:
        """Engines shall report what requests begin with."""
        return self._config.auto_pin != "off"

    def attached(self, session: Session) -> None:
        """Take up what is known of an engine's namespace; ask it for what the others were asked for before."""
        traffic = self._traffic_of(session)
        if traffic is not None and traffic.wanted:
            session.peer.prefixes_wanted(sorted(traffic.wanted))

    def _traffic_of(self, session: Session) -> NamespaceTraffic | None:
        if not self.is_on or session.namespace.ephemeral:
            return None
        return self._traffic.of(session.namespace)

    # What engines report

    async def observe(self, session: Session, requests: Iterator[SeenRequest], num_skipped: int) -> None:
        """Count what requests began with, with turns of the loop in between; skip them while counts are loaded."""
        traffic, now_unix_s = self._traffic_of(session), time.time()
        breather, rate = Breather(), session.namespace.cost.prefill_tokens_per_s
        num_requests = 0
        for request in requests:
            if traffic is not None:
                traffic.observe(request, rate, now_unix_s)
            num_requests += 1
            await breather.pause()
        counters = self._resources.counters
        if traffic is None:
            counters.requests_skipped += num_requests + num_skipped
            return
        traffic.sketch.skip(num_skipped, now_unix_s)
        counters.requests_observed += num_requests
        counters.requests_skipped += num_skipped

    def report_place(self, session: Session, place: ChangingPlace) -> None:
        """Keep where prompts of a namespace begin to differ; log a new place, the first in ten seconds."""
        traffic = self._traffic_of(session)
        if traffic is None or not traffic.put_place(place):
            return
        if (now_s := time.monotonic()) >= self._place_log_due_s:
            self._place_log_due_s = now_s + _PLACE_LOG_PERIOD_S
            log_event(
                logger,
                "changing_place_found",
                namespace=session.namespace_id,
                stable_tokens=place.num_stable_tokens,
                tokens=place.num_tokens,
                prompts=place.num_prompts,
            )

    async def take_tokens(self, session: Session, found: PrefixTokens) -> None:
        """Pin a prefix that was wanted; what was not, or is no longer, is left alone."""
        traffic, digest = self._traffic_of(session), found.digest
        if traffic is None:
            return
        choice = traffic.wanted_choice(digest)
        if choice is None:
            traffic.wanted -= {digest}  # an engine sends it once: it is asked again if this is chosen again
            return
        groups = session.namespace.layout.groups
        is_windowed = any(group.window_chunks for group in groups)
        if len(found.tokens) - choice.num_tokens not in (0, int(is_windowed)):
            return
        model = session.hello.model_names[0]
        prefix = PinnedPrefix(digest, choice.num_tokens, choice.is_system_prompt, _parent_of(traffic, digest))
        requested = RequestedPin(
            name=_name_of(digest, model),
            tokens=found.tokens,
            model=model,
            lora_name=found.lora_name,
            lora_path=found.lora_path,
            cache_salt=found.cache_salt,
            recipe_json=recipe_of(session.namespace_id, prefix),
            ttl_s=self._config.auto_pin_ttl_s,
            origin="auto",
            public=self._config.auto_pin_public and not found.cache_salt,
        )
        traffic.wanted -= {digest}
        standing = self._prompts.find(requested.name)
        if standing is not None and standing.pinned and standing.origin == "auto":  # of another namespace of the model
            traffic.uses[digest] = PinUse(name=requested.name, prefix=prefix, last_used_unix_s=time.time())
            return
        if standing is not None and not standing.pinned:  # an operator has unpinned it: it stays so
            traffic.refused_until_s[digest] = time.monotonic() + _REFUSED_S
            return
        # With windows a request hits only where a pin ends, so a longer one is of no use to it.
        chunk_tokens = math.lcm(*(group.chunk_tokens for group in groups))
        most_tokens = choice.num_tokens + chunk_tokens if is_windowed else MAX_TOKENS
        covering = await self._covering_pin(requested, found.tokens, most_tokens)
        if covering is not None:
            traffic.covered[digest] = covering
            return
        engines = [each for each in self._live_sessions() if model in each.hello.model_names]
        num_copies = len({each.namespace_id for each in engines if not each.namespace.ephemeral})
        if not await self._make_space(max(num_copies, 1) * choice.added_bytes):
            traffic.refused_until_s[digest] = time.monotonic() + _REFUSED_S
            return
        try:
            await self._pins.pin(requested)
        except DrainingError:
            return
        except KvtierError as error:  # no place on disk, or the name is taken: not again at once
            traffic.refused_until_s[digest] = time.monotonic() + _REFUSED_S
            log_event(logger, "auto_pin_refused", level=logging.WARNING, name=requested.name, problem=str(error))
            return
        traffic.uses[digest] = PinUse(name=requested.name, prefix=prefix, last_used_unix_s=time.time())
        traffic.is_changed = True
        self._resources.counters.auto_pins_made += 1
        log_event(
            logger,
            "auto_pin_made",
            name=requested.name,
            num_tokens=choice.num_tokens,
            requests_per_hour=round(choice.requests_per_hour, 1),
            saved_s_per_hour=round(choice.saved_s_per_hour, 1),
        )

    async def _covering_pin(self, wanted: RequestedPin, tokens: TokenIds, most_tokens: int) -> str | None:
        """Return the id of a pin by others that begins with these tokens and has at most `most_tokens`."""
        scope, breather = (wanted.lora_path, wanted.cache_salt), Breather()
        for prompt in self._prompts.pinned():
            await breather.pause()
            if prompt.origin == "auto" or prompt.model not in ("", wanted.model) or len(prompt.tokens) > most_tokens:
                continue
            if (prompt.lora_path, prompt.cache_salt) == scope and prompt.token_ids.begins_with(tokens):
                return prompt.pin_id
        return None

    # Choosing

    async def run(self) -> None:
        """Choose again when something came, and save what was counted, until cancelled."""
        for namespace in list(self._namespaces.values()):
            self._traffic.take_over_pins(namespace)
        saved_at_s = time.monotonic()
        while self.is_on:
            await asyncio.sleep(until_next(SLOW_POLL_S))
            for namespace, traffic in self._traffic.current():
                if traffic.is_changed:
                    traffic.is_changed = False
                    await self._choose_or_log(namespace, traffic)
            if self._budget.is_any_refused():
                await self._free_disk()
            if time.monotonic() - saved_at_s > SAVE_INTERVAL_S:
                saved_at_s = time.monotonic()
                await self._traffic.save()
                for _, traffic in self._traffic.current():
                    traffic.is_changed = True  # what is not used loses worth too

    async def save(self) -> None:
        """Write what was counted to disk: the daemon stops."""
        await self._traffic.save()

    async def _choose_or_log(self, namespace: Namespace, traffic: NamespaceTraffic) -> None:
        """One namespace that fails must not end the choosing for all."""
        try:
            await self._choose(namespace, traffic)
        except Exception as error:  # a mistake of kvtier: it is reported, and tried again when something comes
            namespace_id, problem = namespace.namespace_id, f"{type(error).__name__}: {error}"
            log_event(logger, "auto_pins_failed", level=logging.ERROR, namespace=namespace_id, problem=problem)

    async def _choose(self, namespace: Namespace, traffic: NamespaceTraffic) -> None:
        traffic.forget_refusals(time.monotonic())
        covered = traffic.covered.items()
        traffic.covered = {digest: pin_id for digest, pin_id in covered if _pinned(self._prompts, pin_id)}
        traffic.uses = {digest: use for digest, use in traffic.uses.items() if _automatic(self._prompts, use.name)}
        limit_bytes = await self._budget.limit_bytes()
        traffic.selection = await self.select(namespace, traffic, limit_bytes, traffic.refused_until_s)
        self._share(limit_bytes)
        await self._refresh(traffic)
        if self._config.auto_pin != "pin":
            return
        for choice in traffic.selection.superfluous:
            if choice.digest not in traffic.uses or self._traffic.is_chosen_elsewhere(traffic, choice.digest):
                continue
            heir = traffic.uses.get(choice.contained_in) if choice.contained_in is not None else None
            if heir is None or _is_bound_like(self._prompts, heir.name, traffic.uses[choice.digest].name):
                await self._end(traffic, choice.digest, choice.verdict.value)
        self._ask(namespace, traffic)

    async def select(
        self, namespace: Namespace, traffic: NamespaceTraffic, max_bytes: int, refused: Collection[bytes] = ()
    ) -> Selection:
        """Weigh what was seen in a namespace but not refused, under a budget; in turns of the loop."""
        config = self._config
        rules = PinRules(
            min_tokens=config.auto_pin_min_tokens, min_requests=config.auto_pin_min_requests, max_bytes=max_bytes
        )
        costs = PinCosts.of(namespace.layout, stored_ratio(namespace), namespace.cost.prefill_tokens_per_s)
        reading = traffic.sketch.reading(time.time(), at_least=1.5)
        pinned = [use.prefix for use in traffic.uses.values()]
        run = SelectionRun(reading, pinned, rules, costs, traffic.covered, refused)
        await in_turns(run.steps())
        assert run.selection is not None
        return run.selection

    def _share(self, limit_bytes: int) -> None:
        """Have the choices of all namespaces fit into the one budget."""
        selected = self._traffic.selected()
        selections = shared([selection for _, selection in selected], limit_bytes)
        for (traffic, _), selection in zip(selected, selections, strict=True):
            traffic.selection = selection

    async def _make_space(self, num_bytes: int) -> bool:
        """End displaced pins of all namespaces, the least valuable first, until so much fits; say whether it does."""
        displaced = [
            (self._traffic.is_chosen_elsewhere(traffic, choice.digest), worth_per_byte(choice), choice.digest, traffic)
            for traffic, selection in self._traffic.selected()
            for choice in selection.choices
            if choice.verdict is Verdict.OVER_BUDGET and choice.digest in traffic.uses
        ]
        for _, _, digest, traffic in sorted(displaced, key=lambda each: each[:3]):
            if (await self._budget.reading()).fits(num_bytes):
                return True
            if digest in traffic.uses:  # it may have ended meanwhile
                await self._end(traffic, digest, "others are worth more")
        return (await self._budget.reading()).fits(num_bytes)

    async def _free_disk(self) -> None:
        """Other pins need what automatic ones hold: choose again under what is left, and end the others."""
        if not (await self._budget.reading()).fits(0):
            for namespace, traffic in self._traffic.current():
                await self._choose_or_log(namespace, traffic)
            await self._make_space(0)

    def _ask(self, namespace: Namespace, traffic: NamespaceTraffic) -> None:
        """Ask engines for the tokens of what is chosen and not pinned yet."""
        assert traffic.selection is not None
        known = traffic.uses.keys() | traffic.covered.keys() | traffic.refused_until_s.keys()
        choices = first_wanted(choice for choice in traffic.selection.chosen if choice.digest not in known)
        digests = [choice.digest for choice in choices]
        if traffic.wanted != (wanted := frozenset(digests)):
            traffic.wanted = wanted
            for session in self._live_sessions():
                if session.namespace is namespace:
                    session.peer.prefixes_wanted(digests)

    async def _refresh(self, traffic: NamespaceTraffic) -> None:
        """Move the end of pins that were used since it was written, now and then, or where the ttl was or is never."""
        ttl_s, ahead_s = self._config.auto_pin_ttl_s, self._pins.now_unix_s() - time.time()
        for use in list(traffic.uses.values()):
            prompt = self._prompts.find(use.name)
            if prompt is None or prompt.origin != "auto":
                continue
            used_s = min(use.last_used_unix_s, time.time())  # the clock was ahead then, and was set back
            ends_s = used_s + ahead_s + ttl_s if ttl_s else 0.0
            is_switched = bool(ends_s) != bool(prompt.expires_unix_s)
            if is_switched or ends_s > prompt.expires_unix_s + _REFRESH_SHARE * ttl_s:
                try:
                    await self._pins.extend(prompt, ends_s, prompt.priority)
                except LedgerError as error:  # the next choice tries again
                    log_event(logger, "pin_not_extended", level=logging.ERROR, name=use.name, problem=str(error))

    async def _end(self, traffic: NamespaceTraffic, digest: bytes, why: str) -> bool:
        use = traffic.uses.pop(digest, None)
        if use is None:
            return False
        is_ended = await self._end_pin(use.name, why, use.num_requests)
        if not is_ended and _automatic(self._prompts, use.name):  # the next choice tries again
            traffic.uses[digest] = use
        return is_ended

    async def _end_pin(self, name: str, why: str, num_requests: int) -> bool:
        if (prompt := _automatic(self._prompts, name)) is None:
            return False
        try:
            await self._pins.forget(prompt)
        except DrainingError:
            return False
        except LedgerError as error:
            log_event(logger, "pin_not_ended", level=logging.ERROR, name=name, problem=str(error))
            return False
        self._resources.counters.auto_pins_ended += 1
        log_event(logger, "auto_pin_ended", name=name, why=why, requests=num_requests)
        return True

    # Pins that were asked for come first

    async def end_automatic_pins(self, error: QuotaExceededError) -> bool:
        """End the automatic pins not used for longest, as many as another is short of; False if it cannot fit."""
        short_bytes, victims, why = error.short_bytes, list[str](), "a pin that was asked for needs the space"
        uses = {use.name: (traffic, use) for _, traffic in self._traffic.current() for use in traffic.uses.values()}
        last_used_s = {  # of those whose counts are not in memory, when their end was written last
            each.name: uses[each.name][1].last_used_unix_s if each.name in uses else each.expires_unix_s - each.ttl_s
            for each in self._prompts.pinned()
            if each.origin == "auto"
        }
        for name in sorted(last_used_s, key=lambda each: last_used_s[each]):
            if short_bytes > 0 and (num_bytes := await self._promised_bytes(name, error.namespace_id)):
                victims.append(name)
                short_bytes -= num_bytes
        if short_bytes > 0:
            return False
        ended = list[bool]()
        for name in victims:
            if name in uses and (digest := uses[name][1].prefix.digest) in uses[name][0].uses:
                ended.append(await self._end(uses[name][0], digest, why))
            else:
                ended.append(await self._end_pin(name, why, 0))
        return any(ended)

    async def _promised_bytes(self, name: str, namespace_id: str | None) -> int:
        """Return what would be free without an automatic pin, in a namespace or in all."""
        if (prompt := _automatic(self._prompts, name)) is None:
            return 0
        namespaces = [each for each in self._namespaces.values() if namespace_id in (None, each.namespace_id)]
        return sum([await bytes_of_pin(each, self._prompts, prompt) for each in namespaces])

    # What operators ask

    async def adopt(self, adopted: str, name: str, **how: Any) -> PromptView:
        """Give an automatic pin a name of its own: it is a pin like those of operators from then on.

        Args:
            adopted: The automatic pin.
            name: Its new name.
            how: `replace` of `RequestedPin`, and how it is pinned.

        Raises:
            PromptNotFoundError: There is no such prompt.
            InvalidArgumentError: It is no automatic pin, or the name is one of an automatic pin.
            KvtierError: As `Renames.take_over`.
        """
        check_chosen_name("name", name)
        prompt = self._prompts.get(adopted)
        if prompt.origin != "auto" or not prompt.pinned:
            remedy = "is no automatic pin; name one that `kvtier list` shows as auto"
            raise InvalidArgumentError("adopt", adopted, remedy)
        content = {field: getattr(prompt, field) for field in CONTENT}
        return await self._renames.take_over(prompt, RequestedPin(name=name, **content, **how))

    def use_of(self, name: str) -> PinUse | None:
        """Return what an automatic pin was good for; None for another prompt."""
        uses = (use for _, traffic in self._traffic.current() for use in traffic.uses.values())
        return next((use for use in uses if use.name == name), None)

    async def advise(self, max_bytes: int) -> tuple[int, list[NamespaceAdvice]]:
        """Return what is worth a pin in each namespace, and the budget in bytes.

        That is `max_bytes`, for each of them; 0: what automatic pins may take now, for all together.
        """
        advice, known = [], self._traffic.current()
        limit_bytes = max_bytes or await self._budget.limit_bytes()
        selections = [await self.select(namespace, traffic, limit_bytes) for namespace, traffic in known]
        if not max_bytes:
            selections = shared(selections, limit_bytes)
        for (namespace, traffic), selection in zip(known, selections, strict=True):
            reading = traffic.sketch.reading(time.time(), at_least=math.inf)
            pins = {digest: _pinned(self._prompts, pin_id) for digest, pin_id in traffic.covered.items()}
            covered = {digest: prompt.name for digest, prompt in pins.items() if prompt is not None}
            advice.append(
                NamespaceAdvice(
                    namespace=namespace,
                    requests_per_hour=reading.requests * reading.per_hour,
                    prompt_tokens_per_hour=reading.tokens * reading.per_hour,
                    selection=selection,
                    pin_names={digest: use.name for digest, use in traffic.uses.items()} | covered,
                    covered=frozenset(covered),
                    places=tuple(reversed(traffic.places.values())),
                )
            )
        return limit_bytes, advice


def _pinned(prompts: PromptBook, pin_id: str) -> PromptRow | None:
    prompt = prompts.by_pin_id(pin_id)
    return prompt if prompt is not None and prompt.pinned else None


def _automatic(prompts: PromptBook, name: str) -> PromptRow | None:
    """Return an automatic pin that stands; None for another prompt: a damaged file of counts may name any."""
    prompt = prompts.find(name)
    return prompt if prompt is not None and prompt.pinned and prompt.origin == "auto" else None


def _parent_of(traffic: NamespaceTraffic, digest: bytes) -> bytes | None:
    counted = (each for each in traffic.sketch.reading(time.time()).prefixes if each.digest == digest)
    return next((each.parent for each in counted), None)


def _name_of(digest: bytes, model: str) -> str:
    """Return the prompt's name: models and adapters of one daemon may have the same tokens, and so block hashes."""
    return AUTO_PIN_PREFIX + hashlib.sha256(digest + model.encode()).hexdigest()[:12]


def _is_bound_like(prompts: PromptBook, name: str, other_name: str) -> bool:
    """Return whether a prompt has a binding in each namespace in which the other one has."""
    prompt, other = prompts.find(name), prompts.find(other_name)
    if prompt is None or other is None:
        return prompt is not None
    bound = {row.namespace_id for row in prompts.bindings_of(prompt.pin_id)}
    return all(row.namespace_id in bound for row in prompts.bindings_of(other.pin_id))
