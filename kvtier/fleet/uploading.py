"""Puts the KV of a durable prompt into the store: as a bundle, under a key that is never used again."""

import hashlib
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing

from kvtier.bundles.exporting import check_not_quarantined, verified_bundle
from kvtier.bundles.spool import Spool
from kvtier.concurrency.turns import BATCH_BYTES
from kvtier.core.layout import digest_of
from kvtier.core.limits import PIECE_BYTES
from kvtier.core.tokens import TokenIds
from kvtier.errors import NamespaceQuarantinedError
from kvtier.fleet.garbage import discard
from kvtier.fleet.manifest import KV, StoredKV
from kvtier.remote.base import RemoteStore
from kvtier.service import Cache


async def upload_prompt(cache: Cache, store: RemoteStore, name: str, namespace_id: str, *, host: str) -> StoredKV:
    """Upload a prompt's bundle; return what a manifest is to say of it. Loop thread only.

    The bundle is first written to a scratch file and verified there, as for an export. All of it is work in the
    background: it takes one thread, a piece at a time, and waits for requests that read from disk.

    Args:
        cache: Has the prompt.
        store: Gets the bundle.
        name: Of the prompt, as it is here.
        namespace_id: Whose KV it is.
        host: This host.

    Raises:
        KvtierError: As `export_bundle`.
        RemoteStoreError: The store did not do its part. An object that no manifest names may be there.
    """
    async with verified_bundle(cache, name, namespace_id, in_background=True) as (bundle, spool):
        num_bytes = bundle.file_bytes
        digest = await _sha256(cache, spool, num_bytes)
        key = f"{KV}{bundle.namespace_id}/{digest}-{secrets.token_hex(8)}.safetensors"
        async with aclosing(_pieces(cache, spool, num_bytes)) as pieces:
            await store.put_stream(key, pieces)
        try:
            check_not_quarantined(cache, bundle.namespace_id)  # meanwhile
        except NamespaceQuarantinedError:
            await discard(store, key)
            raise
    counters = cache.resources.counters
    counters.remote_uploaded_prompts += 1
    counters.remote_uploaded_bytes += num_bytes
    return StoredKV(
        key=key,
        namespace_id=bundle.namespace_id,
        tokens_digest=TokenIds.of(bundle.prompt.tokens).digest,
        num_bytes=num_bytes,
        num_chunks=len(bundle.chunks),
        host=host,
        stored_unix_s=cache.pins.now_unix_s(),
        keys_digest=digest_of(bundle.keys),
    )


async def _sha256(cache: Cache, spool: Spool, num_bytes: int) -> str:
    digest = hashlib.sha256()

    def add(start: int, end: int) -> None:
        for offset in range(start, end, PIECE_BYTES):
            digest.update(spool.read(min(PIECE_BYTES, end - offset), offset))

    for start in range(0, num_bytes, BATCH_BYTES):
        await cache.resources.in_background(add, start, min(start + BATCH_BYTES, num_bytes))
    return digest.hexdigest()


async def _pieces(cache: Cache, spool: Spool, num_bytes: int) -> AsyncGenerator[bytes, None]:
    for offset in range(0, num_bytes, PIECE_BYTES):
        yield await cache.resources.in_background(spool.read, min(PIECE_BYTES, num_bytes - offset), offset)
