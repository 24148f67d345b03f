"""A bundle in the store, read by ranges: first what it says, then the chunks that are wanted."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvtier.bundles.bundle import Bundle, BundleChunk
from kvtier.bundles.bundle_format import read_front
from kvtier.bundles.safetensors_header import LENGTH_PREFIX
from kvtier.collector import gc_paused
from kvtier.core.layout import ChunkKey, KVLayout, digest_of, group_idx_of
from kvtier.core.limits import MAX_SAFETENSORS_HEADER_BYTES, MAX_TOKENS, RECIPE
from kvtier.core.tokens import TokenIds
from kvtier.errors import BundleDamagedError, BundleTooNewError, RemoteDamagedError
from kvtier.fleet.manifest import StoredKV
from kvtier.remote.base import RemoteStore
from kvtier.tiering.namespace import Namespace
from kvtier.tiering.resources import Resources

RANGE_BYTES = 8 * 1024**2
"""Of one read: a round trip to an object store takes as long as a megabyte or two."""
MAX_GAP_BYTES = 256 * 1024
"""Bytes between two chunks that are read with them: the round trip of a second read takes longer."""
_FIRST_BYTES = 256 * 1024
"""Enough for what a prompt of some 10,000 tokens says in front of its chunks."""
_CHUNK_FRONT_BYTES = 256
"""That a chunk takes at most in front, without its tokens."""
_MAX_FRONT_BYTES = MAX_SAFETENSORS_HEADER_BYTES + 8 * MAX_TOKENS + RECIPE.max_bytes + 16 * 1024**2
_LAST = 2**62


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


class RemoteBundle:
    """What a bundle in the store says, and ranges of its bytes. Loop thread only.

    Attributes:
        bundle: As its front says, checked against the manifest and the namespace.
        chunks: Its chunks, by key.
    """

    def __init__(self, store: RemoteStore, stored: StoredKV, start: bytes, bundle: Bundle) -> None:
        """Use `open`."""
        self.bundle = bundle
        self.chunks: Mapping[ChunkKey, BundleChunk] = {chunk.stored.key: chunk for chunk in bundle.chunks}
        self._store, self._key = store, stored.key
        self._data_offset = bundle.chunks[0].stored.offset
        self._head = start[self._data_offset :]  # the first of the chunks' bytes came with the front

    @classmethod
    async def open(
        cls, resources: Resources, store: RemoteStore, stored: StoredKV, namespace: Namespace
    ) -> "RemoteBundle":
        """Read what a bundle says, and check that it is of this namespace, these tokens and this length.

        What is not as it should be is read twice: the network may have spoiled it.

        Raises:
            RemoteDamagedError: It is not what the manifest says.
            BundleTooNewError: A newer kvtier wrote it.
            RemoteStoreError: The store did not do its part.
        """
        try:
            return await cls._open(resources, store, stored, namespace)
        except RemoteDamagedError:
            return await cls._open(resources, store, stored, namespace)

    @classmethod
    async def _open(
        cls, resources: Resources, store: RemoteStore, stored: StoredKV, namespace: Namespace
    ) -> "RemoteBundle":
        def read(start: bytes) -> "RemoteBundle | int":
            """Worker thread."""
            with gc_paused():  # it would hold up all threads, and what is read is no garbage
                front = read_front(start, stored.key)
                if isinstance(front, int):
                    return front
                _check(front, stored, namespace)
                return cls(store, stored, start, front)

        start, needed_bytes = b"", max(_first_bytes(stored, namespace.layout), LENGTH_PREFIX.size)
        while True:
            end = min(needed_bytes, stored.num_bytes)
            more = await store.get_range(stored.key, len(start), end) if len(start) < end else b""
            start += more
            if len(start) < end or not more:
                raise RemoteDamagedError(stored.key, f"it is cut short: {len(start)} of {stored.num_bytes} bytes")
            try:
                found = await resources.in_background(read, start)
            except BundleTooNewError:
                raise
            except BundleDamagedError as exc:
                raise RemoteDamagedError(stored.key, str(exc)) from exc
            if isinstance(found, RemoteBundle):
                return found
            if found > min(stored.num_bytes, _MAX_FRONT_BYTES):
                raise RemoteDamagedError(stored.key, f"header and index would have {found} bytes")
            needed_bytes = found

    async def read(self, span: ChunkRange) -> bytes:
        """Return the bytes of a range, fewer if the object ends before. Raises RemoteStoreError."""
        if span.end - self._data_offset <= len(self._head):
            return self._head[span.start - self._data_offset : span.end - self._data_offset]
        return await self._store.get_range(self._key, span.start, span.end)

    async def read_again(self, chunk: BundleChunk) -> bytes:
        """Return the bytes of a chunk, from the store. Raises RemoteStoreError."""
        span = ChunkRange([chunk])
        return await self._store.get_range(self._key, span.start, span.end)


def _first_bytes(stored: StoredKV, layout: KVLayout) -> int:
    """Return about what is to be read in order to know all of the front."""
    num_tokens = stored.num_chunks * max(group.chunk_tokens for group in layout.groups)
    front_bytes = stored.num_chunks * _CHUNK_FRONT_BYTES + 4 * min(num_tokens, MAX_TOKENS)
    return min(_FIRST_BYTES + front_bytes, _MAX_FRONT_BYTES)


def _check(bundle: Bundle, stored: StoredKV, namespace: Namespace) -> None:
    if (bundle.namespace_id, bundle.layout) != (namespace.namespace_id, namespace.layout):
        raise RemoteDamagedError(stored.key, "it is of another namespace or layout")
    if TokenIds.of(bundle.prompt.tokens).digest != stored.tokens_digest or bundle.file_bytes != stored.num_bytes:
        raise RemoteDamagedError(stored.key, "tokens or length are not those that the manifest says")
    if digest_of(bundle.keys) != stored.keys_digest:
        raise RemoteDamagedError(stored.key, "its keys are not those that the manifest says")
    # No codec stores more than the payload has; twice that bounds the memory that a range takes.
    if any(chunk.stored.stored_bytes > 2 * chunk.stored.raw_bytes for chunk in bundle.chunks):
        raise RemoteDamagedError(stored.key, "chunks would be longer than they can be")


class RangePlan:
    """Cuts chunks into ranges, so that the head of a prompt can be served first. Plain code."""

    def __init__(self, layout: KVLayout) -> None:
        self._groups = {group.group_idx: group for group in layout.groups}
        self._num_keys = dict.fromkeys(self._groups, 0)
        self._runs = list[tuple[int, list[BundleChunk]]]()
        self._open: dict[int, list[BundleChunk]] = {}

    def add(self, keys: Iterable[ChunkKey], wanted: Mapping[ChunkKey, BundleChunk]) -> None:
        """Take the next keys of a binding; those that are not `wanted` are only counted."""
        for key in keys:
            group = self._groups[group_idx_of(key)]
            number = self._num_keys[group.group_idx]
            self._num_keys[group.group_idx] += 1
            if key in wanted:
                # Windows serve a hit only together with all that is before them.
                first_token = _LAST if group.window_chunks else number * group.chunk_tokens
                self._add(wanted[key], group.group_idx, first_token)

    def _add(self, chunk: BundleChunk, group_idx: int, first_token: int) -> None:
        run = self._open.get(group_idx)
        if run is None or not _is_next(run, chunk):
            run = self._open[group_idx] = []
            self._runs.append((first_token, run))
        run.append(chunk)

    def ranges(self) -> list[ChunkRange]:
        """Return ranges of about `RANGE_BYTES`, by the first token that they have the KV of."""
        return [ChunkRange(run) for _, run in sorted(self._runs, key=lambda each: each[0])]


def _is_next(run: Sequence[BundleChunk], chunk: BundleChunk) -> bool:
    last, stored = run[-1].stored, chunk.stored
    gap_bytes = stored.offset - (last.offset + last.stored_bytes)
    return 0 <= gap_bytes <= MAX_GAP_BYTES and stored.offset + stored.stored_bytes - run[0].stored.offset <= RANGE_BYTES
