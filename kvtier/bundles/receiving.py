"""A bundle is received: the daemon checks its header and reserves disk space for all of it before it reads the rest.

A bundle that cannot be imported is refused after its first pieces, not after gigabytes. Each of several imports has
space for its whole bundle and for the packs made of it, or is refused with the numbers.
"""

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

from kvtier.bundles.bundle import Bundle, check_length
from kvtier.bundles.bundle_format import read_front
from kvtier.bundles.safetensors_header import LENGTH_PREFIX
from kvtier.bundles.spool import Spool
from kvtier.collector import gc_paused
from kvtier.concurrency.turns import slices
from kvtier.core.fingerprint import differing_fields
from kvtier.core.layout import ChunkKey, KVLayout
from kvtier.core.limits import PIECE_BYTES, check_chosen_name
from kvtier.core.stored import SEAL_BYTES
from kvtier.disk.disk_usage import DiskUsage, ScratchSpace
from kvtier.disk.packs.pack_format import reserve_bytes
from kvtier.errors import (
    BundleDamagedError,
    DiskSpaceError,
    InvalidArgumentError,
    NamespaceMismatchError,
    NamespaceQuarantinedError,
    QuotaExceededError,
)
from kvtier.ledger import PromptRow
from kvtier.printable import cut
from kvtier.prompts.book import RequestedPin
from kvtier.prompts.planned_pins import PlannedPin
from kvtier.prompts.quota import check_owner_quotas, is_served, pinned_bytes
from kvtier.service import Cache
from kvtier.tiering.namespace import NO_MODELS, Namespace


@dataclass(frozen=True, kw_only=True)
class RequestedImport:
    """ImportStart of proto/kvtier/v1/cache.proto.

    Attributes:
        name: Empty: the bundle's.
        replace: Take the place of another prompt of this name.
        ttl_s: 0: the pin does not end by itself.
        public: Requests with any cache salt may be restored its chunks; a bundle does not say so.
    """

    name: str = ""
    replace: bool = False
    ttl_s: int = 0
    public: bool = False


async def admit(cache: Cache, requested: RequestedImport, bundle: Bundle) -> tuple[RequestedPin, Namespace]:
    """Say which pin a bundle becomes, in which namespace. It is asked again when all of the bundle is there.

    Raises:
        NamespaceMismatchError: No namespace here has its fingerprint and layout.
        NamespaceQuarantinedError: That is quarantined.
        PromptExistsError: The name is taken.
        QuotaExceededError: It would not fit on disk.
        OwnerQuotaError: Its owner would have too much.
        InvalidArgumentError: The name cannot be used, or the prompt is to be public and has a cache salt.
    """
    name = requested.name or bundle.prompt.name
    check_chosen_name("name", name)
    pin = replace(
        bundle.prompt,
        name=name,
        ttl_s=requested.ttl_s,
        replace=requested.replace,
        public=requested.public,
    )
    namespace = _find_namespace(cache, bundle)
    if namespace.quarantine is not None:
        raise NamespaceQuarantinedError(namespace.namespace_id, namespace.quarantine.reason)
    prompt, _ = await drafted(cache, pin)
    check_same_keys(cache, prompt, namespace, bundle)
    limit_bytes = cache.config.disk.disk_bytes
    used_bytes = await pinned_bytes(namespace, cache.prompts, besides=[name], applies=partial(_counts, namespace))
    if bundle.data_bytes + used_bytes > limit_bytes:
        raise QuotaExceededError(name, bundle.data_bytes, used_bytes, limit_bytes, namespace.namespace_id)
    return pin, namespace


async def drafted(cache: Cache, pin: RequestedPin) -> tuple[PromptRow, PromptRow | None]:
    """Return the prompt as it will be, and the one whose place it takes.

    Raises:
        PromptExistsError: The name is taken.
        OwnerQuotaError: Its owner would have too much.
    """
    prompt, old = cache.prompts.draft(pin, cache.pins.now_unix_s())
    await check_owner_quotas(cache.prompts, cache.namespaces, cache.config.owners, [PlannedPin(prompt=prompt, old=old)])
    return prompt, old


def check_same_keys(cache: Cache, prompt: PromptRow, namespace: Namespace, bundle: Bundle) -> None:
    """Refuse other chunks for a prompt that stays: its own would lose their pin, and no request hits what came.

    Raises:
        BundleDamagedError: An engine here knows the same prompt by other keys.
    """
    known = cache.prompts.binding(prompt.pin_id, namespace.namespace_id)
    if known is not None and known.keys != bundle.keys:
        raise BundleDamagedError(
            f"it has other chunks than prompt {prompt.name!r} has here, though prompt and namespace are the same"
        )


def _counts(namespace: Namespace, prompt: PromptRow) -> bool:
    """Say whether a prompt without a binding may need space: automatic pins do where an engine will bind them."""
    return prompt.origin != "auto" or is_served(namespace, prompt)


def pack_bytes(namespace: Namespace, bundle: Bundle, keys: Collection[ChunkKey], key_name: str) -> int:
    """Return the largest length of the packs of these chunks, sealed with a key or not. Any thread."""
    sizes = [(key, bundle.stored[key].raw_bytes) for key in keys]
    stored_bytes = sum(bundle.stored[key].stored_bytes + (SEAL_BYTES if key_name else 0) for key in keys)
    return stored_bytes + (reserve_bytes(namespace.namespace_id, sizes, key_name) if sizes else 0)


def no_space(
    name: str, usage: DiskUsage, num_pack_bytes: int, file_bytes: int = 0
) -> QuotaExceededError | DiskSpaceError:
    """Return why an import finds no space: `disk.bytes`, if its packs are beyond that, else the file system."""
    used_bytes = usage.used_bytes + usage.promised_bytes
    if used_bytes + num_pack_bytes > usage.limit_bytes:
        return QuotaExceededError(name, num_pack_bytes, used_bytes, usage.limit_bytes)
    needed_bytes = file_bytes + num_pack_bytes
    return DiskSpaceError(f"the import of prompt {name!r}", needed_bytes, usage.free_bytes, usage.kept_bytes)


async def not_on_disk(namespace: Namespace, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
    """Return the chunks that need a pack, with turns of the loop: what they change meanwhile is the caller's matter."""
    missing: list[ChunkKey] = []
    for part in slices(keys):
        chunks = namespace.table.get_all(part)
        missing += [key for key, chunk in zip(part, chunks, strict=True) if chunk is None or not chunk.on_disk]
        await asyncio.sleep(0)
    return missing


class Reception:
    """Takes a bundle's pieces into its spool. `space` is kept for the spool, and later for packs. Loop thread only."""

    def __init__(self, cache: Cache, requested: RequestedImport, spool: Spool, space: ScratchSpace) -> None:
        self._cache, self._requested, self._spool, self._space = cache, requested, spool, space
        self._bundle: Bundle | None = None
        self._front_bytes = 0  # what is known to be needed of the file before it can be judged

    async def receive(self, pieces: AsyncIterator[bytes]) -> Bundle:
        """Take all pieces.

        Raises:
            BundleDamagedError: It is no bundle, or not whole.
            NamespaceMismatchError, PromptExistsError, QuotaExceededError, InvalidArgumentError: See `admit`.
            DiskSpaceError: The file system has no space for the bundle and its packs.
            TierIOError: The operating system refused.
        """
        async for piece in pieces:
            if len(piece) > PIECE_BYTES:
                raise InvalidArgumentError("piece.data", f"{len(piece)} bytes", f"at most {PIECE_BYTES} at a time")
            await self._take(piece)
        num_bytes = self._spool.num_bytes
        if self._bundle is None:
            needed_bytes = max(LENGTH_PREFIX.size, self._front_bytes)
            raise BundleDamagedError(f"it is cut short: it has {num_bytes} bytes, header and index have {needed_bytes}")
        check_length(self._bundle, num_bytes)
        return self._bundle

    async def _take(self, piece: bytes) -> None:
        num_bytes = self._spool.num_bytes + len(piece)
        if self._bundle is None:
            await self._keep_capacity("(bundle)", num_bytes)
        elif num_bytes > self._bundle.file_bytes:
            check_length(self._bundle, num_bytes)
        await self._cache.resources.in_io(self._spool.append, piece)
        self._space.grew(num_bytes)
        if self._bundle is None and num_bytes >= self._front_bytes:
            front = await self._cache.resources.in_io(_read_front, self._spool)
            if isinstance(front, int):
                self._front_bytes = front
            else:
                await self._judge(front)
                self._bundle = front

    async def _judge(self, bundle: Bundle) -> None:
        """The header has arrived: refuse what cannot be imported, and reserve disk space for all of it."""
        if self._spool.num_bytes > bundle.file_bytes:
            check_length(bundle, self._spool.num_bytes)
        within_quota = self._cache.pins.within_quota
        pin, namespace = await within_quota(lambda: admit(self._cache, self._requested, bundle))
        missing = await not_on_disk(namespace, bundle.keys)
        resources = self._cache.resources
        num_pack_bytes = await resources.in_io(pack_bytes, namespace, bundle, missing, resources.disk.writes_with)
        await within_quota(
            lambda: self._keep_capacity(
                pin.name,
                bundle.file_bytes,
                num_pack_bytes,
                pins_of=namespace.superseded_models,
            )
        )

    async def _keep_capacity(
        self, name: str, file_bytes: int, num_pack_bytes: int = 0, *, pins_of: frozenset[str] = NO_MODELS
    ) -> None:
        usage = self._cache.resources.disk_usage

        def shortage() -> int:
            return self._space.shortage(file_bytes, num_pack_bytes)

        if shortage() > 0 or num_pack_bytes:
            await self._cache.resources.measure_disk()
        if 0 < shortage() <= usage.used_bytes:  # else nothing that may be dropped is enough
            await self._cache.capacity.drop_until_enough(shortage, pins_of=pins_of)
        if shortage() > 0:
            raise no_space(name, usage, num_pack_bytes, file_bytes)
        self._space.keep(file_bytes, num_pack_bytes)


def _read_front(spool: Spool) -> Bundle | int:
    with gc_paused():  # it would hold up all threads, and what is read is no garbage
        front = read_front(spool.read(spool.num_bytes, 0), spool.pack_id)
        if isinstance(front, Bundle):
            _ = front.data_bytes, front.stored  # made here, once
        return front


def _find_namespace(cache: Cache, bundle: Bundle) -> Namespace:
    """Return the namespace whose KV the bundle's is interchangeable with; name what the nearest one differs in."""
    known = [namespace for namespace in cache.namespaces.values() if not namespace.ephemeral]
    for namespace in known:
        if namespace.fingerprint == dict(bundle.fingerprint):
            if namespace.layout != bundle.layout:
                fields = ", ".join(_differing_layout(namespace.layout, bundle.layout))
                raise NamespaceMismatchError(
                    f"the bundle has another layout than namespace {namespace.namespace_id} here ({fields}); "
                    "the kvtier versions of the two machines differ: upgrade both, and export again"
                )
            return namespace
    if not known:
        raise NamespaceMismatchError(
            f"no engine has attached to this daemon yet, so no namespace can take the bundle; start vLLM with "
            f"{bundle.model} and the kvtier connector once, then import"
        )
    nearest = min(
        known,
        key=lambda other: (
            len(differing_fields(bundle.fingerprint, other.fingerprint)),
            other.row.model != bundle.model,
            other.namespace_id,
        ),
    )
    raise NamespaceMismatchError(
        f"the bundle's KV cannot be used here: it was made for {bundle.model}, and the nearest namespace here "
        f"({nearest.namespace_id[:12]}, {nearest.row.model}) differs in {_differences(bundle, nearest)}; start vLLM "
        "with the same model and settings once, then import"
    )


def _differences(bundle: Bundle, other: Namespace) -> str:
    fields = differing_fields(bundle.fingerprint, other.fingerprint)
    return ", ".join(
        f"{field} ({_shown(bundle.fingerprint.get(field))} in the bundle, {_shown(other.fingerprint.get(field))} here)"
        for field in fields
    )


def _shown(value: str | None) -> str:
    return "absent" if value is None else cut(value, 40)  # two of each field, all in one message


def _differing_layout(one: KVLayout, other: KVLayout) -> list[str]:
    return [name for name in KVLayout.__dataclass_fields__ if getattr(one, name) != getattr(other, name)]
