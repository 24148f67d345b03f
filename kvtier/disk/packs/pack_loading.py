"""Bytes of spans into memory: the fastest way that the file, the memory and the file system allow.

- What is in the page cache is copied from there, what is not is read past it (O_DIRECT): packs are read once, into an
  arena that is the cache, and a copy in the page cache would only push others out.
- What is read past the page cache goes into scratch, raw chunks too: a device fills few huge pages almost twice as fast
  as the small ones of an arena, and the next span is on its way while they are copied. Raw chunks that are in the page
  cache are copied from there straight into their segments.
- A span that fails is read chunk by chunk, so that a bad sector costs the chunk that lies on it.
"""

import errno
import os
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType

from kvtier.core.stored import StoredChunk
from kvtier.disk.base import ChunkRead
from kvtier.disk.codecs.raw import RawCodec
from kvtier.disk.files.file_ops import MAX_PIECES, FileOps
from kvtier.disk.files.scratch import ALIGNMENT_BYTES, Scratch, ScratchPool
from kvtier.disk.packs.pack_directory import PackDirectory
from kvtier.disk.packs.pack_spans import SPAN_BYTES, Span
from kvtier.errors import ChunkDamagedError, InvalidArgumentError, TierIOError
from kvtier.obs import trace

DIRECT_MIN_BYTES = 256 * 1024
"""A shorter read takes the page cache: its readahead serves the neighbours, which are likely to be wanted next."""
MAX_OPEN_PACKS = 32
RESIDENCY_BYTES = 32 * 1024**2
"""The page cache is asked about windows of this many bytes, not about each span: asking takes 0.25 ms, while the device
has nothing to do."""

ReadError = ChunkDamagedError | TierIOError
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)


@dataclass(kw_only=True)
class LoadedSpan:
    """A span in memory; `release` it.

    Attributes:
        span: What was asked for.
        scratch: Where its bytes lie, from `base` on; None when they lie in the segments of its reads.
        base: File offset of the scratch's first byte.
        errors: Members that could not be loaded.
    """

    span: Span
    scratch: Scratch | None
    base: int = 0
    errors: dict[int, ReadError] = field(default_factory=dict)

    def stored(self, chunk: StoredChunk) -> memoryview | None:
        """Return a member's stored bytes, None when they lie in its segments."""
        if self.scratch is None:
            return None
        start = chunk.offset - self.base
        return self.scratch.view[start : start + chunk.stored_bytes]

    def release(self) -> None:
        """Give the scratch back; idempotent."""
        if self.scratch is not None:
            self.scratch.release()


class DirectReads:
    """Whether the file system takes O_DIRECT; the first refusal settles it for good. Any thread."""

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled and hasattr(os, "O_DIRECT")


@dataclass(kw_only=True)
class _OpenPack:
    """A file of the batch, and what was asked about it once.

    Attributes:
        fd: Its descriptor.
        length: Its length in bytes when it was opened.
        direct: Whether it reads past the page cache now.
        resident: By window of `RESIDENCY_BYTES`: whether at least half of it was in the page cache.
    """

    fd: int
    length: int
    direct: bool = False
    resident: dict[int, bool] = field(default_factory=dict)


class PackLoader:
    """Loads the spans of one batch, each pack opened once. Not thread-safe; a context manager that closes the files."""

    def __init__(
        self,
        reads: Sequence[ChunkRead],
        *,
        places: PackDirectory,
        ops: FileOps,
        pool: ScratchPool,
        direct: DirectReads,
        straight: bool,
    ) -> None:
        """Prepare; nothing is opened.

        Args:
            reads: The batch.
            places: Where packs lie.
            ops: Every system call goes through it.
            pool: Gives the scratch.
            direct: Shared by all batches of the file system.
            straight: Whether segments may be filled from the file.
        """
        self._reads, self._places, self._ops, self._pool = reads, places, ops, pool
        self._direct, self._straight = direct, straight
        self._open: OrderedDict[str, _OpenPack] = OrderedDict()

    def __enter__(self) -> "PackLoader":
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, at: TracebackType | None) -> None:
        while self._open:
            self._close_oldest()

    def load(self, span: Span) -> LoadedSpan:
        """Load a span; what goes wrong is in its `errors`."""
        with trace.span("read", chunks=len(span.members), bytes=span.end - span.start):
            return self._load(span)

    def _load(self, span: Span) -> LoadedSpan:
        try:
            length = self._pack(span.pack_id).length
        except (OSError, InvalidArgumentError) as exc:
            return self._failed(span, exc)
        if 0 <= span.start <= span.end <= length:
            try:
                loaded = self._load_straight(span) or self._load_whole(span)
            except OSError as exc:
                if len(span.members) == 1:
                    return self._failed(span, exc)
            else:
                if loaded is not None:
                    return loaded
        return self._load_each(span, length)

    # A span in one go

    def _load_straight(self, span: Span) -> LoadedSpan | None:
        """Fill the members' segments from the page cache, where they are raw, in order and without gaps."""
        if not self._straight or self._is_direct(span):
            return None
        segments: list[memoryview] = []
        offset = span.start
        for read in (self._reads[member] for member in span.members):
            chunk = read.chunk
            room = sum(segment.nbytes for segment in read.into)
            if (
                chunk.offset != offset
                or chunk.codec != RawCodec.name
                or not chunk.stored_bytes == chunk.raw_bytes == room
            ):
                return None
            segments += read.into
            offset += chunk.stored_bytes
        if len(segments) > MAX_PIECES:
            return None
        filled = self._read_cached(span.pack_id, segments, span.start)
        return LoadedSpan(span=span, scratch=None) if filled >= span.end - span.start else None

    def _load_whole(self, span: Span) -> LoadedSpan | None:
        base = span.start - span.start % ALIGNMENT_BYTES
        end = -(-span.end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        scratch = self._pool.take(end - base)
        try:
            view = scratch.view[: end - base]
            if self._is_direct(span):
                filled = self._read_direct(span.pack_id, view, base, span.end - base)
            else:
                filled = self._read_cached(span.pack_id, [view[: span.end - base]], base)
        except BaseException:
            scratch.release()
            raise
        if base + filled >= span.end:
            return LoadedSpan(span=span, scratch=scratch, base=base)
        scratch.release()
        return None

    def _is_direct(self, span: Span) -> bool:
        num_bytes = span.end - span.start
        if not self._direct.enabled or num_bytes < DIRECT_MIN_BYTES:
            return False
        return not self._is_resident(self._pack(span.pack_id), span.start // RESIDENCY_BYTES)

    def _is_resident(self, pack: _OpenPack, window: int) -> bool:
        known = pack.resident.get(window)
        if known is None:
            start = window * RESIDENCY_BYTES
            num_bytes = min(pack.length - start, RESIDENCY_BYTES)
            known = 2 * self._ops.resident_bytes(pack.fd, start, num_bytes) >= num_bytes
            pack.resident[window] = known
        return known

    def _read_direct(self, pack_id: str, into: memoryview, offset: int, needed: int) -> int:
        """Fill an aligned view past the page cache; what that does not deliver comes through it."""
        pack, filled = self._pack(pack_id), 0
        try:
            self._set_direct(pack, True)
            filled = self._ops.preadv(pack.fd, [into], offset)
        except OSError as exc:
            if exc.errno not in _NO_DIRECT:
                raise
            self._direct.enabled = False
        # A short direct read leaves an offset that O_DIRECT would not take.
        if filled < needed:
            filled += self._read_cached(pack_id, [into[filled:]], offset + filled)
        return filled

    def _read_cached(self, pack_id: str, into: Sequence[memoryview], offset: int) -> int:
        """Fill views through the page cache, as far as the file reaches."""
        pack = self._pack(pack_id)
        self._set_direct(pack, False)
        return self._ops.read_all(pack.fd, into, offset)

    def _set_direct(self, pack: _OpenPack, direct: bool) -> None:
        """Change the file's mode where it is another: most batches read in one mode, and the system is asked once."""
        if pack.direct != direct:
            self._ops.set_direct(pack.fd, direct)
            pack.direct = direct

    # One by one, after a failure

    def _load_each(self, span: Span, length: int) -> LoadedSpan:
        """Read each member alone: those that can be read are."""
        loaded = LoadedSpan(span=span, scratch=None)
        chunks = {member: self._reads[member].chunk for member in span.members}
        for member, chunk in chunks.items():
            if chunk.offset < 0 or chunk.stored_bytes < 0 or chunk.offset + chunk.stored_bytes > length:
                loaded.errors[member] = self._short(chunk, length)
        readable = {member: chunk for member, chunk in chunks.items() if member not in loaded.errors}
        if not readable:
            return loaded
        loaded.base = min(chunk.offset for chunk in readable.values())
        end = max(chunk.offset + chunk.stored_bytes for chunk in readable.values())
        loaded.scratch = self._pool.take(end - loaded.base)
        for member, chunk in readable.items():
            error = self._load_one(chunk, loaded)
            if error is not None:
                loaded.errors[member] = error
        return loaded

    def _load_one(self, chunk: StoredChunk, loaded: LoadedSpan) -> ReadError | None:
        view = loaded.stored(chunk)
        assert view is not None
        try:
            filled = self._read_cached(chunk.pack_id, [view], chunk.offset)
        except OSError as exc:
            return TierIOError(self._places.pack_path(chunk.pack_id), "read", exc)
        return self._short(chunk, chunk.offset + filled) if filled < chunk.stored_bytes else None

    def _short(self, chunk: StoredChunk, end: int) -> ChunkDamagedError:
        needed = chunk.offset + chunk.stored_bytes
        what = f"chunk {chunk.key.hex()}: the pack ends at {end}, needs {chunk.offset}..{needed}"
        return ChunkDamagedError(self._places.pack_path(chunk.pack_id), what, chunk.key)

    def _failed(self, span: Span, cause: OSError | InvalidArgumentError) -> LoadedSpan:
        """Nothing of the pack can be read."""
        loaded = LoadedSpan(span=span, scratch=None)
        for member in span.members:
            key = self._reads[member].chunk.key
            if isinstance(cause, InvalidArgumentError):
                loaded.errors[member] = ChunkDamagedError(self._places.path, str(cause), key)
                continue
            path = self._places.pack_path(span.pack_id)
            if isinstance(cause, FileNotFoundError):
                loaded.errors[member] = ChunkDamagedError(path, "the pack is missing", key)
            else:
                loaded.errors[member] = TierIOError(path, "read", cause)
        return loaded

    # Descriptors

    def _pack(self, pack_id: str) -> _OpenPack:
        pack = self._open.get(pack_id)
        if pack is None:
            fd = self._ops.open(self._places.pack_path(pack_id), os.O_RDONLY)
            try:
                pack = _OpenPack(fd=fd, length=self._ops.length(fd))
            except BaseException:
                with suppress(OSError):
                    self._ops.close(fd)
                raise
            self._open[pack_id] = pack
            if len(self._open) > MAX_OPEN_PACKS:
                self._close_oldest()
        self._open.move_to_end(pack_id)
        return pack

    def _close_oldest(self) -> None:
        _, pack = self._open.popitem(last=False)
        with suppress(OSError):  # what was read is verified by its checksum, not by close
            self._ops.close(pack.fd)


def scratch_pool() -> ScratchPool:
    """Return a pool of buffers that hold a span, wherever it begins."""
    return ScratchPool(SPAN_BYTES + 2 * ALIGNMENT_BYTES)
