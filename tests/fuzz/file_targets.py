"""Readers of what lies on the daemon's disk or in shared memory, and of bundles."""

import hashlib
import json
import re
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from kvtier.bundles.bundle_format import build_front
from kvtier.client.arena_map import ArenaMap
from kvtier.core.arena_format import HEADER_BYTES, pack_header, unpack_header
from kvtier.disk.codecs import Codec
from kvtier.disk.codecs.raw import RawCodec
from kvtier.disk.codecs.split import Split16Codec, Split32Codec
from kvtier.disk.codecs.zstd import ZstdCodec
from kvtier.disk.files.file_ops import FileOps
from kvtier.disk.packs.pack_reading import PackReader
from kvtier.disk.packs.pack_tier import PackTier
from kvtier.errors import KvtierError
from kvtier.host.arena import ARENA_PREFIX, Arena, left_header
from kvtier.ledger import Ledger
from tests.fakes.bundles import a_bundle, old_bundle, opened, opened_old, read_bundle, sealed, sealed_old
from tests.fakes.chunks import key_of, layout_of, noise, payload_of, soft
from tests.fuzz.base import ACCEPTED, reason

DATA = Path(__file__).parents[1] / "data"
_CHECKSUM = re.compile(rb'("kvtier\.header_xxh3_64": ?")[0-9a-f]{16}')
_ZEROS = b"0" * 16
MAX_RAW_BYTES = 1 << 20


class FileTarget:
    """A target with a folder of its own."""

    name = ""
    words: Sequence[bytes] = ()

    def __init__(self) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="kvtier-fuzz-")
        self.folder = Path(self._temporary.name)

    def mend(self, data: bytes) -> bytes:
        """See `Target`; nothing to mend."""
        return data

    def read(self, data: bytes) -> str:
        """See `Target`."""
        try:
            self._read(data)
        except KvtierError as exc:
            return reason(exc)
        return ACCEPTED

    def _read(self, data: bytes) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """See `Target`."""
        self._temporary.cleanup()


class PackTarget(FileTarget):
    """A pack: header as at adoption and fsck, then every chunk that it names."""

    name = "packs"
    words = (
        b'"__metadata__"',
        b"kvtier.chunks",
        b'"codec"',
        b"zstd",
        b"split16",
        b"raw_bytes",
        b'"data_offsets":[0,9]',
    )

    def __init__(self) -> None:
        super().__init__()
        self._tier = PackTier(self.folder)
        self._reader = PackReader(self.folder, FileOps(), self._tier.seals, direct_reads=False)
        self._path = self.folder / f"{'0' * 32}.kvpack"

    def seeds(self) -> Sequence[bytes]:
        """See `Target`."""
        payloads = [payload_of(i, data) for i, data in enumerate([soft(3000, 1), noise(2000, 2), soft(500, 3)])]
        record = self._tier.write_pack("ns", payloads)
        (path,) = self.folder.glob(f"{record.pack_id}.kvpack")
        data = path.read_bytes()
        path.unlink()
        old = [each.read_bytes() for each in sorted((DATA / "packs").glob("*.kvpack"))]
        return [data, data[: 8 + int.from_bytes(data[:8], "little")], *(each for each in old if len(each) < 100_000)]

    def mend(self, data: bytes) -> bytes:
        """Make length and checksum of the header right."""
        start = data[8:]
        end = start.rfind(b"}}") + 2
        with suppress(ValueError, RecursionError):
            _, length = json.JSONDecoder().raw_decode(start.decode("latin-1")[:100_000])
            end = length
        header = start[: max(end, 0)]
        header = header.ljust(-(-(8 + len(header)) // 4096) * 4096 - 8)
        zeroed = _CHECKSUM.sub(rb"\g<1>" + _ZEROS, header, 1)
        checksum = f"{xxhash.xxh3_64_intdigest(zeroed):016x}".encode()
        return len(header).to_bytes(8, "little") + zeroed.replace(_ZEROS, checksum, 1) + start[end:].lstrip(b" ")

    def _read(self, data: bytes) -> None:
        self._path.write_bytes(data)
        record = self._tier.read_record(self._path.stem)
        for chunk in record.chunks[:20]:
            if chunk.raw_bytes <= MAX_RAW_BYTES:  # a reader has a row for it
                with suppress(KvtierError):
                    self._tier.read_chunk(chunk, [memoryview(bytearray(chunk.raw_bytes))])
            with suppress(KvtierError):
                self._reader.stored([chunk], lambda chunk, stored: None)


class LedgerTarget(FileTarget):
    """A ledger: opened, upgraded and loaded as at a start."""

    name = "ledgers"
    words = (b"CREATE TABLE", b"SQLite format 3\0", b"chunks", b"WITHOUT ROWID", b"INTEGER PRIMARY KEY")

    def seeds(self) -> Sequence[bytes]:
        """See `Target`."""
        path = self.folder / "new.sqlite"
        Ledger.open(path, with_copies=False).close()
        old = [each.read_bytes() for each in sorted((DATA / "ledgers").rglob("*.sqlite"))]
        return [path.read_bytes(), *(each for each in old if len(each) < 300_000)]

    def _read(self, data: bytes) -> None:
        path = self.folder / "ledger.sqlite"
        for left in self.folder.glob("ledger.sqlite*"):
            left.unlink()
        path.write_bytes(data)
        ledger = Ledger.open(path, with_copies=False)
        try:
            ledger.load()
        finally:
            ledger.close()


class BundleTarget(FileTarget):
    """A bundle: front, length and every chunk's digest, as an import does."""

    name = "bundles"
    words = (b'{"__metadata__":{', b"kvtier.tokens", b'"dtype":"U8"', b'"shape":[', b"kvtier.digest", b"kvtier.layout")

    def seeds(self) -> Sequence[bytes]:
        """See `Target`."""
        bundle, data = a_bundle(recipe_json='{"kind": "text"}')
        return [build_front(bundle) + data, old_bundle(1), old_bundle(2)]

    def mend(self, data: bytes) -> bytes:
        """Make length and digest of the header right."""
        try:
            is_old = b'"kvtier.bundle":"3"' not in data
            header, rest = (opened_old if is_old else opened)(data)
            return (sealed_old if is_old else sealed)(header, rest)
        except (ValueError, KeyError, TypeError, RecursionError, AttributeError):
            end = data.find(b"}}") + 2
            return len(data[8:end]).to_bytes(8, "little") + data[8:]

    def _read(self, data: bytes) -> None:
        read_bundle(data, self.folder)


class CodecTarget(FileTarget):
    """What decodes a chunk: one byte says which codec, three how long the payload is, the rest is what is stored."""

    name = "codecs"
    words = (b"\x28\xb5\x2f\xfd", b"\x28\xb5\x2f\xfd\xc0" + b"\xff" * 8, b"\x50\x2a\x4d\x18", b"\x01\x00\x00")
    _codecs: Sequence[Codec] = (RawCodec(), ZstdCodec(), Split16Codec(), Split32Codec())

    def seeds(self) -> Sequence[bytes]:
        """See `Target`."""
        found = []
        for number, codec in enumerate(self._codecs):
            for payload in (soft(4096, 1), noise(600, 2), bytes(MAX_RAW_BYTES // 4)):
                stored = codec.encode([memoryview(payload)])
                if stored is not None:
                    found.append(bytes([number]) + len(payload).to_bytes(3, "little") + b"".join(stored))
        return found

    def _read(self, data: bytes) -> None:
        codec = self._codecs[data[0] % len(self._codecs) if data else 0]
        raw_bytes = min(int.from_bytes(data[1:4], "little"), MAX_RAW_BYTES)
        guarded = np.full(raw_bytes + 64, 0xA5, np.uint8)
        middle = memoryview(guarded.data)[32 : 32 + raw_bytes]
        half = raw_bytes // 2
        try:
            codec.decode(memoryview(data[4:]), [middle[:half], middle[half:]])
        finally:
            assert set(guarded[:32].tolist() + guarded[32 + raw_bytes :].tolist()) == {0xA5}, "wrote beyond the payload"


class ArenaTarget(FileTarget):
    """An arena that a previous daemon left: header, slot table; and as a worker maps it."""

    name = "arenas"
    words = (b"KVTARENA", bytes(16), b"\xff" * 8)
    _layout = layout_of(useful_bytes=1000)

    def seeds(self) -> Sequence[bytes]:
        """See `Target`."""
        arena = Arena.create(self.folder, self._layout, 3, namespace_id="ns")
        arena.back([0, 1])
        arena.commit(0, key_of(0), 0, 5)
        data = arena.path.read_bytes()
        arena.close(unlink=True)
        return [data, data[:HEADER_BYTES]]

    def mend(self, data: bytes) -> bytes:
        """Make the header's digest right, and the file as long as it says, within bounds."""
        size = len(pack_header(unpack_header(self.seeds()[0]))) - 8
        header = data[:size].ljust(size, b"\0")
        data = header + xxhash.xxh3_64_intdigest(header).to_bytes(8, "little") + data[size + 8 :]
        with suppress(KvtierError):
            file_bytes = unpack_header(data).file_bytes
            if 0 <= file_bytes < MAX_RAW_BYTES:
                data = data[:file_bytes].ljust(file_bytes, b"\0")
        return data

    def _read(self, data: bytes) -> None:
        geometry = unpack_header(data)
        path = self.folder / (ARENA_PREFIX + geometry.arena_id.hex())
        path.write_bytes(data)
        try:
            self._open(path, geometry.arena_id)
        finally:
            path.unlink()

    def _open(self, path: Path, arena_id: bytes) -> None:
        with suppress(KvtierError), ArenaMap(path, arena_id) as view:
            view.backings()
            for slot in (0, 1, 2, 2**40):
                with suppress(KvtierError):
                    view.row_address(slot)
                    view.is_readable(slot, 1, 1)
        left_header(path)
        arena = Arena.reopen(path, self._layout)
        try:
            for entry in arena.entries():
                assert entry.committed in (True, False)
        finally:
            arena.close(unlink=False)


def digest_of(data: bytes) -> str:
    """Return a name for an input."""
    return hashlib.sha256(data).hexdigest()[:12]


FILE_TARGETS: tuple[Any, ...] = (PackTarget, LedgerTarget, BundleTarget, CodecTarget, ArenaTarget)
