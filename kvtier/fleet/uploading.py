"""Puts the KV of a durable prompt into the store: as a bundle, under a key that is never used again."""

import hashlib
import secrets
import time
from collections.abc import AsyncIterator

from kvtier.bundles.exporting import verified_bundle
from kvtier.bundles.spool import Spool
from kvtier.core.limits import PIECE_BYTES
from kvtier.core.tokens import TokenIds
from kvtier.fleet.manifest import KV, StoredKV
from kvtier.remote.base import RemoteStore
from kvtier.service import Cache


async def upload_prompt(cache: Cache, store: RemoteStore, name: str, namespace_id: str, *, host: str) -> StoredKV:
    """Upload a prompt's bundle; return what a manifest is to say of it. Loop thread only.

    The bundle is first written to a scratch file and verified there, as for an export.

    Args:
        cache: Has the prompt.
        name: Of the prompt, as it is here.
        namespace_id: Whose KV it is.
        host: This host.

    Raises:
        KvtierError: As `export_bundle`.
        RemoteStoreError: The store did not do its part.
    """
    async with verified_bundle(cache, name, namespace_id) as (bundle, spool):
        digest = await cache.resources.in_io(_sha256, spool)
        key = f"{KV}{bundle.namespace_id}/{digest}-{secrets.token_hex(8)}.safetensors"
        await store.put_stream(key, _pieces(cache, spool))
        counters = cache.resources.counters
        counters.remote_uploaded_prompts += 1
        counters.remote_uploaded_bytes += spool.num_bytes
        return StoredKV(
            key=key,
            namespace_id=bundle.namespace_id,
            tokens_digest=TokenIds(bundle.prompt.tokens).digest,
            num_bytes=spool.num_bytes,
            num_chunks=len(bundle.chunks),
            host=host,
            stored_unix_s=time.time(),
        )


def _sha256(spool: Spool) -> str:
    """Worker thread."""
    digest, offset = hashlib.sha256(), 0
    while data := spool.read(PIECE_BYTES, offset):
        digest.update(data)
        offset += len(data)
    return digest.hexdigest()


async def _pieces(cache: Cache, spool: Spool) -> AsyncIterator[bytes]:
    for offset in range(0, spool.num_bytes, PIECE_BYTES):
        yield await cache.resources.in_io(spool.read, PIECE_BYTES, offset)
