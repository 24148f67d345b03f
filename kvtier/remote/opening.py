"""From `remote.url` to a store, and whether that store can be trusted with pins."""

import secrets
from contextlib import suppress

from kvtier.errors import RemoteRefusedError, RemoteStoreError
from kvtier.remote.base import RemoteStore, Version
from kvtier.remote.folder_store import FolderStore
from kvtier.remote.remote_pool import RemotePool

_SCRATCH = "checks/"


def open_store(url: str) -> RemoteStore:
    """Return the store of a URL; nothing is asked of it yet. RemoteRefusedError: it cannot be used."""
    if url.startswith("file://"):
        return FolderStore(url)
    from kvtier.remote.object_store import ObjectStore  # only who has a bucket pays for its client

    return ObjectStore(url)


def open_pool(url: str) -> RemotePool:
    """Return the pool of a URL; nothing is asked of it yet. RemoteRefusedError: it cannot be used."""
    from kvtier.remote.mooncake_pool import MooncakePool

    return MooncakePool(url)


async def check_conditional_writes(store: RemoteStore) -> None:
    """Prove on an object of its own that the store refuses to overwrite what it was not asked to.

    Some stores that speak S3 take conditions and ignore them: two hosts would lose each other's pins there.

    Raises:
        RemoteRefusedError: It does.
        RemoteStoreError: It does not do its part.
    """
    key = f"{_SCRATCH}{secrets.token_hex(16)}"
    try:
        first = await _own(store, key, b"1", await store.put_new(key, b"1"))
        if first is None or await store.put_new(key, b"2") is not None:
            raise _unconditional(store, "If-None-Match")
        second = await _own(store, key, b"3", await store.swap(key, b"3", first))
        if second is None or await store.swap(key, b"4", first) is not None:
            raise _unconditional(store, "If-Match")
        found = await store.get(key)
        if found is None or (found.data, found.version) != (b"3", second):
            raise _unconditional(store, "If-Match")
    finally:
        with suppress(RemoteStoreError):
            await store.delete(key)


async def _own(store: RemoteStore, key: str, data: bytes, version: Version | None) -> Version | None:
    """Return the version of a write that nothing else competes with; None if it was refused.

    Where its answer is lost, the client tries again and is refused, because the first try was carried out.
    """
    if version is not None:
        return version
    found = await store.get(key)
    return found.version if found is not None and found.data == data else None


def _unconditional(store: RemoteStore, header: str) -> RemoteRefusedError:
    return RemoteRefusedError(
        store.url,
        "write on a condition",
        f"it ignores {header} of PUT, so hosts would overwrite each other's pins; "
        "use a store that knows conditional writes (S3, GCS, Azure, MinIO, Ceph)",
    )
