"""KV of shared pins goes up when it is durable here, and comes down where it is missing. One host computes each.

A claim in the manifest says who computes and uploads, until it ends; others wait so long. Claims save work and decide
nothing: a host that finds KV entered when it comes to enter its own deletes what it has uploaded.
"""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvtier.concurrency.turns import Breather
from kvtier.core.layout import digest_of
from kvtier.errors import KvtierError, RemoteStoreError
from kvtier.fleet.garbage import discard
from kvtier.fleet.local_pins import LocalPins
from kvtier.fleet.manifest import Claim, Content, KVId, Manifest, StoredKV
from kvtier.fleet.pin_sync import PinSync
from kvtier.fleet.restoring import RestoreOutcome, restore_prompt
from kvtier.fleet.store_clock import StoreClock
from kvtier.fleet.uploading import upload_prompt
from kvtier.ledger import BindingRow, PromptRow
from kvtier.obs.log import log_event
from kvtier.prompts.book import importance, shared_name
from kvtier.prompts.states.status import durability_of
from kvtier.remote.base import RemoteStore
from kvtier.service import Cache
from kvtier.tiering.namespace import Namespace

logger = logging.getLogger(__name__)

CLAIM_S = 300.0
"""Of one claim: longer than most prompts take to be computed and uploaded, and no longer than others can wait in vain
for a host that has died."""
_UNCLAIMED_S = 10.0
"""How long an engine waits for this host's claim before it computes without one, the store being away."""
_RETRY_S, _MAX_RETRY_S = 10.0, 600.0


@dataclass(frozen=True, kw_only=True)
class SharedKV:
    """A pinned prompt in a namespace of this host, and what the store says of its name."""

    prompt: PromptRow
    namespace: Namespace
    binding: BindingRow
    manifest: Manifest

    @property
    def kv(self) -> KVId:
        """Which KV: also by which keys. What was uploaded before an adapter's weights changed is of others."""
        return KVId(self.content, digest_of(self.binding.keys))

    @property
    def content(self) -> Content:
        """What hosts claim."""
        return Content(self.namespace.namespace_id, self.prompt.token_ids.digest)

    @property
    def stored(self) -> StoredKV | None:
        """Where it is in the store."""
        return self.manifest.stored_for(self.kv)

    @property
    def is_durable(self) -> bool:
        """It is on disk here."""
        return durability_of(self.namespace, self.binding).durable

    def is_of(self, manifest: Manifest) -> bool:
        """Return whether a manifest is still of this content."""
        return manifest.pinned and manifest.identity == self.manifest.identity


class KVSync:
    """Loop thread only.

    Args:
        host: This host's name in claims.
        max_upload_s: What takes longer is not entered: the collector may have deleted it.
        parallel: Ranges that are read at once.

    Attributes:
        num_uploaded: Prompts that this host has uploaded since its start, and `num_restored` those that came down.
        is_away: Says whether the store cannot be used now.
    """

    def __init__(
        self,
        cache: Cache,
        store: RemoteStore,
        local: LocalPins,
        sync: PinSync,
        clock: StoreClock,
        *,
        host: str,
        max_upload_s: float,
        parallel: int,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache, self._store, self._clock = cache, store, clock
        self._local, self._sync = local, sync
        self._host, self._max_upload_s, self._parallel, self._now_s = host, max_upload_s, parallel, now_s
        self.num_uploaded = self.num_restored = 0
        self._retries: dict[KVId, tuple[float, float]] = {}  # when to try again, and the pause after that
        self._ungiven: dict[KVId, str] = {}  # objects that did not come at the last try
        self.is_away: Callable[[], bool] = lambda: False
        self._claims_wanted: dict[str, float] = {}  # by pin id: since when an engine waits for our claim

    # What there is

    def _shared(self, prompt: PromptRow) -> Iterator[SharedKV]:
        """Yield a prompt in each of its namespaces, as far as its KV may be shared."""
        name = shared_name(prompt)
        manifest, mine = (self._sync.manifest(name), self._local.find(name)) if name is not None else (None, None)
        if name is None or manifest is None or mine is None or not manifest.pinned or not prompt.tokens:
            return
        # Else the store speaks of another version than this one.
        if self._local.wanted(name) is prompt and mine.identity == manifest.identity:
            for namespace, binding in self._cache.pins.bound(prompt):
                if namespace.ephemeral or namespace.quarantine is not None:
                    continue
                if not self._cache.capacity.is_superseded(namespace):  # it would come, and be deleted again
                    yield SharedKV(prompt=prompt, namespace=namespace, binding=binding, manifest=manifest)

    def _is_due(self, shared: SharedKV) -> bool:
        return self._retries.get(shared.kv, (0.0, 0.0))[0] <= self._now_s()

    def _try_later(self, shared: SharedKV) -> None:
        pause_s = min(_MAX_RETRY_S, max(_RETRY_S, 2 * self._retries.get(shared.kv, (0.0, 0.0))[1]))
        now_s = self._now_s()
        self._retries = {kv: retry for kv, retry in self._retries.items() if now_s < retry[0] + _MAX_RETRY_S}
        self._retries[shared.kv] = now_s + pause_s, pause_s
        self._ungiven = {kv: key for kv, key in self._ungiven.items() if kv in self._retries}

    # Up

    async def upload_next(self) -> bool:
        """Upload the KV of the most important prompt that is durable here and missing in the store, if there is one.

        Returns:
            Whether there was one.

        Raises:
            RemoteStoreError: The store did not do its part.
        """
        found, breather = list[SharedKV](), Breather()
        for prompt in self._cache.prompts.pinned():
            found += [shared for shared in self._shared(prompt) if self._is_to_upload(shared)]
            await breather.pause()
        if not found:
            return False
        first = max(found, key=lambda shared: importance(shared.prompt))
        self._try_later(first)
        try:
            await self._upload(first)
        except RemoteStoreError:
            raise
        except KvtierError as error:
            log_event(logger, "kv_not_uploaded", level=logging.WARNING, name=first.prompt.name, problem=str(error))
        return True

    def _is_to_upload(self, shared: SharedKV) -> bool:
        if shared.stored is not None or not self._is_due(shared) or self._is_claimed_elsewhere(shared):
            return False
        return shared.is_durable

    async def _upload(self, shared: SharedKV) -> None:
        name, namespace_id = shared.manifest.name, shared.namespace.namespace_id
        if await self._claim(shared) is None:
            return
        began_s = self._now_s()
        stored = await upload_prompt(self._cache, self._store, shared.prompt.name, namespace_id, host=self._host)
        is_late = self._now_s() - began_s > self._max_upload_s

        def enter(manifest: Manifest) -> Manifest | None:
            is_wanted = shared.is_of(manifest) and stored.kv == shared.kv
            if is_late or not is_wanted or manifest.stored_for(stored.kv) is not None:
                return None
            return manifest.with_stored(stored)

        if await self._sync.change(name, enter) is None:
            manifest = self._sync.manifest(name)
            # Our own write may have arrived without an answer; and what cannot be read names who knows what.
            if manifest is not None and stored.key not in manifest.references():
                await discard(self._store, stored.key)
            return
        self.num_uploaded += 1
        self._retries.pop(shared.kv, None)
        log_event(logger, "kv_uploaded", name=name, namespace=namespace_id, bytes=stored.num_bytes)

    # Claims

    def _is_claimed_elsewhere(self, shared: SharedKV) -> bool:
        claim = self._claim_of(shared)
        return claim is not None and claim.host != self._host

    def _claim_of(self, shared: SharedKV) -> Claim | None:
        return shared.manifest.claim_of(shared.content, self._clock.now_unix_s())

    async def _claim(self, shared: SharedKV) -> Manifest | None:
        """Claim KV, or prolong the claim; None: it is not wanted, is there, or another host was faster."""
        now_unix_s = self._clock.now_unix_s()
        claim = self._new_claim(shared.content)

        def enter(manifest: Manifest) -> Manifest | None:
            known = manifest.claim_of(claim.content, now_unix_s)
            is_free = known is None or known.host == self._host
            is_missing = manifest.stored_for(shared.kv) is None
            return manifest.with_claim(claim) if shared.is_of(manifest) and is_free and is_missing else None

        return await self._sync.change(shared.manifest.name, enter)

    def _new_claim(self, content: Content) -> Claim:
        return Claim(**content._asdict(), host=self._host, ends_unix_s=self._clock.now_unix_s() + CLAIM_S)

    def claims_of(self, prompt: PromptRow) -> tuple[Claim, ...]:
        """Return claims for a pin that was just made here: the engines attached here are about to compute it."""
        if not prompt.tokens:
            return ()
        serving = {each.namespace_id for each in self._cache.live_sessions if each.serves(prompt)}
        return tuple(self._new_claim(Content(each, prompt.token_ids.digest)) for each in sorted(serving))

    def is_computed_elsewhere(self, prompt: PromptRow) -> bool:
        """Return whether engines here need not compute a prompt: its KV comes from the store, or another host computes
        it.

        Else this host claims it; until that is done, engines wait a little.
        """
        missing = [shared for shared in self._shared(prompt) if not shared.is_durable]
        if any(self._is_on_its_way(shared) or self._is_claimed_elsewhere(shared) for shared in missing):
            return True
        if not missing or all(self._claim_of(shared) is not None for shared in missing):
            self._claims_wanted.pop(prompt.pin_id, None)
            return False
        since_s = self._claims_wanted.setdefault(prompt.pin_id, self._now_s())
        return self._now_s() - since_s < _UNCLAIMED_S

    def _is_on_its_way(self, shared: SharedKV) -> bool:
        """Return whether the store has it, and is likely to give it."""
        stored = shared.stored
        return stored is not None and not self.is_away() and self._ungiven.get(shared.kv) != stored.key

    async def claim_wanted(self) -> None:
        """Enter the claims that engines wait for. Raises RemoteStoreError."""
        for pin_id, since_s in list(self._claims_wanted.items()):  # some are removed while claims are entered
            prompt = self._cache.prompts.by_pin_id(pin_id)
            if prompt is None or self._now_s() - since_s > _MAX_RETRY_S:
                self._claims_wanted.pop(pin_id, None)
                continue
            for shared in self._shared(prompt):
                if not shared.is_durable and self._claim_of(shared) is None:
                    await self._claim(shared)

    # Down

    async def restore_next(self) -> bool:
        """Bring down the KV of the most important prompt that is missing here and in the store, if there is one.

        Returns:
            Whether there was one.

        Raises:
            RemoteStoreError: The store did not do its part; what came stays.
        """
        found = [shared for prompt in self._cache.pins.watch.unfinished() for shared in self._shared(prompt)]
        found = [shared for shared in found if shared.stored is not None and self._is_due(shared)]
        has_successor = self._cache.capacity.has_successor  # since a day or not: after a restart no one knows
        found = [shared for shared in found if not (shared.is_durable or has_successor(shared.namespace))]
        if not found:
            return False
        # Of a prompt what an engine waits for: who else is bound to it may be of before an update.
        first = max(found, key=lambda shared: (importance(shared.prompt), shared.namespace.live))
        stored = first.stored
        assert stored is not None
        self._try_later(first)
        began_s, name = self._now_s(), first.prompt.name
        try:
            result = await restore_prompt(
                self._cache, self._store, first.namespace, first.binding, stored, max_parallel=self._parallel
            )
        except RemoteStoreError:
            self._ungiven[first.kv] = stored.key
            raise
        if result.outcome is RestoreOutcome.TOO_NEW:
            self._ungiven[first.kv] = stored.key
        else:
            self._ungiven.pop(first.kv, None)
        if result.outcome in (RestoreOutcome.DAMAGED, RestoreOutcome.MISSING):
            log_event(logger, "kv_damaged", level=logging.ERROR, name=name, key=stored.key, problem=result.problem)
            await self._sync.change(first.manifest.name, lambda manifest: _without(manifest, stored))
        elif result.outcome is RestoreOutcome.RESTORED:
            self.num_restored += bool(result.num_chunks)
            log_event(
                logger,
                "kv_restored",
                name=name,
                namespace=first.namespace.namespace_id,
                chunks=result.num_chunks,
                bytes=result.num_bytes,
                seconds=self._now_s() - began_s,
            )
        elif result.outcome is not RestoreOutcome.ENDED:
            log_event(logger, "kv_not_restored", level=logging.WARNING, name=name, problem=result.problem)
        return True


def _without(manifest: Manifest, stored: StoredKV) -> Manifest | None:
    """Return the manifest without this object, so that a host that has the KV uploads it again."""
    return manifest.without_stored(stored.kv) if stored in manifest.stored else None
