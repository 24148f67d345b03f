"""Keeps this host's pins and the store's the same: looks what changed on either side, merges, and brings both along.

A look lists the manifests (one request for each thousand), reads those that are new, and merges each name that changed
on either side. A change of the store is a swap of the manifest that was merged with; if another host was faster, the
name is merged again.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvtier.concurrency.parallel_calls import in_parallel
from kvtier.concurrency.turns import Breather
from kvtier.errors import (
    DrainingError,
    KvtierError,
    LedgerError,
    RemoteDamagedError,
    RemoteNewerError,
    RemoteStoreError,
)
from kvtier.fleet.local_pins import ChangedMeanwhileError, LocalPins
from kvtier.fleet.manifest import (
    MAX_WRITES,
    PINS,
    Claim,
    Manifest,
    SharedPrompt,
    is_content_of,
    manifest_key,
    new_prompt_key,
)
from kvtier.fleet.merge import Conflict, LocalPin, Merged, Push, Take, is_asked_otherwise, merge
from kvtier.ledger import SENT, SharedPinRow
from kvtier.obs.log import log_event
from kvtier.remote.base import RemoteStore, SmallObject, Version, one_piece
from kvtier.tiering.resources import Resources

logger = logging.getLogger(__name__)

Check = Callable[[], None]

_TOGETHER = 256
"""Pins of other hosts that one transaction of the ledger records."""
_MAX_TRIES = 10
"""Of a swap that other hosts win; after that the next look goes on."""
_MAX_READS = 3
"""Of an object that is not what was written: it may be the way that spoils it."""
_CHANGE = (
    "it is left until the pin is changed by `kvtier set`, or by `kvtier pin --replace` with other content: do so on "
    "the host that changed it last"
)
"""What to do about a manifest that is damaged."""
_UPGRADE = (
    "it is left; if no newer kvtier shares this store, delete the object, and hosts that have the pin write it again"
)
"""What to do about one that is whole, and cannot be read here."""


@dataclass(frozen=True)
class _Seen:
    """What the store had when it was last read. `base`: what both sides agreed on last, as the ledger has it."""

    manifest: Manifest | None
    version: Version | None
    base: Manifest | None = None


_UNSEEN = _Seen(None, None)


@dataclass
class _Unreadable:
    """A manifest that is there, and that this host cannot read. `left`: how the name stood here when it was left."""

    version: Version
    error: RemoteDamagedError
    left: LocalPin | None = None

    @property
    def is_newer(self) -> bool:
        """It is whole: no host that cannot read it may replace it."""
        return isinstance(self.error, RemoteNewerError)

    @property
    def remedy(self) -> str:
        """What an operator can do."""
        return _UPGRADE if self.is_newer else _CHANGE

    def is_replaced_by(self, mine: LocalPin | None) -> bool:
        """Return whether an operator has changed the pin here since the name was left."""
        if self.is_newer or self.left is None or mine is None:
            return False
        return self.left.pinned and mine.pinned and is_asked_otherwise(self.left, mine)


class _StoreView:
    """What the store has, as it was last read.

    Attributes:
        seen: By name.
        names: Of manifests, by key.
        unreadable: By key.
        unmerged: Names that the store has otherwise than they were last merged.
        sent: What this host has sent, and not found in the store yet, by name: as a base, should it be there.
    """

    def __init__(self) -> None:
        self.seen: dict[str, _Seen] = {}
        self.names: dict[str, str] = {}
        self.unreadable: dict[str, _Unreadable] = {}
        self.unmerged: set[str] = set()
        self.sent: dict[str, tuple[Manifest, ...]] = {}

    def of(self, name: str) -> _Seen:
        """Return what the store has of a name."""
        return self.seen.get(name, _UNSEEN)

    def last_pinned(self, name: str) -> Manifest | None:
        """Return the pin that the store has or may have of a name: what was agreed on, else what was sent last."""
        known = (self.of(name).base, *reversed(self.sent.get(name, ())))
        return next((each for each in known if each is not None and each.pinned), None)

    def unreadable_of(self, name: str) -> _Unreadable | None:
        """Return the manifest of a name, if it is there and cannot be read."""
        return self.unreadable.get(manifest_key(name)) if self.unreadable else None

    def compare(self, listed: Mapping[str, Version]) -> list[str]:
        """Note which manifests are gone; return keys to read: new versions, and, at each look, what cannot be read."""
        self.unreadable = {key: each for key, each in self.unreadable.items() if key in listed}
        for key, name in self.names.items():
            if key not in listed and self.seen[name].version is not None:  # the bucket was emptied
                self.note(key, None, None)
        return [key for key, version in listed.items() if key in self.unreadable or self._is_new(key, version)]

    def _is_new(self, key: str, version: Version) -> bool:
        return key not in self.names or self.seen[self.names[key]].version != version

    def note(self, key: str, manifest: Manifest | None, version: Version | None) -> None:
        """A manifest was read, or is not there."""
        self.unreadable.pop(key, None)
        name = manifest.name if manifest is not None else self.names.get(key)
        if name is None:
            return
        seen = self.of(name)
        if manifest != seen.manifest or manifest != seen.base:
            self.unmerged.add(name)
        self.put(name, replace(seen, manifest=manifest, version=version))

    def note_unreadable(self, key: str, version: Version, error: RemoteDamagedError) -> bool:
        """A manifest cannot be read. Return whether that is new."""
        known = self.unreadable.get(key)
        if known is not None and known.version == version:
            known.error = error
            return False
        self.unreadable[key] = _Unreadable(version, error)
        if (name := self.names.get(key)) is not None:
            self.put(name, replace(self.seen[name], manifest=None, version=version))
            self.unmerged.add(name)
        return True

    def put(self, name: str, seen: _Seen) -> None:
        """Enter what the store has of a name. What this host itself has written is no news, but the base."""
        here, known = (each.writes if each is not None else () for each in (seen.manifest, seen.base))
        own = [sent for sent in self.sent.get(name, ()) if sent.writes[-1] in here and sent.writes[-1] not in known]
        if own:  # the others cannot arrive now: what they were to replace is gone
            del self.sent[name]
        self.names[manifest_key(name)] = name
        self.seen[name] = replace(seen, base=own[-1]) if own else seen


class GonePins:
    """Pins that have gone here with their rows: noted in the ledger until the store knows, or a start took them for
    lost. Loop thread only."""

    def __init__(self, resources: Resources, local: LocalPins, view: _StoreView, url: str) -> None:
        self._resources, self._local, self._view, self._url = resources, local, view, url
        self._noted: set[str] = set()
        self._awaited: set[str] = set()

    def load(self, name: str) -> None:
        """A pin has gone before the start, as the ledger says."""
        self._noted.add(name)
        self._local.note_gone(name)

    async def note(self) -> None:
        """Note those that are new. Raises LedgerError."""
        breather, gone = Breather(), list[str]()
        for name in [*self._local.changed]:  # all names at a start, and for as long as the store is away then
            await breather.pause()
            if self._local.is_gone(name):
                gone.append(name)
        still = [name for name in gone if name not in self._noted and self._local.is_gone(name)]
        bases = {name: self._view.last_pinned(name) for name in still}
        found = {name: base for name, base in bases.items() if base is not None}
        if found:
            rows = [SharedPinRow(manifest_key(name), base.to_bytes(), "") for name, base in found.items()]
            self._noted.update(found)  # before a look can agree on one meanwhile
            try:
                await self._resources.in_ledger(self._resources.ledger.shared.put, self._url, rows)
            except BaseException:
                self._noted.difference_update(found)
                raise

    def may_arrive(self, name: str) -> bool:
        """Return whether a pin that has gone may still get to the store: it was sent, and was not found there yet."""
        return self._local.is_gone(name) and any(each.pinned for each in self._view.sent.get(name, ()))

    def is_to_note(self, name: str) -> bool:
        """Return whether a pin may still arrive, and a start would not know that it has gone."""
        return name not in self._noted and self.may_arrive(name)

    def agreed(self, names: Sequence[str]) -> None:
        """The ledger has what both sides agree on now, in place of such a note; but of a pin that may still arrive."""
        late = {name for name in names if self.may_arrive(name)}
        self._awaited |= late
        self._noted.difference_update(name for name in names if name not in late)

    def arrived(self, name: str) -> None:
        """The store has a pin of a name: this host's may have gone here while it was on its way."""
        if name in self._awaited:
            self._awaited.remove(name)
            if self._local.find(name) is None:
                self._local.note_gone(name)


class PinSync:
    """Loop thread only; one look at a time.

    Args:
        store: The fleet's.
        host: This host's name in what it writes.
        now_unix_s: The store's clock.
        claims_of: Returns claims that a new manifest of this host begins with.

    Attributes:
        refused: Why a pin is not the same here and in the store, and does not become so by itself, by name.
        gone: Pins that have gone here with their rows.
        has_looked: A look at the store has succeeded since the start.
        num_conflicts: Names that were pinned with other content on two hosts at once.
    """

    def __init__(
        self,
        resources: Resources,
        local: LocalPins,
        store: RemoteStore,
        *,
        host: str,
        now_unix_s: Callable[[], float],
        claims_of: Callable[[str], tuple[Claim, ...]] = lambda name: (),
    ) -> None:
        self._resources, self._local, self._store = resources, local, store
        self._host, self._now_unix_s, self._claims_of = host, now_unix_s, claims_of
        self.refused: dict[str, str] = {}
        self.has_looked = False
        self.num_conflicts = 0
        self._view = _StoreView()
        self.gone = GonePins(resources, local, self._view, store.url)
        self._written: dict[str, str] = {}  # by name: key of content that this look wrote, and no manifest names yet
        self._looking = asyncio.Lock()

    async def load(self) -> None:
        """Read what was agreed on before the start. Raises LedgerError."""
        for row in await self._resources.in_ledger(self._resources.ledger.shared.load, self._store.url):
            key, is_sent = row.key.removesuffix(SENT), row.key.endswith(SENT)
            try:
                manifests = [Manifest.from_bytes(key, each) for each in row.manifest.split(b"\n")]
            except RemoteDamagedError as error:  # without a base the store's word counts
                log_event(logger, "shared_pin_unreadable", level=logging.WARNING, problem=str(error))
                continue
            name = manifests[0].name
            if is_sent:
                self._view.sent[name] = tuple(manifests)
            else:
                self._view.put(name, _Seen(manifests[0], Version(row.version), manifests[0]))
                if not row.version:
                    self.gone.load(name)
                elif manifests[0].pinned and self._local.find(name) is None:  # the ledger has lost it
                    self._view.unmerged.add(name)

    @property
    def is_behind(self) -> bool:
        """A pin was changed here since the last look."""
        return not self.refused.keys() >= self._local.changed

    @property
    def has_unreadable(self) -> bool:
        """The store has manifests that this kvtier cannot read."""
        return bool(self._view.unreadable)

    def manifests(self) -> list[Manifest]:
        """Return what the store had at the last look."""
        return [seen.manifest for seen in self._view.seen.values() if seen.manifest is not None]

    def manifest(self, name: str) -> Manifest | None:
        """Return what the store had of a name at the last look."""
        return self._view.of(name).manifest

    def is_shared(self, name: str) -> bool:
        """Return whether the store has a pin as it is here."""
        seen, is_changed = self._view.of(name), name in self._view.unmerged or name in self._local.changed
        return seen.manifest is not None and seen.manifest.pinned and not is_changed

    async def look(self, *, lists: bool = True) -> None:
        """Bring both sides along.

        Args:
            lists: Look what the store has; else only what changed here goes there.

        Raises:
            RemoteStoreError: The store did not do its part; what was done until then stays done.
            LedgerError: The ledger refused.
            DrainingError: The daemon is stopping.
        """
        async with self._looking:
            self._written.clear()
            await self.gone.note()
            if lists:
                await self._read_store()
            names = dict.fromkeys([*self._local.changed_names(), *self._view.unmerged])
            await self._merge_all([name for name in names if lists or name not in self.refused])
            self.has_looked = self.has_looked or lists

    async def change(self, name: str, changed: Callable[[Manifest], Manifest | None]) -> Manifest | None:
        """Change what the store says of a name beside the pin itself (its KV, claims).

        Args:
            changed: Gets the manifest as it is, and returns it as it shall be; None: it shall stay. Called again when
                another host was faster.

        Returns:
            The manifest as it is then; None if there is none, or it shall stay.

        Raises:
            RemoteStoreError: As `look`.
        """
        async with self._looking:
            for _ in range(_MAX_TRIES):
                seen = self._view.of(name)
                wanted = changed(seen.manifest) if seen.manifest is not None else None
                if wanted is None:
                    return None
                if await self._write(name, wanted):
                    return wanted
                await self._read_one(manifest_key(name))
        return None

    # What the store has

    async def _read_store(self) -> None:
        listed = {info.key: info.version async for info in self._store.list(PINS)}
        await in_parallel(self._read_one, self._view.compare(listed))

    async def _read_one(self, key: str) -> None:
        for num_reads in range(1, _MAX_READS + 1):
            found = await _get(self._store, key)
            if found is None:
                self._view.note(key, None, None)
                return
            try:
                manifest = Manifest.from_bytes(key, found.data)
            except RemoteDamagedError as error:
                if num_reads == _MAX_READS:
                    self._note_unreadable(key, found.version, error)
                continue
            self._view.note(key, manifest, found.version)
            return

    def _note_unreadable(self, key: str, version: Version, error: RemoteDamagedError) -> None:
        """A manifest is left: only who changed it last knows what it says."""
        if self._view.note_unreadable(key, version, error):
            noted, name = self._view.unreadable[key], self._view.names.get(key)
            log_event(logger, "manifest_damaged", level=logging.ERROR, problem=str(error), remedy=noted.remedy)
            if name is not None:
                self._leave(name, noted)

    # Merging

    async def _merge_all(self, names: Sequence[str]) -> None:
        breather, taken = Breather(), list[_NewPin]()
        for name in names:
            await breather.pause()
            if (take := await self._merge(name)) is not None:
                taken.append(take)
            if len(taken) >= _TOGETHER:
                await self._pin_together(taken)
                taken = []
        await self._pin_together(taken)

    async def _merge(self, name: str) -> "_NewPin | None":
        """Bring one name along; return what is to be pinned, together with others."""
        for _ in range(_MAX_TRIES):
            if self._leaves(name):
                return None
            seen, check = self._view.of(name), self._local.unchanged(name)
            if seen.manifest is not None and seen.manifest.pinned:
                self.gone.arrived(name)
            merged = merge(name, seen.base, self._local.find(name), seen.manifest, self._now_unix_s())
            try:
                if isinstance(merged, Take) and self._local.needs_content(merged.manifest):
                    return _NewPin(merged.manifest, check)
                if not await self._carry_out(name, merged, check):
                    continue
                await self._agree([name])
            except ChangedMeanwhileError:
                continue
            except (RemoteStoreError, LedgerError, DrainingError):
                raise
            except KvtierError as error:
                self._refuse(name, str(error))
            return None
        return None

    def _leaves(self, name: str) -> bool:
        """Return whether a name stays as it is here, because this host cannot read what the store says of it."""
        unreadable = self._view.unreadable_of(name)
        if unreadable is None:
            return False
        if unreadable.is_replaced_by(self._local.find(name)):
            self._view.put(name, replace(self._view.of(name), manifest=None, version=unreadable.version))
            return False
        self._leave(name, unreadable)
        return True

    def _leave(self, name: str, unreadable: _Unreadable) -> None:
        unreadable.left = self._local.find(name)
        self._refuse(name, f"{unreadable.error}; {unreadable.remedy}")

    async def _carry_out(self, name: str, merged: Merged, check: Check) -> bool:
        """Do what was decided of a name; say whether that is all, else it is to be merged again."""
        if isinstance(merged, Push):
            return await self._push(name, merged.manifest, check)
        if isinstance(merged, Conflict):
            await self._set_aside(name, check)
            return False
        if isinstance(merged, Take):
            await self._local.follow(merged.manifest, check)
        return True

    async def _push(self, name: str, manifest: Manifest, check: Check) -> bool:
        """Write what was merged; say whether no other host was faster."""
        mine = self._local.find(name)
        assert mine is not None
        if manifest.pinned and not manifest.prompt:
            row = self._local.wanted(name)
            check()
            assert row is not None
            content = SharedPrompt.of(row)
            data = content.to_bytes()
            key = self._written.get(name, "")
            if not is_content_of(key, data):  # else another host was faster
                key = new_prompt_key(data)
                await self._store.put_stream(key, one_piece(data))
                self._written[name] = key
            claims = (*manifest.claims, *self._claims_of(name))
            manifest = replace(manifest, prompt=key, num_tokens=len(content.tokens), claims=claims)
        manifest = replace(manifest.with_write(), changed_by=self._host)
        await self._note_sent(name, replace(manifest, how=mine.how))  # what others have changed of it is not here yet
        if not await self._write(name, manifest):
            await self._read_one(manifest_key(name))
            return False
        self._written.pop(name, None)
        await self._local.follow(manifest, check)
        log_event(logger, "pin_shared", name=name, pinned=manifest.pinned, version=manifest.number)
        return True

    async def _note_sent(self, name: str, manifest: Manifest) -> None:
        """Remember a change before it is sent: its answer may be lost, and the pin be changed here meanwhile."""
        sent = self._view.sent[name] = (*self._view.sent.get(name, ()), manifest)[-MAX_WRITES:]
        row = SharedPinRow(manifest_key(name) + SENT, b"\n".join(each.to_bytes() for each in sent), "")
        await self._resources.in_ledger(self._resources.ledger.shared.put, self._store.url, [row])

    async def _write(self, name: str, manifest: Manifest) -> bool:
        """Swap what the store was seen to have for this; say whether it is there now."""
        seen, key = self._view.of(name), manifest_key(name)
        signed = replace(manifest, changed_unix_s=self._now_unix_s())
        data = signed.to_bytes()
        if seen.version is None:
            version = await self._store.put_new(key, data)
        else:
            version = await self._store.swap(key, data, seen.version)
        if version is None:  # another host was faster, or the answer to our own write was lost
            found = await self._store.get(key)
            if found is None or found.data != data:
                return False
            version = found.version
        self._view.unreadable.pop(key, None)
        self._view.put(name, replace(seen, manifest=signed, version=version))
        if seen.manifest is not None and seen.manifest == seen.base and _is_same_pin(seen.manifest, signed):
            await self._agree([name])
        return True

    async def _pin_together(self, taken: Sequence["_NewPin"]) -> None:
        """Pin prompts of other hosts in one transaction; if one is refused, each alone, so that the others are not."""
        contents = await in_parallel(self._content, [each.manifest for each in taken])
        readable = list[tuple[_NewPin, SharedPrompt]]()
        for take, content in zip(taken, contents, strict=True):
            if isinstance(content, SharedPrompt):
                readable.append((take, content))
            else:
                self._refuse(take.manifest.name, content)
        if not readable:
            return
        pins = [(take.manifest, content) for take, content in readable]
        try:
            await self._local.pin(pins, [take.check for take, _ in readable])
        except (RemoteStoreError, LedgerError, DrainingError):
            raise
        except KvtierError as error:
            if len(readable) > 1:
                for take, _ in readable:
                    await self._pin_together([take])
            elif not isinstance(error, ChangedMeanwhileError):  # that is merged at the next look
                self._refuse(readable[0][0].manifest.name, str(error))
            return
        await self._agree([take.manifest.name for take, _ in readable])

    async def _content(self, manifest: Manifest) -> SharedPrompt | str:
        """Return a prompt's content, or why it cannot be read.

        If its object is gone or damaged, the manifest then says so, and a host that has the prompt writes another.
        """
        key = manifest.prompt
        problem = "the store lacks the content of this prompt"
        for _ in range(_MAX_READS if key else 0):
            try:
                found = await self._store.get(key)
            except RemoteDamagedError as error:  # too long; or sealed with a key that others have
                return str(error)
            if found is None:
                problem = f"the store has no object {key}, and a manifest names it"
                break
            try:
                return SharedPrompt.from_bytes(key, found.data)
            except RemoteDamagedError as error:
                if is_content_of(key, found.data):  # written so, as by a newer kvtier
                    return str(error)
                problem = str(error)
        if key:
            await self._write(manifest.name, replace(manifest, prompt=""))
        return f"{problem}; a host that has the prompt writes it again when it looks at the store"

    async def _set_aside(self, name: str, check: Check) -> None:
        """Two hosts pinned other content: the store's keeps the name, ours goes on under another one."""
        mine = self._local.find(name)
        assert mine is not None
        new_name = f"{name[:100]}-conflict-{mine.identity[:6]}"
        await self._local.rename(name, new_name, check)
        self.num_conflicts += 1
        log_event(
            logger,
            "pin_conflict",
            level=logging.WARNING,
            name=name,
            renamed=new_name,
            why="another host pinned other content under this name at the same time",
            remedy="compare both with `kvtier show`, and unpin the one that is not wanted",
        )
        await self._merge(new_name)

    def _refuse(self, name: str, problem: str) -> None:
        if self.refused.get(name) != problem:
            log_event(logger, "shared_pin_refused", level=logging.WARNING, name=name, problem=problem)
        self.refused[name] = problem

    async def _agree(self, names: Sequence[str]) -> None:
        """Both sides were the same: what the store has is the base. Unless this one was changed since, they still are.

        A name that the ledger has not recorded is merged again.
        """
        agreed = [name for name in names if self._local.is_as(name, self._view.of(name).manifest)]
        rows = list[SharedPinRow]()
        for name in [name for name in names if name in self._view.seen]:
            seen = self._view.of(name)
            is_pinned = seen.manifest is not None and seen.manifest.pinned
            if (is_pinned and self._local.is_gone(name)) or self.gone.may_arrive(name):
                continue  # the note that it has gone stays until the store knows
            self._view.put(name, replace(seen, base=seen.manifest))
            if seen.manifest is not None and seen.version is not None:
                pinned_name = name if seen.manifest.pinned else ""  # it may have been forgotten, and the row not yet
                rows.append(SharedPinRow(manifest_key(name), seen.manifest.to_bytes(), seen.version.text, pinned_name))
        if rows:
            await self._resources.in_ledger(self._resources.ledger.shared.put, self._store.url, rows)
        agreed = [name for name in agreed if not self.gone.is_to_note(name)]
        self.gone.agreed([name for name in names if not self._local.is_gone(name) or name in agreed])
        self._view.unmerged.difference_update(agreed)
        for name in agreed:
            self._local.agree(name, self._view.of(name).manifest)
            self.refused.pop(name, None)


class _NewPin(NamedTuple):
    """A pin of another host that is to be made here; `check` raises if the name has changed since that was decided."""

    manifest: Manifest
    check: Check


def _is_same_pin(one: Manifest, other: Manifest) -> bool:
    return (one.incarnation, one.pinned, one.how, one.num_tokens) == (
        other.incarnation,
        other.pinned,
        other.how,
        other.num_tokens,
    )


async def _get(store: RemoteStore, key: str) -> SmallObject | None:
    """Return a manifest's object; one that is too long comes without its bytes, so that it is a damaged one."""
    try:
        return await store.get(key)
    except RemoteDamagedError:
        found = await store.head(key)
        return SmallObject(data=b"", version=found.version) if found is not None else None
