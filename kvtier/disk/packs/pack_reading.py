"""Reading packs: batches of chunks, decoded and verified while the next bytes are read; and a pack's own header."""

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext

from kvtier.core.stored import PackRecord, StoredChunk
from kvtier.disk.base import ChunkRead, ReadDone, checksum_of
from kvtier.disk.codecs import CodecError, UnknownCodecError, codec_by_name
from kvtier.disk.codecs.raw import RawCodec
from kvtier.disk.files.file_ops import FileOps
from kvtier.disk.files.read_ahead import ReadAhead
from kvtier.disk.packs import pack_format
from kvtier.disk.packs.pack_directory import PackDirectory
from kvtier.disk.packs.pack_loading import DirectReads, LoadedSpan, PackLoader, ReadError, scratch_pool
from kvtier.disk.packs.pack_spans import Span, plan_spans
from kvtier.errors import ChunkDamagedError, TierIOError
from kvtier.obs import trace

SPANS_AHEAD = 2
"""Spans loaded, or being loaded, beside the one that is decoded: one would wait for every slow read of the device."""

TURN_MAX_BYTES = 512 * 1024
"""Chunks up to that long are decoded by one call at a time."""

StoredBytes = Callable[[StoredChunk, memoryview], None]


class PackReader:
    """Reads chunks of any packs of a directory. Thread-safe; each call has its own files and its own thread.

    One call at a time decodes short chunks, while the others read ahead: a decoder gives up Python's lock at every
    numpy call, and two with chunks of 64 KiB are half as fast as one. Long chunks are decoded by all calls at once.

    A call holds `SPANS_AHEAD` + 1 buffers of `SPAN_BYTES`, or of its largest chunk.
    """

    def __init__(self, places: PackDirectory, ops: FileOps, direct: DirectReads) -> None:
        """Read from a directory; `direct` is shared by all who read the same file system."""
        self._places, self._ops, self._direct = places, ops, direct
        self._pool = scratch_pool()
        self._decoding = threading.Lock()

    def prepare(self) -> None:
        """Make the buffers of one call: their pages took the first read after a start 15 ms a span."""
        self._pool.fill(SPANS_AHEAD + 1)

    def read(self, reads: Sequence[ChunkRead], done: ReadDone, cancelled: Callable[[], bool]) -> None:
        """See `DiskTier.read_chunks`."""
        reads = list(reads)

        def finish(loaded: LoadedSpan) -> None:
            takes_turns = any(
                chunk.codec != RawCodec.name and chunk.raw_bytes <= TURN_MAX_BYTES
                for chunk in (reads[member].chunk for member in loaded.span.members)
            )
            with (
                self._decoding if takes_turns else nullcontext(),
                trace.span("decode", chunks=len(loaded.span.members)),
            ):
                for member in loaded.span.members:
                    read = reads[member]
                    # Segments that were filled from the file are touched: such reads have begun, and end.
                    if loaded.scratch is None or not cancelled():
                        done(read, self._outcome(read, loaded, member))

        self._each_span(reads, finish, cancelled, straight=True)

    def stored(self, chunks: Sequence[StoredChunk], use: StoredBytes) -> None:
        """Call `use` with each chunk's stored bytes, verified, in order; the view ends with the call.

        Raises:
            ChunkDamagedError: A chunk is not what was written; the rest is not read.
            TierIOError: The operating system refused.
        """
        reads = [ChunkRead(chunk=chunk, into=()) for chunk in chunks]

        def finish(loaded: LoadedSpan) -> None:
            for member in loaded.span.members:
                if member in loaded.errors:
                    raise loaded.errors[member]
                chunk = chunks[member]
                stored = loaded.stored(chunk)
                assert stored is not None
                self._verify_stored(chunk, stored)
                use(chunk, stored)

        self._each_span(reads, finish, lambda: False, straight=False)

    def record(self, pack_id: str) -> PackRecord:
        """Return what a pack's own header states: what a lost ledger is rebuilt from.

        Raises:
            FormatVersionError: A newer kvtier wrote it.
            ChunkDamagedError: It is missing, cut short, or no pack.
            TierIOError: The operating system refused.
        """
        path = self._places.pack_path(pack_id)
        try:
            with self._ops.opened(path, os.O_RDONLY) as fd:
                file_bytes = self._ops.length(fd)
                prefix = self._read_at(fd, pack_format.LENGTH_PREFIX.size, 0)
                header_bytes = pack_format.header_bytes_of(path, prefix, file_bytes)
                header = self._read_at(fd, header_bytes, pack_format.LENGTH_PREFIX.size)
        except FileNotFoundError as exc:
            raise ChunkDamagedError(path, "the pack is missing") from exc
        except OSError as exc:
            raise TierIOError(path, "read", exc) from exc
        return pack_format.parse_header(path, header, file_bytes)

    def _each_span(
        self,
        reads: Sequence[ChunkRead],
        finish: Callable[[LoadedSpan], None],
        cancelled: Callable[[], bool],
        *,
        straight: bool,
    ) -> None:
        spans = plan_spans([read.chunk for read in reads])
        loader = PackLoader(
            reads, places=self._places, ops=self._ops, pool=self._pool, direct=self._direct, straight=straight
        )
        with (
            loader,
            ReadAhead[Span, LoadedSpan](
                spans, loader.load, LoadedSpan.release, stop=cancelled, depth=SPANS_AHEAD
            ) as ahead,
        ):
            for loaded in ahead:
                try:
                    finish(loaded)
                finally:
                    loaded.release()

    def _outcome(self, read: ChunkRead, loaded: LoadedSpan, member: int) -> ReadError | None:
        """Decode and verify one read."""
        error = loaded.errors.get(member)
        if error is not None:
            return error
        try:
            self._verify(read.chunk, loaded.stored(read.chunk), read.into)
        except ChunkDamagedError as damage:
            return damage
        return None

    def _verify_stored(self, chunk: StoredChunk, stored: memoryview) -> None:
        """Verify what will be copied: its payload is decoded into scratch, or is what is stored."""
        if chunk.codec == RawCodec.name:
            self._verify(chunk, None, [stored])
            return
        with self._pool.take(chunk.raw_bytes) as scratch:
            self._verify(chunk, stored, [scratch.view[: chunk.raw_bytes]])

    def _verify(self, chunk: StoredChunk, stored: memoryview | None, into: Sequence[memoryview]) -> None:
        """Decode into the segments, unless they hold the payload already, and compare its checksum."""
        room = sum(segment.nbytes for segment in into)
        if room != chunk.raw_bytes:
            raise self._damage(chunk, f"payload has {chunk.raw_bytes} bytes, expected {room}")
        if stored is not None:
            try:
                codec_by_name(chunk.codec).decode(stored, into)
            except (CodecError, UnknownCodecError) as exc:
                raise self._damage(chunk, f"chunk {chunk.key.hex()} cannot be decoded: {exc}") from exc
        found = checksum_of(into)
        if found != chunk.checksum:
            what = f"chunk {chunk.key.hex()} has checksum {found:016x}, written as {chunk.checksum:016x}"
            raise self._damage(chunk, what)

    def _damage(self, chunk: StoredChunk, what: str) -> ChunkDamagedError:
        return ChunkDamagedError(self._places.pack_path(chunk.pack_id), what, chunk.key)

    def _read_at(self, fd: int, length: int, offset: int) -> bytes:
        buffer = bytearray(length)
        return bytes(buffer[: self._ops.read_all(fd, [memoryview(buffer)], offset)])
