"""Asks the daemon for the pins of requests: once while nothing changes, with the tokens only where it must."""

import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from kvtier._pb import engine_pb2 as pb
from kvtier.client.engine_session import Attachment
from kvtier_connector.engine.lora.adapter_digests import Adapter

MAX_OPEN = 64
"""Asks that wait for an answer; the daemon takes no more of a session."""
MAX_WAITING = 1024
"""Asks that wait for their turn; and equal ones that wait for one answer."""
MAX_WAITING_TOKENS = 2**22
"""Of prompts whose asks were not answered yet: they are kept until then, some 100 MB."""
_MAX_KNOWN = 16_384
_REFUSED_S = 10.0
"""How long the chunks of an owner's next prompts are not stored before the daemon has agreed."""

_PINNED, _UNKNOWN = pb.RequestPinResult.PINNED, pb.RequestPinResult.UNKNOWN
_Key = tuple[bytes, str, str]
"""Digest, owner and name of a pin."""


class _Standing(NamedTuple):
    """A pin that the daemon has."""

    ends_s: float
    priority: int  # that was asked for last


class AskEnd(Enum):
    """How an ask ended."""

    PINNED = auto()
    """Every prefix is pinned for as long as was asked for."""
    REFUSED = auto()
    """The daemon refused one."""
    UNANSWERED = auto()
    """No daemon, or too many asks wait already."""


@dataclass(kw_only=True, eq=False)
class PinAsk:
    """Prefixes of one prompt that are to be pinned. Scheduler thread only, but for `message`.

    Attributes:
        prefixes: In ascending order of num_tokens.
        tokens: Of the prompt; at least those of the longest prefix. Not changed by anyone.
        reports: Called with the end.
        is_trusted: Its chunks may be stored before the daemon has agreed.
    """

    prefixes: tuple[pb.RequestedPrefix, ...]
    tokens: Sequence[int]
    priority: int = 0
    name: str = ""
    owner: str = ""
    adapter: Adapter | None = None
    cache_salt: str = ""
    reports: list[Callable[[AskEnd], None]] = field(default_factory=list)
    is_trusted: bool = True
    ended: AskEnd | None = None
    sends_tokens: bool = False

    @property
    def wants_chunks(self) -> bool:
        """Whether its chunks are to be stored: it is pinned, or about to be."""
        return self.ended is AskEnd.PINNED or (self.ended is None and self.is_trusted)

    @property
    def num_tokens(self) -> int:
        """Tokens of the longest prefix."""
        return self.prefixes[-1].num_tokens

    def pin_keys(self) -> list[_Key]:
        """Return by what each prefix's pin is known; the longest one has the name."""
        last = len(self.prefixes) - 1
        return [(each.digest, self.owner, self.name if i == last else "") for i, each in enumerate(self.prefixes)]

    def signature(self) -> object:
        """Return what is equal for asks of which one answer serves all."""
        return self.owner, self.name, self.priority, tuple((each.digest, each.ttl_s) for each in self.prefixes)

    def end(self, how: AskEnd) -> None:
        """Report the end, once."""
        self.ended = how
        for report in self.reports:
            report(how)
        self.reports.clear()

    def message(self, ask_id: int) -> pb.EngineMessage:
        """Make the message. Any thread: with the tokens of a long prompt it takes milliseconds."""
        request = pb.RequestPins(
            id=ask_id,
            prefixes=self.prefixes,
            tokens=self.tokens[: self.num_tokens] if self.sends_tokens else (),
            priority=self.priority,
            name=self.name,
            owner=self.owner,
            lora_name=self.adapter.name if self.adapter is not None else "",
            lora_path=self.adapter.path if self.adapter is not None else "",
            cache_salt=self.cache_salt,
        )
        return pb.EngineMessage(request_pins=request)


class PinAsks:
    """The asks of the current session. Scheduler thread only; never waits.

    Args:
        submit: Runs a function in a background thread, in order.
    """

    def __init__(self, submit: Callable[[Callable[[], None]], None]) -> None:
        self._submit = submit
        self._ids = itertools.count(1)
        self._attachment: Attachment | None = None
        self._standing: OrderedDict[_Key, _Standing] = OrderedDict()
        self._distrusted: OrderedDict[str, float] = OrderedDict()  # owners that were refused, until when
        self._open: dict[int, PinAsk] = {}
        self._waiting: deque[PinAsk] = deque()
        self._asking: dict[object, PinAsk] = {}  # open and waiting ones, by signature
        self._num_tokens = 0  # of their prompts

    def attach(self, attachment: Attachment | None) -> None:
        """Another session is up, or none: what was asked in the last one has no answer."""
        for ask in list(self._asking.values()):
            ask.end(AskEnd.UNANSWERED)
        self._attachment = attachment
        self._standing.clear()
        self._open.clear()
        self._waiting.clear()
        self._asking.clear()
        self._num_tokens = 0

    def ask(self, ask: PinAsk, now_s: float) -> PinAsk:
        """Ask the daemon, unless every pin is known to stand for as long as is asked for, with that priority.

        Returns:
            The ask that decides over the chunks: this one, or an equal one that waits for its answer already.
        """
        if self._stands(ask, now_s):
            ask.end(AskEnd.PINNED)
            return ask
        ask.is_trusted = self._distrusted.get(ask.owner, now_s) <= now_s
        if (same := self._asking.get(ask.signature())) is not None:
            if len(same.reports) < MAX_WAITING:
                same.reports += ask.reports
            else:
                ask.end(AskEnd.UNANSWERED)
            return same
        self._num_tokens += ask.num_tokens
        self._asking[ask.signature()] = ask
        is_crowded = len(self._waiting) >= MAX_WAITING or self._num_tokens > MAX_WAITING_TOKENS
        if self._attachment is None or (is_crowded and len(self._asking) > 1):
            self._end(ask, AskEnd.UNANSWERED)
        elif len(self._open) < MAX_OPEN:
            self._send(ask)
        else:
            self._waiting.append(ask)
        return ask

    def _stands(self, ask: PinAsk, now_s: float) -> bool:
        known = map(self._standing.get, ask.pin_keys())
        needed_s = (now_s + each.ttl_s if each.ttl_s else math.inf for each in ask.prefixes)
        return all(
            pin is not None and pin.priority == ask.priority and pin.ends_s >= need
            for pin, need in zip(known, needed_s, strict=True)
        )

    def _send(self, ask: PinAsk) -> None:
        attachment, ask_id = self._attachment, next(self._ids)
        assert attachment is not None
        self._open[ask_id] = ask
        if ask.sends_tokens:
            self._submit(lambda: attachment.send(ask.message(ask_id)))
        else:
            attachment.send(ask.message(ask_id))

    def answered(self, answer: pb.RequestPinsAnswer, now_s: float) -> None:
        """Record the daemon's answer. If the daemon lacks the tokens of a prefix, ask again and send them."""
        ask = self._open.pop(answer.id, None)
        if ask is None:
            return
        states = [result.state for result in answer.results]
        for key, result in zip(ask.pin_keys(), answer.results, strict=False):
            if result.state == _PINNED:
                ends_s = now_s + result.ends_in_s if result.ends_in_s else math.inf
                self._know(key, _Standing(ends_s, ask.priority))
        if _UNKNOWN in states and not ask.sends_tokens:
            ask.sends_tokens = True
            self._send(ask)
            return
        is_pinned = len(states) == len(ask.prefixes) and all(state == _PINNED for state in states)
        if not is_pinned:
            self._distrusted[ask.owner] = now_s + _REFUSED_S
            _trim(self._distrusted)
        self._end(ask, AskEnd.PINNED if is_pinned else AskEnd.REFUSED)
        if self._waiting:
            self._send(self._waiting.popleft())

    def pin_gone(self) -> None:
        """A pin has ended, perhaps by an operator: the next request for any asks the daemon again, without tokens."""
        self._standing.clear()

    def forget(self, digest: bytes, owner: str) -> None:
        """The next request for this pin asks the daemon, whatever is known of it."""
        self._standing.pop((digest, owner, ""), None)

    def _know(self, key: _Key, pin: _Standing) -> None:
        self._standing[key] = pin
        self._standing.move_to_end(key)
        _trim(self._standing)

    def _end(self, ask: PinAsk, how: AskEnd) -> None:
        del self._asking[ask.signature()]
        self._num_tokens -= ask.num_tokens
        ask.end(how)


def _trim(known: OrderedDict[_Key, _Standing] | OrderedDict[str, float]) -> None:
    if len(known) > _MAX_KNOWN:
        known.popitem(last=False)
