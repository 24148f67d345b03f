"""Pins that requests ask for, through their engine: each is one owner's, has a TTL that use extends, and has limits."""

import asyncio
import hashlib
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtier.concurrency.turns import breathing, slices
from kvtier.core import limits
from kvtier.core.layout import ChunkKey
from kvtier.core.tokens import TokenIds
from kvtier.errors import DrainingError, InvalidArgumentError, KvtierError, LedgerError
from kvtier.ledger import PromptRow
from kvtier.obs.log import log_event
from kvtier.prompts.book import PromptBook, RequestedPin, difference
from kvtier.prompts.by_request.request_limits import RequestGate, RequestLimits
from kvtier.prompts.pins import Pins
from kvtier.prompts.quota import Usage, bytes_of_tokens
from kvtier.sessions.engine_peer import PinOutcome, PinResult
from kvtier.sessions.session import Session
from kvtier.tiering.command_eviction import Evicted, EvictTier, evict_chunks
from kvtier.tiering.namespace import Namespace
from kvtier.tiering.resources import Resources

logger = logging.getLogger(__name__)

AUTO_NAME = "request-"
MAX_OPEN_ASKS = 64
"""Of one session: what waits holds its tokens, and an engine asks again."""
_LEAST_PRIORITY = limits.PRIORITY.least
_EXTENSION_SHARE, _EXTENSION_S = 4, 60
"""A pin is extended by a quarter of its TTL, or a minute, more than was asked for: a use within that writes nothing."""
_MAX_DIGESTS = 16_384
_LOG_PERIOD_S = 10.0


@dataclass(frozen=True, kw_only=True)
class AskedPrefix:
    """RequestedPrefix of proto/kvtier/v1/engine.proto."""

    digest: bytes
    num_tokens: int
    ttl_s: int


@dataclass(frozen=True, kw_only=True)
class AskedPins:
    """RequestPins of proto/kvtier/v1/engine.proto, checked.

    Raises:
        InvalidArgumentError: A field cannot be used.
    """

    ask_id: int
    prefixes: tuple[AskedPrefix, ...]
    tokens: TokenIds = field(repr=False)
    priority: int
    name: str
    owner: str
    lora_name: str
    lora_path: str
    cache_salt: str = field(repr=False)

    def __post_init__(self) -> None:
        limits.NUM_REQUESTED_PREFIXES.check("number of request_pins.prefixes", len(self.prefixes))
        lengths = [prefix.num_tokens for prefix in self.prefixes]
        if lengths != sorted(set(lengths)):
            raise InvalidArgumentError("request_pins.prefixes", lengths, "must be in ascending order of num_tokens")
        for prefix in self.prefixes:
            limits.check_digest("request_pins.prefixes.digest", prefix.digest)
            limits.PREFIX_TOKENS.check("request_pins.prefixes.num_tokens", prefix.num_tokens)
            limits.TTL_S.check("request_pins.prefixes.ttl_s", prefix.ttl_s)
        if len(self.tokens) not in (0, lengths[-1]):
            remedy = f"must be those of the longest prefix, {lengths[-1]}, or none"
            raise InvalidArgumentError("request_pins.tokens", len(self.tokens), remedy)
        if self.name:
            limits.check_name(self.name)
        limits.PRIORITY.check("request_pins.priority", self.priority)
        limits.check_owner("request_pins.owner", self.owner)
        for name in ("lora_name", "lora_path", "cache_salt"):
            limits.TEXT.check(f"request_pins.{name}", getattr(self, name))
        if bool(self.lora_name) != bool(self.lora_path):
            raise InvalidArgumentError("request_pins.lora_path", self.lora_path, "lora_name and lora_path go together")


class _Key(NamedTuple):
    """By which an asking engine knows a pin. The digest covers LoRA adapter and salt."""

    model: str
    owner: str
    name: str
    digest: bytes


class _Known(NamedTuple):
    """The pin of a key, and the tokens of the prefix: the pin may be a longer one that covers it."""

    pin_id: str
    num_tokens: int


class _ChangedMeanwhile(Exception):
    """Another has pinned, ended or forgotten what has the name: an operator may have taken it."""


class RequestPins:
    """Makes, extends and ends them, within the limits. Loop thread only.

    What engines call a prefix by (its digest) is only remembered: a pin's name comes from its tokens, so that a daemon
    that has started again finds it when an engine sends them.

    A prompt that begins with another one of the same owner, of at least its TTL and priority, takes its place when it
    is bound: a conversation has one pin, not one for each of its turns.
    """

    def __init__(
        self,
        pins: Pins,
        prompts: PromptBook,
        namespaces: Mapping[str, Namespace],
        resources: Resources,
        request_limits: RequestLimits | None = None,
    ) -> None:
        self._pins, self._prompts, self._namespaces = pins, prompts, namespaces
        self._counters = resources.counters
        self._gate = RequestGate(request_limits or RequestLimits.of_disk(resources.config.disk.disk_bytes))
        self._by_key: OrderedDict[_Key, _Known] = OrderedDict()
        self._longer: dict[str, str] = {}  # pins whose place another takes when it is bound, by pin id
        self._num_open: Counter[str] = Counter()  # asks by session
        self._one_at_a_time = asyncio.Lock()  # between a limit's check and the pin
        self._log_due_s, self._num_unlogged = 0.0, 0

    def ask(self, session: Session, asked: AskedPins) -> None:
        """Answer the session soon, in the background."""
        if self._num_open[session.session_id] >= MAX_OPEN_ASKS:
            problem = f"{MAX_OPEN_ASKS} requests for pins of this engine wait already; ask again later"
            self._refused(asked, problem)
            refused = [PinResult(PinOutcome.REFUSED)] * len(asked.prefixes)
            session.peer.request_pins_answered(asked.ask_id, refused, problem)
            return
        self._num_open[session.session_id] += 1
        session.start_task("request-pins", self._answer(session, asked))

    async def _answer(self, session: Session, asked: AskedPins) -> None:
        try:
            async with self._one_at_a_time:
                await self._end_replaced()
                results, problem = await self._results(session, asked)
        finally:
            self._num_open[session.session_id] -= 1
            if not self._num_open[session.session_id]:
                del self._num_open[session.session_id]
        if not session.ended:
            session.peer.request_pins_answered(asked.ask_id, results, problem)

    async def _results(self, session: Session, asked: AskedPins) -> tuple[list[PinResult], str]:
        """The longest prefix first: it may cover the others.

        One clock for all: a shorter one that is extended by the same TTL must not end later than a longer one.
        """
        results, problem, now_unix_s = list[PinResult](), "", self._pins.now_unix_s()
        for prefix in reversed(asked.prefixes):
            name = asked.name if prefix is asked.prefixes[-1] else ""
            try:
                results.append(await self._pin(session, asked, prefix, name, now_unix_s))
            except KvtierError as error:  # whatever it is, the engine waits for an answer
                problem = str(error)
                self._refused(asked, problem)
                results.append(PinResult(PinOutcome.REFUSED))
        results.reverse()
        return results, problem

    def _refused(self, asked: AskedPins, problem: str) -> None:
        """Count it, and log the first in ten seconds."""
        self._counters.request_pins_refused += 1
        self._num_unlogged += 1
        if (now_s := time.monotonic()) >= self._log_due_s:
            log_event(
                logger,
                "request_pins_refused",
                level=logging.WARNING,
                owner=asked.owner,
                problem=problem,
                since_last_line=self._num_unlogged,
            )
            self._log_due_s, self._num_unlogged = now_s + _LOG_PERIOD_S, 0

    async def _pin(
        self, session: Session, asked: AskedPins, prefix: AskedPrefix, name: str, now_unix_s: float
    ) -> PinResult:
        key = _Key(session.hello.model_names[0], asked.owner, name, prefix.digest)
        prompt = self._standing(key)
        if prompt is None:
            self._gate.check_rate(asked.owner, time.monotonic())
            if not asked.tokens:
                return PinResult(PinOutcome.UNKNOWN)
            prompt = await self._find_or_make(session, asked, prefix, name)
            self._remember(key, _Known(prompt.pin_id, prefix.num_tokens))
        if prompt.origin == "request":  # else an operator has taken it over
            is_longer = len(prompt.tokens) > prefix.num_tokens  # then it keeps something else, too
            priority = max(prompt.priority, asked.priority) if is_longer else asked.priority
            prompt = await self._extended(prompt, prefix.ttl_s, priority, now_unix_s)
        ends_in_s = max(0.001, prompt.expires_unix_s - self._pins.now_unix_s()) if prompt.expires_unix_s else 0.0
        return PinResult(PinOutcome.PINNED, ends_in_s)

    def _standing(self, key: _Key) -> PromptRow | None:
        known = self._by_key.get(key)
        prompt = self._prompts.by_pin_id(known.pin_id) if known is not None else None
        is_own = prompt is not None and (prompt.origin, prompt.owner) == ("request", key.owner)
        # A pin that an operator has taken over keeps its id, as long as its content stays.
        if prompt is None or not prompt.pinned or not (is_own or prompt.origin == "named"):
            self._by_key.pop(key, None)
            return None
        return prompt

    def _remember(self, key: _Key, known: _Known) -> None:
        self._by_key[key] = known
        if len(self._by_key) > _MAX_DIGESTS:
            self._by_key.popitem(last=False)

    async def _extended(self, prompt: PromptRow, ttl_s: int, priority: int, now_unix_s: float) -> PromptRow:
        """Return the pin, which ends no earlier than the TTL says, counted from now.

        TTLs alone make few changes, because each goes beyond what was asked for. Priorities that alternate would make
        any number, each with a transaction and a message with all tokens to each engine: these count as new pins.

        Raises:
            RequestLimitError: The priority changes, and the owner or all owners have made too many pins lately.
        """
        ends_s = prompt.expires_unix_s
        if ends_s and not ttl_s:
            ends_s = 0.0
        elif ends_s and ends_s < now_unix_s + ttl_s:
            ends_s = now_unix_s + _extended_ttl(ttl_s)
        if (ends_s, priority) == (prompt.expires_unix_s, prompt.priority):
            return prompt
        if priority != prompt.priority:
            self._gate.check_rate(prompt.owner, time.monotonic())
            self._gate.count_new(prompt.owner, time.monotonic())
        self._counters.request_pins_extended += 1
        return await self._pins.extend(prompt, ends_s, priority)

    async def _find_or_make(self, session: Session, asked: AskedPins, prefix: AskedPrefix, name: str) -> PromptRow:
        """Return the pin of this prefix, or one that covers it, or a new one.

        Raises:
            InvalidArgumentError: The name is taken, or one of automatic pins.
            RequestLimitError: It would be too much for its owner, or for all.
            QuotaExceededError: It would not fit on disk.
        """
        limits.check_chosen_name("kv_transfer_params.kvtier.pin", name)
        wanted = _wanted(session, asked, prefix, name)
        while True:
            with suppress(_ChangedMeanwhile):
                return await self._find_or_make_once(session, asked, wanted, is_named=bool(name))

    async def _find_or_make_once(
        self, session: Session, asked: AskedPins, wanted: RequestedPin, *, is_named: bool
    ) -> PromptRow:
        found = self._prompts.find(wanted.name)
        if found is not None and _keeps(found, wanted):
            return found
        if found is not None and (field := _foreign(found, wanted)) is not None:
            remedy = "use another name" if is_named else f"`kvtier evict {found.name}` forgets it once it is unpinned"
            problem = f"is the name of another pin, which differs in {field}; {remedy}"
            raise InvalidArgumentError("kv_transfer_params.kvtier.pin", wanted.name, problem)
        if found is not None and found.pinned:
            return found
        own = self._pins_of(asked.owner)
        is_windowed = any(group.window_chunks for group in session.namespace.layout.groups)
        if not is_named and not is_windowed and (covering := await self._covering(own, wanted)) is not None:
            return covering
        await self._check_usage(session, wanted)

        def check() -> None:
            if self._prompts.find(wanted.name) is not found:
                raise _ChangedMeanwhile

        await self._pins.apply([wanted], precondition=check)
        self._gate.count_new(asked.owner, time.monotonic())
        self._counters.request_pins_made += 1
        made = self._prompts.get(wanted.name)
        if not is_windowed:  # else each has a window of its own, without which a hit cannot end there
            async for prompt in breathing(own):
                if _replaces(made, prompt):
                    self._longer[prompt.pin_id] = made.pin_id
        return made

    def _pins_of(self, owner: str) -> list[PromptRow]:
        return [prompt for prompt in self._prompts.pinned() if prompt.origin == "request" and prompt.owner == owner]

    async def _covering(self, own: Sequence[PromptRow], wanted: RequestedPin) -> PromptRow | None:
        """Return a pin of the owner that begins with the tokens that are wanted."""
        tokens = TokenIds.of(wanted.tokens)
        scope = (wanted.model, wanted.lora_name, wanted.lora_path, wanted.cache_salt)
        async for prompt in breathing(own):
            if _scope(prompt) == scope and prompt.token_ids.begins_with(tokens):
                return self._prompts.standing(prompt)
        return None

    async def _check_usage(self, session: Session, wanted: RequestedPin) -> None:
        layouts = {namespace.model: namespace.layout for namespace in self._namespaces.values()}
        own, total = Usage(), Usage()
        async for prompt in breathing(self._prompts.pinned()):
            if prompt.origin != "request":
                continue
            num_tokens = len(prompt.tokens)
            num_bytes = bytes_of_tokens(layouts.get(prompt.model, session.namespace.layout), num_tokens)
            total.add(num_tokens, num_bytes)
            if prompt.owner == wanted.owner:
                own.add(num_tokens, num_bytes)
        needed_bytes = bytes_of_tokens(session.namespace.layout, len(wanted.tokens))
        self._gate.check_usage(wanted.owner or "", own, total, len(wanted.tokens), needed_bytes)

    async def _end_replaced(self) -> None:
        """End pins whose longer ones are bound by now wherever they are."""
        for shorter_id, longer_id in list(self._longer.items()):
            shorter, longer = self._prompts.by_pin_id(shorter_id), self._prompts.by_pin_id(longer_id)
            if shorter is None or longer is None or not longer.pinned:
                del self._longer[shorter_id]
                continue
            where = [row.namespace_id for row in self._prompts.bindings_of(shorter_id)]
            if not all(self._prompts.binding(longer_id, namespace_id) for namespace_id in where):
                continue
            del self._longer[shorter_id]
            if not _replaces(longer, shorter):  # it was extended meanwhile
                continue
            with _logged_failure(shorter):
                await self._pins.forget(shorter)
            for key, known in self._by_key.items():
                if known.pin_id == shorter_id:
                    self._by_key[key] = known._replace(pin_id=longer_id)

    # Hints

    async def demote(self, session: Session, keys: Sequence[ChunkKey], digest: bytes, owner: str) -> None:
        """Move what no pin has out of host memory where it is on disk, and make the owner's pin the least important.

        That of exactly this prefix: a longer one that covers it is of use without it.
        """
        namespace = session.namespace
        for part in slices(keys):
            chunks = namespace.table.known(part)
            keys_on_disk = [chunk.key for chunk in chunks if chunk.on_disk and not chunk.num_pins]
            await evict_chunks(namespace.tiers, namespace.write_back, keys_on_disk, EvictTier.HOST, Evicted())
            await asyncio.sleep(0)
        key = _Key(session.hello.model_names[0], owner, "", digest)
        prompt = self._standing(key)
        if prompt is None or len(prompt.tokens) != self._by_key[key].num_tokens:
            return
        if prompt.origin == "request" and prompt.priority != _LEAST_PRIORITY:
            with _logged_failure(prompt):
                await self._pins.extend(prompt, None, _LEAST_PRIORITY)


@contextmanager
def _logged_failure(prompt: PromptRow) -> Iterator[None]:
    """Log that a pin could not be changed; it stands as before, until its TTL."""
    try:
        yield
    except (DrainingError, LedgerError) as error:
        log_event(logger, "request_pin_not_changed", level=logging.ERROR, name=prompt.name, problem=str(error))


def _extended_ttl(ttl_s: int) -> int:
    """Return for how long a pin gets its promise, where this is asked for."""
    return ttl_s + max(_EXTENSION_S, ttl_s // _EXTENSION_SHARE)


def _wanted(session: Session, asked: AskedPins, prefix: AskedPrefix, name: str) -> RequestedPin:
    """Return the pin that an owner asks for; without a name it gets one from what it is."""
    tokens = asked.tokens[: prefix.num_tokens]
    model = session.hello.model_names[0]
    scope = (model, asked.lora_name, asked.lora_path, asked.cache_salt)
    return RequestedPin(
        name=name or _made_name(asked.owner, scope, tokens),
        tokens=tokens,
        model=model,
        lora_name=asked.lora_name,
        lora_path=asked.lora_path,
        cache_salt=asked.cache_salt,
        ttl_s=min(limits.TTL_S.most, _extended_ttl(prefix.ttl_s)) if prefix.ttl_s else 0,
        priority=asked.priority,
        origin="request",
        owner=asked.owner,
    )


def _made_name(owner: str, scope: tuple[str, str, str, str], tokens: TokenIds) -> str:
    """Return the name of a pin for which its owner chose none."""
    model, *rest = scope
    digest = hashlib.sha256("\0".join((model, owner, *rest)).encode() + b"\0" + tokens.to_bytes())
    return AUTO_NAME + digest.hexdigest()[:16]


def _foreign(found: PromptRow, wanted: RequestedPin) -> str | None:
    """Return in what a prompt of this name is not the one that a request may extend; None: it is that."""
    if (found.origin, found.owner) != (wanted.origin, wanted.owner):
        return "owner"
    return difference(found, wanted)


def _keeps(found: PromptRow, wanted: RequestedPin) -> bool:
    """Return whether an operator has pinned the same, or has taken the pin over, and keeps it."""
    return found.origin == "named" and found.pinned and difference(found, wanted) is None


def _replaces(longer: PromptRow, shorter: PromptRow) -> bool:
    """Return whether a pin promises all that another of the owner does, which has no name of a user's choice."""
    if shorter.pin_id == longer.pin_id or not shorter.name.startswith(AUTO_NAME) or _scope(shorter) != _scope(longer):
        return False
    if {(each.origin, each.owner) for each in (longer, shorter)} != {("request", longer.owner)}:
        return False  # an operator has taken one over
    lasts = not longer.expires_unix_s or 0 < shorter.expires_unix_s <= longer.expires_unix_s
    if not lasts or shorter.priority > longer.priority or not longer.token_ids.begins_with(shorter.token_ids):
        return False
    return shorter.name == _made_name(shorter.owner, _scope(shorter), shorter.token_ids)


def _scope(prompt: PromptRow) -> tuple[str, str, str, str]:
    return prompt.model, prompt.lora_name, prompt.lora_path, prompt.cache_salt
