"""Bytes of spans into memory: the fastest way that the file, the memory and the file system allow.

- What is in the page cache is copied from there, what is not is read past it (O_DIRECT): packs are read once, into an
  arena that is the cache, and a copy in the page cache would only push others out.
- What is read past the page cache goes into scratch, raw chunks too: a device fills few huge pages almost twice as fast
  as the small ones of an arena, and the next span is on its way while they are copied. Raw chunks that are in the page
  cache are copied from there straight into their segments.
- A span that fails is read chunk by chunk, so that a bad sector costs the chunk that lies on it.
"""

import errno
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from kvtier.core.layout import ALIGNMENT_BYTES
from kvtier.core.stored import StoredChunk
from kvtier.disk.base import ChunkRead
from kvtier.disk.codecs.raw import RawCodec
from kvtier.disk.files.file_ops import MAX_PIECES, FileOps
from kvtier.disk.files.scratch import ScratchPool
from kvtier.disk.packs.pack_directory import pack_path
from kvtier.disk.packs.pack_spans import SPAN_BYTES, Span
from kvtier.errors import ChunkDamagedError, InvalidArgumentError, TierIOError
from kvtier.obs import trace

DIRECT_MIN_BYTES = 256 * 1024
"""A shorter read takes the page cache: its readahead serves the neighbours, which are likely to be wanted next."""
MAX_OPEN_PACKS = 32
"""Packs that a batch alternates between stay open: opening them again for each of 100 spans took an eighth longer."""
RESIDENCY_BYTES = 32 * 1024**2
"""The page cache is asked about windows of this many bytes, not about each span: asking takes 0.25 ms, while the device
has nothing to do."""

ReadError = ChunkDamagedError | TierIOError
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)


@dataclass(kw_only=True)
class PackSource:
    """What all batches share. Any thread.

    Attributes:
        directory: Of the packs.
        ops: Every system call goes through it.
        direct: Whether the file system takes O_DIRECT; its first refusal decides.
        pool: Its buffers hold a span, wherever that begins.
    """

    directory: Path
    ops: FileOps
    direct: bool
    pool: ScratchPool = field(default_factory=lambda: ScratchPool(SPAN_BYTES + 2 * ALIGNMENT_BYTES))


@dataclass(kw_only=True)
class LoadedSpan:
    """A span in memory.

    Attributes:
        span: What was asked for.
        scratch: Where its bytes lie, from `base` on, owned by who has the span; None when they lie in the segments of
            its reads.
        base: File offset of the scratch's first byte.
        opened: Stored bytes of sealed members, opened; by the whole row, which is what they are verified against.
        errors: Members that could not be loaded.
        opens_late: Sealed members are not opened yet.
    """

    span: Span
    scratch: mmap.mmap | None = None
    base: int = 0
    opened: dict[StoredChunk, memoryview] = field(default_factory=dict)
    errors: dict[int, ReadError] = field(default_factory=dict)
    opens_late: bool = False

    def stored(self, chunk: StoredChunk) -> memoryview | None:
        """Return a member's stored bytes, opened, None when they lie in its segments."""
        if self.scratch is None:
            return None
        if chunk in self.opened:
            return self.opened[chunk]
        start = chunk.offset - self.base
        return memoryview(self.scratch)[start : start + chunk.stored_bytes]


@dataclass(kw_only=True)
class _OpenPack:
    """A file of the batch, and what was asked about it once.

    Attributes:
        fd: Its descriptor.
        length: Its length in bytes when it was opened.
        direct: Whether it is read past the page cache now.
        resident: By window of `RESIDENCY_BYTES`: whether at least half of it was in the page cache.
    """

    fd: int
    length: int
    direct: bool = False
    resident: dict[int, bool] = field(default_factory=dict)


class PackLoader:
    """Loads the spans of one batch. Not thread-safe; a context manager that closes the files."""

    def __init__(self, reads: Sequence[ChunkRead], source: PackSource) -> None:
        """Prepare; nothing is opened."""
        self._reads, self._source, self._ops = reads, source, source.ops
        self._opened: dict[str, _OpenPack] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, at: TracebackType | None) -> None:
        self._close()

    def load(self, span: Span) -> LoadedSpan:
        """Load a span; what goes wrong is in its `errors`."""
        with trace.span("read", chunks=len(span.members), bytes=span.end - span.start):
            try:
                pack = self._open(span.pack_id)
            except (OSError, InvalidArgumentError) as exc:
                return self._failed(span, exc)
            if span.end <= pack.length:
                try:
                    if (loaded := self._load_straight(span, pack) or self._load_whole(span, pack)) is not None:
                        return loaded
                except OSError as exc:
                    if len(span.members) == 1:
                        return self._failed(span, exc)
            return self._load_each(span, pack)

    # A span in one go

    def _load_straight(self, span: Span, pack: _OpenPack) -> LoadedSpan | None:
        """Fill the members' segments from the page cache, where they are raw, in order and without gaps.

        Through scratch it took a third more CPU.
        """
        segments: list[memoryview] = []
        offset = span.start
        for read in (self._reads[member] for member in span.members):
            chunk, into_bytes = read.chunk, sum(segment.nbytes for segment in read.into)
            is_raw = chunk.codec == RawCodec.name and chunk.stored_bytes == chunk.raw_bytes == into_bytes
            if not is_raw or chunk.offset != offset:
                return None
            segments += read.into
            offset += chunk.stored_bytes
        if not 0 < len(segments) <= MAX_PIECES or self._is_cold(span, pack):
            return None
        filled = self._read_cached(pack, segments, span.start)
        return LoadedSpan(span=span) if filled >= span.end - span.start else None

    def _load_whole(self, span: Span, pack: _OpenPack) -> LoadedSpan | None:
        base = span.start - span.start % ALIGNMENT_BYTES
        end = -(-span.end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        scratch = self._source.pool.take(end - base)
        view = memoryview(scratch)[: end - base]
        if self._is_cold(span, pack):
            filled = self._read_direct(pack, view, base, span.end - base)
        else:
            filled = self._read_cached(pack, [view[: span.end - base]], base)
        return LoadedSpan(span=span, scratch=scratch, base=base) if base + filled >= span.end else None

    def _is_cold(self, span: Span, pack: _OpenPack) -> bool:
        """Whether to read past the page cache."""
        if not self._source.direct or span.end - span.start < DIRECT_MIN_BYTES:
            return False
        window = span.start // RESIDENCY_BYTES
        if window not in pack.resident:
            start = window * RESIDENCY_BYTES
            num_bytes = min(pack.length - start, RESIDENCY_BYTES)
            pack.resident[window] = 2 * self._ops.resident_bytes(pack.fd, start, num_bytes) >= num_bytes
        return not pack.resident[window]

    def _read_direct(self, pack: _OpenPack, into: memoryview, offset: int, needed: int) -> int:
        """Fill an aligned view past the page cache; what that does not deliver comes through it."""
        filled = 0
        try:
            self._set_direct(pack, True)
            filled = self._ops.preadv(pack.fd, [into], offset)
        except OSError as exc:
            if exc.errno not in _NO_DIRECT:
                raise
            self._source.direct = False
        # A short direct read leaves an offset that O_DIRECT would not take.
        if filled < needed:
            filled += self._read_cached(pack, [into[filled:]], offset + filled)
        return filled

    def _read_cached(self, pack: _OpenPack, into: Sequence[memoryview], offset: int) -> int:
        """Fill views through the page cache, as far as the file reaches."""
        self._set_direct(pack, False)
        return self._ops.read_all(pack.fd, into, offset)

    def _set_direct(self, pack: _OpenPack, is_direct: bool) -> None:
        """Change the file's mode where it is another: most batches read in one mode, and the system is asked once."""
        if pack.direct != is_direct:
            self._ops.set_direct(pack.fd, is_direct)
            pack.direct = is_direct

    # After a failure

    def _load_each(self, span: Span, pack: _OpenPack) -> LoadedSpan:
        """Read each member alone: those that can be read are."""
        path, chunks = pack_path(self._source.directory, span.pack_id), [self._reads[n].chunk for n in span.members]
        ends = [chunk.offset + chunk.stored_bytes for chunk in chunks]
        readable_bytes = max((end - span.start for end in ends if end <= pack.length), default=0)
        scratch = self._source.pool.take(readable_bytes)
        loaded = LoadedSpan(span=span, scratch=scratch, base=span.start)
        for member, chunk, end in zip(span.members, chunks, ends, strict=True):
            reached = pack.length
            try:
                if end <= pack.length:
                    view = memoryview(scratch)[chunk.offset - span.start : end - span.start]
                    reached = chunk.offset + self._read_cached(pack, [view], chunk.offset)
            except OSError as exc:
                loaded.errors[member] = TierIOError(path, "read", exc)
                continue
            if reached < end:
                what = f"chunk {chunk.key.hex()}: the pack ends at {reached}, needs {chunk.offset}..{end}"
                loaded.errors[member] = ChunkDamagedError(path, what, chunk.key)
        return loaded

    def _failed(self, span: Span, cause: OSError | InvalidArgumentError) -> LoadedSpan:
        """Nothing of the pack can be read."""
        loaded = LoadedSpan(span=span)
        for member in span.members:
            key = self._reads[member].chunk.key
            if isinstance(cause, InvalidArgumentError):
                loaded.errors[member] = ChunkDamagedError(self._source.directory, str(cause), key)
                continue
            path = pack_path(self._source.directory, span.pack_id)
            if isinstance(cause, FileNotFoundError):
                loaded.errors[member] = ChunkDamagedError(path, "the pack is missing", key)
            else:
                loaded.errors[member] = TierIOError(path, "read", cause)
        return loaded

    # Files

    def _open(self, pack_id: str) -> _OpenPack:
        pack = self._opened.get(pack_id)
        if pack is None:
            if len(self._opened) == MAX_OPEN_PACKS:
                self._close()
            fd = self._ops.open(pack_path(self._source.directory, pack_id), os.O_RDONLY)
            pack = self._opened[pack_id] = _OpenPack(fd=fd, length=-1)
            try:
                pack.length = self._ops.length(fd)
            except BaseException:
                self._close()
                raise
        return pack

    def _close(self) -> None:
        while self._opened:
            _, pack = self._opened.popitem()
            with suppress(OSError):  # what was read is verified by its checksum, not by close
                self._ops.close(pack.fd)
