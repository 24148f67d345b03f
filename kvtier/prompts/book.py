"""Named prompts: what is pinned, by which keys each is recognized in which namespace, and how far it is durable."""

import uuid
from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypedDict

from kvtier.core import limits
from kvtier.errors import InvalidArgumentError, PromptExistsError, PromptNotFoundError, PromptNotPinnedError
from kvtier.ledger import BindingRow, Labels, Origin, PromptRow

CONTENT = ("tokens", "model", "lora_name", "lora_path", "cache_salt")
"""The fields that make a prompt the one that it is."""


@dataclass(frozen=True, kw_only=True)
class RequestedPin:
    """PinRequest of proto/kvtier/v1/cache.proto, checked.

    Attributes:
        ttl_s: Seconds until the pin ends, 0: never. None, as in the other fields of how it is pinned: what a pin of
            this name has.
        expires_unix_s: When it ends instead of in `ttl_s` from now, 0: never. For a pin that was made elsewhere.
        sliding: The TTL begins again with each use.
        labels: All labels.
        owner: Whose prompt it is, or whose request it was.
        if_pin_id: Only if the pin of the name, or what is to replace it, has this id.

    Raises:
        InvalidArgumentError: A field cannot be used.
    """

    name: str
    tokens: Sequence[int] = field(default=(), repr=False)
    model: str = ""
    lora_name: str = ""
    lora_path: str = ""
    cache_salt: str = field(default="", repr=False)
    recipe_json: str = field(default="", repr=False)
    ttl_s: int | None = None
    replace: bool = False
    priority: int | None = None
    origin: Origin = "named"
    owner: str | None = None
    public: bool | None = None
    sliding: bool | None = None
    labels: Mapping[str, str] | None = None
    if_pin_id: str = ""
    expires_unix_s: float | None = None

    def __post_init__(self) -> None:
        _check_how(self)
        if self.labels is not None:
            limits.check_labels("labels", self.labels)
        limits.check_count("tokens", len(self.tokens), limits.MAX_TOKENS)
        for name in ("model", "lora_name", "lora_path", "cache_salt"):
            limits.TEXT.check(name, getattr(self, name))
        limits.RECIPE.check("recipe_json", self.recipe_json)
        if not self.tokens and not self.recipe_json:
            raise InvalidArgumentError("tokens", [], "give the prompt's token ids, or a recipe to render later")
        if bool(self.lora_name) != bool(self.lora_path):
            raise InvalidArgumentError("lora_path", self.lora_path, "lora_name and lora_path go together")
        _check_public(self.public, self.cache_salt)


@dataclass(frozen=True, kw_only=True)
class PinUpdate:
    """UpdatePromptRequest of proto/kvtier/v1/cache.proto, checked: fields as in `RequestedPin`.

    Raises:
        InvalidArgumentError: A field cannot be used, or none is given.
    """

    name: str
    ttl_s: int | None = None
    priority: int | None = None
    public: bool | None = None
    sliding: bool | None = None
    owner: str | None = None
    set_labels: Mapping[str, str] = field(default_factory=dict)
    removed_labels: Collection[str] = ()
    expires_unix_s: float | None = None

    def __post_init__(self) -> None:
        _check_how(self)
        limits.check_labels("set_labels", self.set_labels)
        limits.check_count("removed_labels", len(self.removed_labels), limits.NUM_LABELS.most)
        given = (self.ttl_s, self.priority, self.public, self.sliding, self.owner)
        if all(value is None for value in given) and not self.set_labels and not self.removed_labels:
            remedy = "give at least one of them"
            raise InvalidArgumentError("ttl_s, sliding, priority, public, owner, labels", None, remedy)


class PromptBook:
    """All prompts and bindings, in memory; the ledger has the same, written before this changes. Loop thread only.

    Attributes:
        num_pinned: Pinned prompts.
        num_bytes: Memory that token ids and recipes take.
        replacements: Pinned versions that are to take a pin's name (ADR 27), by that name.
        changed_names: Names of operators' prompts that came, went or changed; that of the pin, for what is to replace
            it. None: no one takes them out again.
    """

    def __init__(self) -> None:
        self.num_pinned = self.num_bytes = 0
        self.replacements: dict[str, PromptRow] = {}
        self.changed_names: dict[str, float] | None = None
        self._by_name: dict[str, PromptRow] = {}
        self._names: list[str] = []  # in order
        self._by_pin_id: dict[str, PromptRow] = {}
        self._bindings: dict[str, dict[str, BindingRow]] = {}  # by pin id and namespace

    def __iter__(self) -> Iterator[PromptRow]:
        """Yield all, by name."""
        return iter([self._by_name[name] for name in self._names])

    def __len__(self) -> int:
        return len(self._by_name)

    def after(self, name: str, max_prompts: int) -> list[PromptRow]:
        """Return the next prompts behind this name, in the order of names."""
        start = bisect_right(self._names, name)
        return [self._by_name[each] for each in self._names[start : start + max_prompts]]

    def beginning_with(self, beginning: str) -> Iterator[PromptRow]:
        """Yield prompts whose names begin like this, in the order of names; the book must not change meanwhile."""
        for index in range(bisect_left(self._names, beginning), len(self._names)):
            if not self._names[index].startswith(beginning):
                return
            yield self._by_name[self._names[index]]

    def pinned(self) -> list[PromptRow]:
        """Return the pinned ones, in no order: sorting ten thousand takes longer than looking at them."""
        return [prompt for prompt in self._by_name.values() if prompt.pinned]

    def find(self, name: str) -> PromptRow | None:
        """Return the prompt, None when there is none of this name."""
        return self._by_name.get(name)

    def get(self, name: str) -> PromptRow:
        """Return the prompt.

        Raises:
            PromptNotFoundError: There is none of this name.
        """
        if name not in self._by_name:
            raise PromptNotFoundError(name)
        return self._by_name[name]

    def by_pin_id(self, pin_id: str) -> PromptRow | None:
        """Return the prompt with this id, None when there is none (any longer)."""
        return self._by_pin_id.get(pin_id)

    def standing(self, prompt: PromptRow) -> PromptRow | None:
        """Return a pin as it stands now; None if it has ended meanwhile, or is another's."""
        known = self._by_pin_id.get(prompt.pin_id)
        if known is None or not known.pinned or (known.origin, known.owner) != (prompt.origin, prompt.owner):
            return None
        return known

    def bindings_of(self, pin_id: str) -> list[BindingRow]:
        """Return the prompt's bindings, over all namespaces."""
        return list(self._bindings.get(pin_id, {}).values())

    def num_bound_in(self, namespace_id: str) -> int:
        """Return how many prompts have a binding in a namespace."""
        return sum(namespace_id in rows for rows in self._bindings.values())

    def pinned_bindings(self, namespace_id: str) -> list[BindingRow]:
        """Return the bindings of a namespace's pinned prompts: by priority, then the newest first."""
        prompts = sorted(self.pinned(), key=importance, reverse=True)
        rows = (self.binding(prompt.pin_id, namespace_id) for prompt in prompts)
        return [row for row in rows if row is not None]

    def binding(self, pin_id: str, namespace_id: str) -> BindingRow | None:
        """Return the prompt's binding in a namespace."""
        return self._bindings.get(pin_id, {}).get(namespace_id)

    def draft(self, requested: RequestedPin, now_unix_s: float) -> tuple[PromptRow, PromptRow | None]:
        """Return the prompt as it will be, and the one whose place it takes.

        The same prompt again keeps its id, and with it its bindings and chunks. Of how it is pinned, what was not given
        stays; but a pin that was automatic, or a request's, becomes an operator's with the defaults.

        Raises:
            PromptExistsError: The name is taken by another prompt, and replacing was not asked for.
            PromptNotFoundError: No pin has the id that was named.
        """
        old = self._by_name.get(requested.name)
        if requested.if_pin_id and not self.has_pin(requested.name, requested.if_pin_id):
            raise PromptNotFoundError(requested.if_pin_id)
        kept = old if old is not None and old.origin == requested.origin else None
        differs_in = difference(old, requested) if old is not None else None
        if kept is not None and differs_in is not None:
            kept = self.replacements.get(requested.name, kept)  # what was asked for last
        if kept is not None and requested.cache_salt:
            kept = replace(kept, public=False)
        how = changed_how(kept, requested, now_unix_s)
        if old is not None and differs_in is None:
            return replace(
                old,
                pinned=True,
                recipe_json=requested.recipe_json or old.recipe_json,
                origin=requested.origin,
                **how,
            ), old
        if old is not None and old.tokens and not requested.replace:
            raise PromptExistsError(requested.name, differs_in or "content")
        was_unrendered = old is not None and old.pinned and not old.tokens  # then this is the same promise
        return PromptRow(
            name=requested.name,
            pin_id=uuid.uuid4().hex,
            pinned=True,
            tokens=requested.tokens,
            model=requested.model,
            lora_name=requested.lora_name,
            lora_path=requested.lora_path,
            cache_salt=requested.cache_salt,
            recipe_json=requested.recipe_json,
            created_unix_s=old.created_unix_s if old is not None and was_unrendered else now_unix_s,
            origin=requested.origin,
            **how,
        ), old

    def has_pin(self, name: str, pin_id: str) -> bool:
        """Return whether the pin of a name, or what is to replace it, has this id."""
        rows = (self._by_name.get(name), self.replacements.get(name))
        return any(row is not None and row.pinned and row.pin_id == pin_id for row in rows)

    def put(self, prompt: PromptRow) -> None:
        """Take in a prompt; another one of its name must have been forgotten before."""
        if (old := self._by_name.get(prompt.name)) is None:
            insort(self._names, prompt.name)
        else:
            self._track(old, -1)
        self._track(prompt, 1)
        self._by_name[prompt.name] = prompt
        self._by_pin_id[prompt.pin_id] = prompt

    def _track(self, prompt: PromptRow, sign: int) -> None:
        """Bring what is derived from all rows up to date: one came (1), or went (-1)."""
        self.num_pinned += sign * prompt.pinned
        self.num_bytes += sign * _bytes_of(prompt)
        if self.changed_names is not None and (name := shared_name(prompt)) is not None:
            self.changed_names[name] = prompt.expires_unix_s if sign < 0 and not prompt.pinned else 0.0
        if prompt.pinned and prompt.origin == "replacement" and (version := limits.parse_version(prompt.name)):
            self.replacements.pop(version[0], None)
            if sign > 0:
                self.replacements[version[0]] = prompt

    def rename(self, name: str, prompt: PromptRow) -> None:
        """Enter a prompt under its new name instead of `name`; its bindings stay."""
        self._drop_name(name)
        self.put(prompt)

    def forget(self, prompt: PromptRow) -> None:
        """Drop a prompt and its bindings."""
        self._drop_name(prompt.name)
        self._by_pin_id.pop(prompt.pin_id, None)
        self._bindings.pop(prompt.pin_id, None)

    def _drop_name(self, name: str) -> None:
        if (known := self._by_name.pop(name, None)) is not None:
            del self._names[bisect_right(self._names, name) - 1]
            self._track(known, -1)

    def bind(self, row: BindingRow) -> None:
        """Take in a binding, in place of an older one."""
        self._bindings.setdefault(row.pin_id, {})[row.namespace_id] = row

    def forget_namespace(self, namespace_id: str) -> None:
        """Drop the bindings in a namespace that has ended."""
        for rows in self._bindings.values():
            rows.pop(namespace_id, None)

    def check(self) -> None:
        """Raise AssertionError unless what is counted is what there is."""
        counted = (self._names, self.num_pinned, self.num_bytes)
        if counted != (sorted(self._by_name), len(self.pinned()), sum(map(_bytes_of, self._by_name.values()))):
            raise AssertionError(f"names, counts and prompts disagree: {counted}")

    def expired(self, now_unix_s: float) -> list[PromptRow]:
        """Return pinned prompts whose time is over."""
        return [prompt for prompt in self.pinned() if 0 < prompt.expires_unix_s <= now_unix_s]


def shared_name(prompt: PromptRow) -> str | None:
    """Return the name under which an operator's prompt is known: that of the pin, for what is to replace it.

    None: it is no operator's, or an old version of one.
    """
    version = limits.parse_version(prompt.name)
    if prompt.origin == "replacement" and version is not None:
        return version[0]
    is_operators = prompt.origin == "named" and (prompt.pinned or version is None)
    return prompt.name if is_operators else None


def _bytes_of(prompt: PromptRow) -> int:
    return prompt.token_ids.num_bytes + len(prompt.recipe_json)


class How(TypedDict):
    """The columns of a prompt that say how it is pinned."""

    expires_unix_s: float
    ttl_s: int
    sliding: bool
    priority: int
    public: bool
    owner: str
    labels: Labels


NOT_PINNED: How = {
    "expires_unix_s": 0.0,
    "ttl_s": 0,
    "sliding": False,
    "priority": 0,
    "public": False,
    "owner": "",
    "labels": (),
}


def how_of(prompt: PromptRow) -> How:
    """Return how a prompt is pinned."""
    return {name: getattr(prompt, name) for name in NOT_PINNED}  # type: ignore[return-value]


def ended(prompt: PromptRow, *, by_ttl: bool = False) -> PromptRow:
    """Return a prompt whose pin has ended. Owner and labels stay: prompts are selected by them.

    So does when it ended, if its TTL was over: another host may know of a use since. An operator's word is final.
    """
    ends_unix_s = prompt.expires_unix_s if by_ttl else 0.0
    return replace(prompt, pinned=False, expires_unix_s=ends_unix_s, ttl_s=0, sliding=False, priority=0, public=False)


def changed_how(old: PromptRow | None, given: RequestedPin | PinUpdate, now_unix_s: float) -> How:
    """Return when a pin will end and so on: what is given, else what `old` has, else the defaults.

    Raises:
        InvalidArgumentError: It shall be sliding, and has no TTL.
    """
    kept = NOT_PINNED if old is None else how_of(old if old.pinned else ended(old))
    expires_unix_s, ttl_s = kept["expires_unix_s"], kept["ttl_s"]
    sliding = kept["sliding"] if given.sliding is None else given.sliding
    if given.ttl_s is not None:
        expires_unix_s = now_unix_s + given.ttl_s if given.ttl_s else 0.0
        ttl_s = given.ttl_s
    if given.expires_unix_s is not None:
        expires_unix_s = given.expires_unix_s
    if given.sliding and not ttl_s:
        remedy = "the time that begins again at each use is not given; give it too: --ttl 12h (ttl_s)"
        raise InvalidArgumentError("sliding", True, remedy)
    labels = dict(kept["labels"])
    if isinstance(given, PinUpdate):
        labels = {key: value for key, value in labels.items() if key not in given.removed_labels}
        labels = limits.check_labels("labels", labels | dict(given.set_labels))
    elif given.labels is not None:
        labels = dict(given.labels)
    return {
        "expires_unix_s": expires_unix_s,
        "ttl_s": ttl_s,
        "sliding": sliding and bool(ttl_s),
        "priority": kept["priority"] if given.priority is None else given.priority,
        "public": kept["public"] if given.public is None else given.public,
        "owner": kept["owner"] if given.owner is None else given.owner,
        "labels": tuple(sorted(labels.items())),
    }


def _check_how(given: RequestedPin | PinUpdate) -> None:
    limits.check_name(given.name)
    if given.ttl_s is not None:
        limits.TTL_S.check("ttl_s", given.ttl_s)
    if given.priority is not None:
        limits.PRIORITY.check("priority", given.priority)
    if given.owner is not None:
        limits.check_operators_owner("owner", given.owner)


def _check_public(public: bool | None, cache_salt: str) -> None:
    if public and cache_salt:
        raise InvalidArgumentError("public", True, "a public prompt has no cache_salt; pin it without one")


def importance(prompt: PromptRow) -> tuple[int, float]:
    """Return what sorts prompts by priority, then the newest; the more important, the greater."""
    return prompt.priority, prompt.created_unix_s


def updated(old: PromptRow, update: PinUpdate, now_unix_s: float) -> PromptRow:
    """Return a prompt as it will be.

    Raises:
        PromptNotPinnedError: No operator has it pinned.
        InvalidArgumentError: It cannot be public.
    """
    if not old.pinned or old.origin not in ("named", "replacement"):
        raise PromptNotPinnedError(old.name, old.origin if old.pinned else "")
    _check_public(update.public, old.cache_salt)
    return replace(old, **changed_how(old, update, now_unix_s))


def difference(old: PromptRow, requested: RequestedPin | PromptRow) -> str | None:
    """Return the first field in which a prompt is another one than that asked for; None: it is the same."""
    if not requested.tokens and requested.recipe_json and requested.recipe_json == old.recipe_json:
        # vLLM renders it to these tokens, or will.
        if requested.model and requested.model not in (old.model, old.lora_name):
            return "model"
        compared: Sequence[str] = ("cache_salt",)
    else:
        compared = CONTENT
    for name in compared:
        if getattr(old, name) != getattr(requested, name):
            return name
    return None
