"""A bundle in the store, read by ranges: first what it says, then the chunks that are wanted."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from kvtier.bundles.bundle import Bundle, BundleChunk
from kvtier.bundles.bundle_format import read_front
from kvtier.bundles.safetensors_header import LENGTH_PREFIX
from kvtier.collector import gc_paused
from kvtier.core.limits import MAX_SAFETENSORS_HEADER_BYTES, MAX_TOKENS, RECIPE
from kvtier.core.tokens import TokenIds
from kvtier.errors import BundleDamagedError, RemoteDamagedError
from kvtier.fleet.manifest import StoredKV
from kvtier.remote.base import RemoteStore
from kvtier.tiering.namespace import Namespace
from kvtier.tiering.resources import Resources

_FIRST_BYTES = 256 * 1024
"""Enough for what a prompt of some 20,000 tokens says in front of its chunks."""
_MAX_FRONT_BYTES = MAX_SAFETENSORS_HEADER_BYTES + 8 * MAX_TOKENS + RECIPE.max_bytes + 16 * 1024**2
RANGE_BYTES = 8 * 1024**2
"""Of one read: a round trip to an object store takes as long as a megabyte or two."""


@dataclass(frozen=True)
class ChunkRange:
    """Neighbours in a bundle, read in one go."""

    chunks: Sequence[BundleChunk]

    @property
    def start(self) -> int:
        """Where the first one begins."""
        return self.chunks[0].stored.offset

    @property
    def end(self) -> int:
        """Where the last one ends."""
        last = self.chunks[-1].stored
        return last.offset + last.stored_bytes


async def read_bundle(resources: Resources, store: RemoteStore, stored: StoredKV, namespace: Namespace) -> Bundle:
    """Read what a bundle says, and check that it is of this namespace, these tokens and this length.

    Raises:
        RemoteDamagedError: It is not what the manifest says.
        RemoteStoreError: The store did not do its part.
    """
    start, needed_bytes = b"", max(_FIRST_BYTES, LENGTH_PREFIX.size)
    while True:
        end = min(needed_bytes, stored.num_bytes)
        more = await store.get_range(stored.key, len(start), end) if len(start) < end else b""
        if not more:
            raise RemoteDamagedError(stored.key, f"it is cut short: {len(start)} bytes")
        start += more
        try:
            front = await resources.in_io(partial(_read, start, stored.key))
        except BundleDamagedError as exc:
            raise RemoteDamagedError(stored.key, str(exc)) from exc
        if isinstance(front, Bundle):
            break
        if front > min(stored.num_bytes, _MAX_FRONT_BYTES):
            raise RemoteDamagedError(stored.key, f"header and index would have {front} of {stored.num_bytes} bytes")
        needed_bytes = front
    _check(front, stored, namespace)
    return front


def _read(start: bytes, key: str) -> Bundle | int:
    """Worker thread."""
    with gc_paused():
        return read_front(start, key)


def _check(bundle: Bundle, stored: StoredKV, namespace: Namespace) -> None:
    if (bundle.namespace_id, bundle.layout) != (namespace.namespace_id, namespace.layout):
        raise RemoteDamagedError(stored.key, "it is of another namespace or layout")
    if TokenIds(bundle.prompt.tokens).digest != stored.tokens_digest or bundle.file_bytes != stored.num_bytes:
        raise RemoteDamagedError(stored.key, "tokens or length are not those that the manifest says")


def plan_ranges(chunks: Sequence[BundleChunk]) -> list[ChunkRange]:
    """Cut chunks, in the order of their bytes, into ranges without gaps of about `RANGE_BYTES`."""
    runs = list[list[BundleChunk]]()
    for chunk in chunks:
        last = runs[-1][-1].stored if runs else None
        is_next = last is not None and last.offset + last.stored_bytes == chunk.stored.offset
        if not is_next or chunk.stored.offset + chunk.stored.stored_bytes - runs[-1][0].stored.offset > RANGE_BYTES:
            runs.append([])
        runs[-1].append(chunk)
    return [ChunkRange(run) for run in runs]
