"""Reading packs: batches of chunks, decoded and verified while the next bytes are read; and a pack's own header."""

import errno
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import islice
from pathlib import Path

from kvtier.core.stored import SEAL_BYTES, SEAL_MARK, PackRecord, StoredChunk
from kvtier.disk.base import ChunkRead, ReadDone, checksum_of
from kvtier.disk.codecs import CodecError, UnknownCodecError, codec_by_name
from kvtier.disk.codecs.raw import RawCodec
from kvtier.disk.files.file_ops import FileOps
from kvtier.disk.files.worker_thread import WorkerThread
from kvtier.disk.packs import pack_format
from kvtier.disk.packs.chunk_seals import ChunkSeals
from kvtier.disk.packs.pack_directory import pack_path
from kvtier.disk.packs.pack_loading import LoadedSpan, PackLoader, PackSource, ReadError
from kvtier.disk.packs.pack_spans import Span, plan_spans
from kvtier.disk.packs.read_rate import measured_read_rate
from kvtier.errors import ChunkDamagedError, ChunkSealedError, ChunkTamperedError, TierIOError
from kvtier.obs import trace

SPANS_AHEAD = 2
"""Spans loaded, or being loaded, beside the one that is decoded: one would wait for every slow read of the device."""

TURN_MAX_BYTES = 512 * 1024
"""Chunks up to that long are decoded by one call at a time."""

OPEN_LATE_MAX_BYTES = 128 * 1024
"""Sealed chunks up to that long are opened by the thread that decodes them. Opened ahead, cold reads of 64 KiB took
1.06 to 1.21 times as long, those of 128 KiB 1.08, of 256 KiB the same, of 512 KiB 0.87."""

_SEALED_RAW = RawCodec.name + SEAL_MARK


class PackReader:
    """Reads chunks of any packs of a directory. Thread-safe; each call has its own files and its own thread.

    One call at a time decodes short chunks, while the others read ahead: a decoder releases Python's lock at every
    numpy call, and two with chunks of 64 KiB are half as fast as one. Long chunks are decoded by all calls at once.

    A call holds `SPANS_AHEAD` + 1 buffers of `SPAN_BYTES`, or of its largest chunk.
    """

    def __init__(self, directory: Path, ops: FileOps, seals: ChunkSeals, *, direct_reads: bool) -> None:
        """Read from a directory, past the page cache where that is allowed and faster."""
        self._source = PackSource(directory=directory, ops=ops, direct=direct_reads and hasattr(os, "O_DIRECT"))
        self._seals = seals
        self._decoding = threading.Lock()

    def prepare(self) -> None:
        """Make the buffers of one call: their pages took the first read after a start 15 ms a span."""
        self._source.pool.fill(SPANS_AHEAD + 1)

    def rate(self, scratch_path: Path) -> float | None:
        """See `measured_read_rate`; None also where packs are not read past the page cache."""
        return measured_read_rate(scratch_path, self._source.ops, self._source.pool) if self._source.direct else None

    def read(self, reads: Sequence[ChunkRead], done: ReadDone, cancelled: Callable[[], bool]) -> None:
        """See `DiskTier.read_chunks`."""

        def finish(loaded: LoadedSpan) -> None:
            members = [(member, reads[member]) for member in loaded.span.members]
            takes_turns = any(
                read.chunk.codec_name != RawCodec.name and read.chunk.raw_bytes <= TURN_MAX_BYTES for _, read in members
            )
            with self._decoding if takes_turns else nullcontext(), trace.span("decode", chunks=len(members)):
                if loaded.opens_late:
                    self._open(loaded, reads)
                for member, read in members:
                    # Segments that were filled from the file are touched: such reads have begun, and end.
                    if loaded.scratch is None or not cancelled():
                        done(read, loaded.errors.get(member) or self._decode(read, loaded.stored(read.chunk)))

        self._each_span(reads, finish, cancelled)

    def stored(self, chunks: Sequence[StoredChunk], use: Callable[[StoredChunk, memoryview], None]) -> None:
        """Call `use` with each chunk and its stored bytes, opened and verified, in order; the view ends with the call.

        Raises:
            ChunkDamagedError: A chunk is not what was written; the rest is not read.
            TierIOError: The operating system refused.
        """

        reads = [ChunkRead(chunk=chunk, into=()) for chunk in chunks]

        def finish(loaded: LoadedSpan) -> None:
            if loaded.opens_late:
                self._open(loaded, reads)
            for member in loaded.span.members:
                if member in loaded.errors:
                    raise loaded.errors[member]
                chunk = chunks[member]
                stored = loaded.stored(chunk)
                assert stored is not None
                self.verify(chunk.opened(), stored)
                use(chunk.opened(), stored)

        self._each_span(reads, finish, lambda: False)

    def record(self, pack_id: str) -> PackRecord:
        """See `PackTier.read_record`."""
        path = pack_path(self._source.directory, pack_id)
        try:
            with self._source.ops.opened(path, os.O_RDONLY) as fd:
                file_bytes = self._source.ops.length(fd)
                prefix = self._read_at(fd, pack_format.LENGTH_PREFIX.size, 0)
                header_bytes = pack_format.header_bytes_of(path, prefix, file_bytes)
                header = self._read_at(fd, header_bytes, pack_format.LENGTH_PREFIX.size)
        except FileNotFoundError as exc:
            raise ChunkDamagedError(path, "the pack is missing") from exc
        except OSError as exc:
            raise TierIOError(path, "read", exc) from exc
        return pack_format.parse_header(path, header, file_bytes)

    def _each_span(
        self, reads: Sequence[ChunkRead], finish: Callable[[LoadedSpan], None], cancelled: Callable[[], bool]
    ) -> None:
        """Load spans ahead, and finish them in order, until it is cancelled."""
        spans = plan_spans([read.chunk for read in reads])
        left = iter(spans)

        def load(span: Span) -> LoadedSpan | None:
            if cancelled():
                return None
            loaded = loader.load(span)
            loaded.opens_late = any(_opens_late(reads[member].chunk) for member in span.members)
            if not loaded.opens_late:
                self._open(loaded, reads)
            return loaded

        with (
            PackLoader(reads, self._source) as loader,
            WorkerThread("kvtier-read-ahead", is_worth_it=len(spans) > 1) as thread,
        ):
            ahead = deque(thread.submit(load, span) for span in islice(left, SPANS_AHEAD))
            while ahead and (loaded := ahead.popleft().result()) is not None:
                ahead.extend(thread.submit(load, span) for span in islice(left, 1))
                try:
                    finish(loaded)
                finally:
                    if loaded.scratch is not None:
                        self._source.pool.release(loaded.scratch)

    def decode(self, chunk: StoredChunk, stored: memoryview, into: Sequence[memoryview]) -> None:
        """Decode a chunk whose stored bytes, not sealed, came from elsewhere; raises as `stored` does."""
        error = self._decode(ChunkRead(chunk=chunk, into=into), stored)
        if error is not None:
            raise error

    def verify(self, chunk: StoredChunk, stored: memoryview) -> None:
        """Verify what will be copied: its payload is decoded into scratch, or is what is stored."""
        if chunk.codec == RawCodec.name:
            error = self._decode(ChunkRead(chunk=chunk, into=[stored]), None)
        else:
            scratch = self._source.pool.take(chunk.raw_bytes)
            error = self._decode(ChunkRead(chunk=chunk, into=[memoryview(scratch)[: chunk.raw_bytes]]), stored)
            self._source.pool.release(scratch)
        if error is not None:
            raise error

    def _open(self, loaded: LoadedSpan, reads: Sequence[ChunkRead]) -> None:
        """Open sealed members of a span, all of them before any is decoded: by turns they take a tenth longer.

        Long ones in the thread that reads ahead, while the caller's decodes the span before. Short ones in the
        caller's: two threads that take Python's lock once a chunk cost as much as opening does. Raw ones go straight
        into their segments (`_decode`): the caller's thread has nothing else to do with them, and the device waits for
        the other.
        """
        sealed = [
            (member, reads[member].chunk)
            for member in loaded.span.members
            if reads[member].chunk.sealed_by and member not in loaded.errors and not _is_straight(reads[member])
        ]
        if not sealed or loaded.scratch is None:
            return
        scratch = self._source.pool.take(sum(chunk.stored_bytes for _, chunk in sealed))
        into, start = memoryview(scratch), 0
        for member, chunk in sealed:
            if chunk in loaded.opened:  # a batch may have a chunk twice
                continue
            stored = loaded.stored(chunk)
            assert stored is not None
            opened = into[start : start + max(0, stored.nbytes - SEAL_BYTES)]
            try:
                self._seals.open(self._source.directory, chunk, stored, opened)
            except (ChunkTamperedError, ChunkSealedError) as error:
                loaded.errors[member] = error
                continue
            loaded.opened[chunk] = opened
            start += opened.nbytes
        if len(sealed) == len(loaded.span.members):
            # Else others lie in what was read, and what was opened is freed with its views.
            self._source.pool.release(loaded.scratch)
            loaded.scratch = scratch

    def _decode(self, read: ChunkRead, stored: memoryview | None) -> ReadError | None:
        """Decode into the segments, unless they hold the payload already, and compare its checksum."""
        chunk, into_bytes = read.chunk, sum(segment.nbytes for segment in read.into)
        if into_bytes != chunk.raw_bytes:
            return self._damage(chunk, f"payload has {chunk.raw_bytes} bytes, expected {into_bytes}")
        if stored is not None:
            try:
                if _is_straight(read) and stored.nbytes == chunk.stored_bytes:  # else another read of it opened it
                    self._seals.open(self._source.directory, chunk, stored, read.into[0].cast("B"))
                else:
                    codec_by_name(chunk.codec_name).decode(stored, read.into)
            except (ChunkTamperedError, ChunkSealedError) as exc:
                return exc
            except MemoryError:  # it says nothing about the bytes: as if the system had refused to read them
                return TierIOError(self._path_of(chunk), "decode", OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)))
            except (CodecError, UnknownCodecError) as exc:
                return self._damage(chunk, f"chunk {chunk.key.hex()} cannot be decoded: {exc}")
        found = checksum_of(read.into)
        if found != chunk.checksum:
            what = f"chunk {chunk.key.hex()} has checksum {found:016x}, written as {chunk.checksum:016x}"
            return self._damage(chunk, what)
        return None

    def _path_of(self, chunk: StoredChunk) -> Path:
        return pack_path(self._source.directory, chunk.pack_id)

    def _damage(self, chunk: StoredChunk, what: str) -> ChunkDamagedError:
        return ChunkDamagedError(self._path_of(chunk), what, chunk.key)

    def _read_at(self, fd: int, length: int, offset: int) -> bytes:
        buffer = bytearray(length)
        return bytes(buffer[: self._source.ops.read_all(fd, [memoryview(buffer)], offset)])


def _opens_late(chunk: StoredChunk) -> bool:
    """Say whether a sealed chunk is opened by the thread that decodes it."""
    return chunk.raw_bytes <= OPEN_LATE_MAX_BYTES and SEAL_MARK in chunk.codec and chunk.codec_name != RawCodec.name


def _is_straight(read: ChunkRead) -> bool:
    """Say whether a sealed chunk opens into its segment: it is raw, and lies there in one piece."""
    chunk = read.chunk
    return (
        chunk.codec.startswith(_SEALED_RAW)
        and chunk.stored_bytes == chunk.raw_bytes + SEAL_BYTES
        and len(read.into) == 1
        and read.into[0].nbytes == chunk.raw_bytes
    )
