"""Three versions of a pin are merged: what this host has, what the store has, and what they agreed on last.

Pure: no I/O, time is an argument. ADR 33 has the table. Nothing is concluded from absence: a pin ends only where one
side says that it is not pinned, and only if the other has not pinned it since.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

from kvtier.fleet.manifest import Manifest, OldVersion, PinnedHow
from kvtier.prompts.replacements import KEPT_VERSIONS


@dataclass(frozen=True, kw_only=True)
class LocalPin:
    """A name as this host has it: its pin or, if one is under way, the replacement, which was asked for last.

    Attributes:
        pinned: False: the pin has ended here, and the row says so; by its TTL if `how` has an end.
        identity: Of its content, as `SharedPrompt.identity`.
        num_tokens: 0: not rendered yet.
        rendered_again: Its source gives other tokens here since it was merged last.
    """

    pinned: bool
    identity: str
    num_tokens: int
    rendered_again: bool = False
    how: PinnedHow = field(default_factory=PinnedHow)
    created_unix_s: float = 0.0


class Agreed:
    """Nothing is to be done: both sides say the same, or the fleet need not know the name."""


@dataclass(frozen=True)
class Push:
    """The store gets the manifest. If its content is new there, `prompt` is empty: the caller enters a key."""

    manifest: Manifest


@dataclass(frozen=True)
class Take:
    """This host gets what the store has."""

    manifest: Manifest


@dataclass(frozen=True)
class Conflict:
    """Both pinned other content under one name: this host's pin gets another name; the store has `manifest`."""

    manifest: Manifest


Merged = Agreed | Push | Take | Conflict


def merge(
    name: str, base: Manifest | None, mine: LocalPin | None, theirs: Manifest | None, now_unix_s: float
) -> Merged:
    """Decide about one name.

    Args:
        base: What the store had when both sides agreed last; None: they never did.
        mine: None: this host has no row of the name.
        theirs: What the store has; None: nothing.
        now_unix_s: By the store's clock.
    """
    if mine is None:
        return Take(theirs) if theirs is not None and theirs.pinned else Agreed()
    if theirs is None:
        return Push(_new(name, mine)) if mine.pinned else Agreed()
    if base is not None:
        return _merge_three(base, mine, theirs, now_unix_s)
    if not mine.pinned:
        return Take(theirs) if theirs.pinned else Agreed()
    if theirs.pinned and mine.identity == theirs.identity:
        return _agreed_but(theirs, mine, theirs.how)
    if theirs.pinned:
        return Conflict(theirs)
    return Push(_replaced(theirs, mine))


def is_asked_otherwise(before: LocalPin, now: LocalPin) -> bool:
    """Return whether an operator has asked for something else: an end that slid on, or tokens, say nothing of that."""
    hows = (replace(each.how, expires_unix_s=0.0) if each.how.sliding else each.how for each in (before, now))
    return before.identity != now.identity or len(set(hows)) > 1


def _merge_three(base: Manifest, mine: LocalPin, theirs: Manifest, now_unix_s: float) -> Merged:
    is_mine_new = mine.pinned != base.pinned or (mine.pinned and mine.identity != base.identity)
    is_theirs_new = theirs.incarnation != base.incarnation or theirs.pinned != base.pinned
    how = _merge_how(base.how, mine.how, theirs.how)
    if mine.pinned and theirs.pinned:
        if mine.identity == theirs.identity:
            return _agreed_but(theirs, mine, how)
        if is_mine_new and is_theirs_new:
            return Conflict(theirs)
        if is_mine_new:
            return Push(_replaced(theirs, mine))
        return Take(theirs)
    if mine.pinned:  # a pin is stronger than an unpin
        if is_mine_new:
            return Push(_replaced(theirs, mine))
        return Take(theirs)
    if theirs.pinned:
        if is_mine_new and not is_theirs_new and not _slid_on(mine, theirs, now_unix_s):
            return Push(replace(theirs, pinned=False, claims=()))
        return Take(theirs)
    return Agreed()


def _slid_on(mine: LocalPin, theirs: Manifest, now_unix_s: float) -> bool:
    """Return whether the pin ended here by its TTL, and only because this host did not know of its use elsewhere."""
    return mine.how.expires_unix_s > 0 and not 0 < theirs.how.expires_unix_s <= now_unix_s


def _agreed_but(theirs: Manifest, mine: LocalPin, how: PinnedHow) -> Merged:
    """Both pinned the same content: what may differ is how, and who has its tokens, or the content at all."""
    is_rendered_here = mine.num_tokens > 0 and not theirs.num_tokens
    if is_rendered_here or mine.rendered_again or not theirs.prompt:
        return Push(replace(theirs, how=how, prompt="", num_tokens=mine.num_tokens))
    if how != theirs.how:
        return Push(replace(theirs, how=how))
    is_rendered_there = theirs.num_tokens > 0 and not mine.num_tokens
    return Take(theirs) if how != mine.how or is_rendered_there else Agreed()


def _merge_how(base: PinnedHow, mine: PinnedHow, theirs: PinnedHow) -> PinnedHow:
    """Return field by field what was changed; where both changed it, mine, and the later end of sliding TTLs."""
    changed = {
        each.name: getattr(mine, each.name)
        for each in fields(PinnedHow)
        if getattr(mine, each.name) != getattr(base, each.name)
    }
    if changed.keys() & {"expires_unix_s", "ttl_s", "sliding"} and mine.ttl_s == theirs.ttl_s and mine.sliding:
        changed["expires_unix_s"] = max(mine.expires_unix_s, theirs.expires_unix_s)
    elif changed.keys() & {"expires_unix_s", "ttl_s", "sliding"}:  # they go together
        changed |= {name: getattr(mine, name) for name in ("expires_unix_s", "ttl_s", "sliding")}
    return replace(theirs, **changed)


def _new(name: str, mine: LocalPin) -> Manifest:
    return Manifest(
        name=name,
        pinned=True,
        incarnation=secrets.token_hex(8),
        prompt="",
        identity=mine.identity,
        num_tokens=mine.num_tokens,
        how=mine.how,
        created_unix_s=mine.created_unix_s,
    )


def _replaced(theirs: Manifest, mine: LocalPin) -> Manifest:
    """Return the manifest with this host's content; what was there becomes the version before, if it is other content.

    Content that is a version already keeps its objects, and so does content that is pinned again.
    """
    if theirs.identity == mine.identity:
        again = replace(theirs, pinned=True, incarnation=secrets.token_hex(8), how=mine.how, versions=theirs.versions)
        is_rendered_here = mine.num_tokens > 0 and not theirs.num_tokens
        return replace(again, prompt="", num_tokens=mine.num_tokens) if is_rendered_here else again
    before = OldVersion(
        number=theirs.number,
        prompt=theirs.prompt,
        identity=theirs.identity,
        num_tokens=theirs.num_tokens,
        stored=theirs.stored,
    )
    known = next((each for each in theirs.versions if each.identity == mine.identity), None)
    others = (each for each in theirs.versions if each.identity != mine.identity)
    return replace(
        _new(theirs.name, mine),
        prompt=known.prompt if known is not None and known.num_tokens else "",
        stored=known.stored if known is not None else (),
        number=theirs.number + 1,
        writes=theirs.writes,
        versions=_newest((*others, before)),
    )


def _newest(versions: Sequence[OldVersion]) -> tuple[OldVersion, ...]:
    kept = (each for each in versions if each.prompt)  # the content of a pin that ended long ago is gone
    return tuple(sorted(kept, key=lambda each: each.number))[-KEPT_VERSIONS:]
