"""This host's side of a shared pin: how a name stands here, and how it becomes as the store has it."""

from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from typing import NamedTuple

from kvtier.errors import KvtierError
from kvtier.fleet.manifest import Manifest, PinnedHow, SharedPrompt, has_source
from kvtier.fleet.merge import LocalPin
from kvtier.ledger import PromptRow
from kvtier.prompts.book import PinUpdate, RequestedPin, shared_name
from kvtier.service import Cache


class ChangedMeanwhileError(KvtierError):
    """A name stands otherwise now than when it was decided about: decide again."""


class _Rows(NamedTuple):
    """A name's row and that of what is to replace it; rows never change, so these objects say whether they did."""

    row: PromptRow | None
    staged: PromptRow | None

    def same(self, other: "_Rows") -> bool:
        return self.row is other.row and self.staged is other.staged


class LocalPins:
    """Reads and changes the pins of one daemon. Loop thread only."""

    def __init__(self, cache: Cache) -> None:
        self._cache, self._prompts = cache, cache.prompts
        self._read: dict[str, tuple[_Rows, LocalPin]] = {}  # by name, as long as the rows are these
        self._merged: dict[str, _Rows] = {}  # by name: as they were when it was last merged
        # Changed since it was last merged, with the end of a row that its TTL had unpinned before it went.
        names = (shared_name(prompt) for prompt in self._prompts)
        self._changed = self._prompts.changed_names = {name: 0.0 for name in names if name is not None}

    @property
    def changed(self) -> Set[str]:
        """Names that have changed since they were last merged; at the start all of them."""
        return self._changed.keys()

    def is_gone(self, name: str) -> bool:
        """Return whether there is no row of a name any longer, because someone has ended or renamed the pin."""
        return name in self._changed and not self._changed[name] and self._rows(name).row is None

    def note_gone(self, name: str) -> None:
        """A pin has gone so before the start."""
        self._changed[name] = 0.0

    def changed_names(self) -> list[str]:
        """Return the same, the important first."""
        rows = {name: self._rows(name).row for name in self._changed}
        return sorted(rows, key=lambda name: _urgency(rows[name]))

    def find(self, name: str) -> LocalPin | None:
        """Return how a name stands; None: there is no prompt of operators, and none has gone since the last merge.

        A row goes because someone has ended or renamed the pin. One that is lost is missing from the start on.
        """
        rows = self._rows(name)
        if rows.row is None:
            self._read.pop(name, None)
            if (ended_unix_s := self._changed.get(name)) is None:
                return None
            return LocalPin(pinned=False, identity="", num_tokens=0, how=PinnedHow(expires_unix_s=ended_unix_s))
        known = self._read.get(name)
        if known is None or not known[0].same(rows):
            known = self._read[name] = rows, _read(rows.row, rows.staged)
        before = self._merged.get(name, _NONE)
        if before.row is None or not _is_rendered_again(before.staged or before.row, rows.staged or rows.row):
            return known[1]
        return replace(known[1], rendered_again=True)

    def agree(self, name: str, manifest: Manifest | None) -> None:
        """Remember how a name stands, if that is what the store has."""
        if self.is_as(name, manifest):
            rows = self._rows(name)
            if rows.row is None:
                self._merged.pop(name, None)
            else:
                self._merged[name] = rows
            self._changed.pop(name, None)

    def is_as(self, name: str, manifest: Manifest | None) -> bool:
        """Return whether a name stands here as in the store."""
        mine = self.find(name)
        is_pinned = manifest is not None and manifest.pinned
        if (mine is not None and mine.pinned) != is_pinned:
            return False
        if mine is not None and manifest is not None and mine.pinned:
            is_rendered_alike = bool(mine.num_tokens) == bool(manifest.num_tokens)
            if (mine.identity, mine.how) != (manifest.identity, manifest.how) or not is_rendered_alike:
                return False
        return True

    def wanted(self, name: str) -> PromptRow | None:
        """Return the prompt of a name or, if one is under way, its replacement: what was asked for last."""
        rows = self._rows(name)
        return rows.staged or rows.row

    def unchanged(self, name: str) -> Callable[[], None]:
        """Return a check that raises ChangedMeanwhileError if the name stands otherwise than now."""
        before = self._rows(name)

        def check() -> None:
            if not self._rows(name).same(before):
                raise ChangedMeanwhileError(f"prompt {name!r} was changed meanwhile")

        return check

    def needs_content(self, manifest: Manifest) -> bool:
        """Return whether taking what the store has needs tokens and source from there."""
        mine = self.find(manifest.name)
        if not manifest.pinned:
            return False
        if mine is None or not mine.pinned or mine.identity != manifest.identity:
            return True
        return manifest.num_tokens > 0 and not mine.num_tokens

    async def pin(self, pins: Sequence[tuple[Manifest, SharedPrompt]], checks: Sequence[Callable[[], None]]) -> None:
        """Pin as the store says, all in one transaction; what is durable here serves until the new content is.

        Args:
            checks: Of `unchanged`, of each.

        Raises:
            ChangedMeanwhileError: A check failed; nothing has changed.
            KvtierError: As `Pins.apply`; nothing has changed.
        """

        def check() -> None:
            for each in checks:
                each()

        await self._cache.pins.apply([_requested(*each) for each in pins], precondition=check)

    async def follow(self, manifest: Manifest, check: Callable[[], None]) -> None:
        """Change how a prompt is pinned to what the store says, or end its pin; raises as `pin`.

        Its content is here already.
        """
        mine = self.find(manifest.name)
        if mine is None or not mine.pinned:
            return
        if not manifest.pinned:
            await self._cache.pins.unpin(manifest.name, precondition=check)
        elif mine.how != manifest.how:
            await self._update(manifest, check)

    async def _update(self, manifest: Manifest, check: Callable[[], None]) -> None:
        how = vars(manifest.how).copy()
        labels = dict(how.pop("labels"))
        here = {key for row in self._rows(manifest.name) if row is not None for key, _ in row.labels}
        removed = here - labels.keys()
        update = PinUpdate(name=manifest.name, set_labels=labels, removed_labels=removed, **how)
        await self._cache.pins.update(update, precondition=check)

    async def rename(self, name: str, new_name: str, check: Callable[[], None]) -> None:
        """Give a pin another name, with its versions; raises as `pin`."""
        await self._cache.renames.rename(name, new_name, precondition=check)

    def _rows(self, name: str) -> _Rows:
        row = self._prompts.find(name)
        if row is None or row.origin != "named":
            return _NONE
        return _Rows(row, self._prompts.replacements.get(name))


_NONE = _Rows(None, None)


def _urgency(row: PromptRow | None) -> tuple[bool, int, float]:
    """Return what sorts pins before what has ended, by priority, the oldest first."""
    return (not row.pinned, -row.priority, row.created_unix_s) if row is not None else (True, 0, 0.0)


def _is_rendered_again(before: PromptRow, now: PromptRow) -> bool:
    """Return whether a source has other tokens now."""
    is_same_source = before.recipe_json == now.recipe_json and has_source(now.recipe_json)
    return is_same_source and bool(now.tokens) and before.tokens != now.tokens


def _read(row: PromptRow, staged: PromptRow | None) -> LocalPin:
    wanted = staged or row
    return LocalPin(
        pinned=row.pinned,
        identity=SharedPrompt.of(wanted).identity,
        num_tokens=len(wanted.tokens),
        how=PinnedHow.of(wanted),
        created_unix_s=wanted.created_unix_s,
    )


def _requested(manifest: Manifest, content: SharedPrompt) -> RequestedPin:
    how = vars(manifest.how) | {"labels": dict(manifest.how.labels)}
    return RequestedPin(name=manifest.name, replace=True, **vars(content), **how)
