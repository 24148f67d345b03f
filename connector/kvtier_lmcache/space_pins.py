"""The daemon's pins of one space: which keys each has, and what the session answers when one arrives."""

import hashlib
import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from kvtier._pb import engine_pb2 as pb
from kvtier.core.layout import ChunkKey
from kvtier.errors import KvtierError

PIN_PREFIX = "lmcache-"


def pin_name_of(namespace_id: str, keys: Collection[ChunkKey]) -> str:
    """Return the name of a pin of these keys; other namespaces and other keys give other names."""
    return f"{PIN_PREFIX}{namespace_id[:12]}-{hashlib.sha256(b''.join(sorted(keys))).hexdigest()[:16]}"


def pin_tokens_of(keys: Iterable[ChunkKey]) -> list[int]:
    """Return the "tokens" of a pin: one for each object, as the layout says; nothing looks prompts up by them."""
    return [_token_of(key) for key in keys]


def _token_of(key: ChunkKey) -> int:
    return int.from_bytes(key[:4], "big")


@dataclass
class PinChanges:
    """What makes the daemon's pins those that are wanted, in this order.

    Attributes:
        bound: What binds pins that turned out to be of wanted objects.
        ended: Names of pins that no wanted object needs. First: what they take may be all that there is for others.
        added: Objects that no pin has.
        replaced: Names of pins of which some objects are wanted. Last, so that none of these is without its pin.
    """

    bound: list[pb.EngineMessage] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    added: list[ChunkKey] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)


@dataclass
class _UnknownPin:
    """A pin that came without keys: another adapter makes it, or one did that ended before it was bound."""

    pin_id: str
    tokens: tuple[int, ...]
    is_new: bool = True  # it may be younger than what was asked of the coordinator


class SpacePins:
    """Pins of one namespace that adapters made, this one, earlier ones or others beside it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # protects the rest
        self._namespace_id = ""
        self._names: dict[str, str] = {}  # of each pin id
        self._keys: dict[str, frozenset[ChunkKey]] = {}  # of each pin that stands, by name; none of an unpinned one
        self._unknown: dict[str, _UnknownPin] = {}  # the others that stand, by name
        self._expected: dict[str, tuple[ChunkKey, ...]] = {}  # of pins that were asked for, and are wanted
        self._awaited: set[str] = set()  # ids in the Welcome that have not come yet

    def begin(self, welcome: pb.Welcome) -> list[pb.EngineMessage]:
        """A session begins; returns what to answer."""
        with self._lock:
            self._namespace_id = welcome.namespace_id
            self._names.clear()
            self._keys.clear()
            self._unknown.clear()
            self._awaited = {*welcome.pin_ids} - {pin.pin_id for pin in welcome.pins}
        return self.arrived(welcome.pins)

    def end(self) -> None:
        """There is no session."""
        with self._lock:
            self._namespace_id = ""

    def arrived(self, pins: Iterable[pb.Pin]) -> list[pb.EngineMessage]:
        """Pins stand; returns what binds those that are ours. Others, of all models, are left alone."""
        answers: list[pb.EngineMessage] = []
        with self._lock:
            for pin in pins:
                self._awaited.discard(pin.pin_id)
                if not pin.name.startswith(f"{PIN_PREFIX}{self._namespace_id[:12]}-"):
                    continue
                self._names[pin.pin_id] = pin.name
                answers += self._enter(pin)
        return answers

    def _enter(self, pin: pb.Pin) -> list[pb.EngineMessage]:
        """Note how a pin of ours stands; returns what binds it."""
        self._unknown.pop(pin.name, None)
        if not pin.pinned:
            self._keys[pin.name] = frozenset()  # to be forgotten, or pinned again
        elif pin.keys:
            self._keys[pin.name] = frozenset(pin.keys)
            return [pb.EngineMessage(confirm_pins=pb.ConfirmPins(pin_ids=[pin.pin_id]))]
        elif self._keys.get(pin.name):
            pass  # announced again, as with another priority: without the keys, which are the same
        elif keys := self._expected.get(pin.name):
            return [self._bind(pin.name, pin.pin_id, keys)]
        else:
            self._keys.pop(pin.name, None)
            self._unknown[pin.name] = _UnknownPin(pin.pin_id, tuple(pin.tokens))
        return []

    def _bind(self, name: str, pin_id: str, keys: Sequence[ChunkKey]) -> pb.EngineMessage:
        self._keys[name] = frozenset(keys)
        return pb.EngineMessage(bind_pin=pb.BindPin(pin_id=pin_id, keys=keys, covered_tokens=len(keys)))

    def removed(self, pin_id: str) -> None:
        """A pin was dropped."""
        with self._lock:
            self._awaited.discard(pin_id)
            if name := self._names.pop(pin_id, None):
                self._keys.pop(name, None)
                self._unknown.pop(name, None)

    def keys_of(self, pin_ids: Iterable[str]) -> list[ChunkKey]:
        """Return the keys of these pins, without those of pins that have ended."""
        with self._lock:
            names = [self._names[pin_id] for pin_id in pin_ids if pin_id in self._names]
            return [key for name in names for key in self._keys.get(name, ())]

    def changes(self, wanted: Collection[ChunkKey]) -> PinChanges | None:
        """Compare what stands with what is wanted; None: it is not known what stands."""
        with self._lock:
            if not self._namespace_id or self._awaited:
                return None
            changes, covered, wanted = PinChanges(), set[ChunkKey](), {*wanted}
            self._expected = {name: keys for name, keys in self._expected.items() if wanted.issuperset(keys)}
            self._resolve(wanted, changes)
            for name, keys in self._keys.items():
                if keys and keys <= wanted:
                    covered |= keys
                elif keys.isdisjoint(wanted):  # also one that was unpinned
                    changes.ended.append(name)
                else:
                    changes.replaced.append(name)
            changes.added = sorted(wanted - covered)
            return changes

    def _resolve(self, wanted: set[ChunkKey], changes: PinChanges) -> None:
        """Find the keys of pins that came without: a token is the beginning of a key, and the name has their digest.

        One that is not of wanted objects alone is left to who made it, until the coordinator was asked after it came.
        """
        if not self._unknown:
            return
        by_token = {_token_of(key): key for key in wanted}
        for name, pin in [*self._unknown.items()]:
            keys = [by_token[token] for token in pin.tokens if token in by_token]
            if len(keys) == len(pin.tokens) and name == pin_name_of(self._namespace_id, keys):
                del self._unknown[name]
                changes.bound.append(self._bind(name, pin.pin_id, keys))
            elif pin.is_new:
                pin.is_new = False
            elif keys:
                changes.replaced.append(name)
            else:
                changes.ended.append(name)

    def expect(self, keys: Collection[ChunkKey]) -> str:
        """A pin of these keys will be asked for; returns its name. When it arrives it is bound to them.

        Raises:
            KvtierError: There is no session, so no namespace that it could be of.
        """
        with self._lock:
            if not self._namespace_id:
                raise KvtierError("the session has ended; what is wanted is compared again in the next one")
            name = pin_name_of(self._namespace_id, keys)
            self._expected[name] = tuple(keys)  # others may not have arrived yet
            return name

    def refused(self, name: str) -> None:
        """A pin that was expected does not come."""
        with self._lock:
            self._expected.pop(name, None)
