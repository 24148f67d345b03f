"""Write one small pack of each of this kvtier's format versions and codecs, beside this file.

usage: python -m tests.data.packs.make

Packs of older versions stay as they are: the kvtier that wrote them is gone, and what it wrote must be read for ever.
`CONTENT` is what every pack holds. `v1.kvpack` was written by version 1 of the format, with `noise` raw and the others
as zstd.
"""

import random
import shutil
import struct
import tempfile
from pathlib import Path

from kvtier.disk.base import ChunkPayload, checksum_of
from kvtier.disk.codecs import CodecChooser, default_codecs
from kvtier.disk.packs.chunk_seals import ChunkSeals
from kvtier.disk.packs.pack_format import PLAIN_VERSION, SEALED_VERSION
from kvtier.disk.packs.pack_tier import PackTier
from kvtier.sealing import Key, KeyRing

FOLDER = Path(__file__).parent
NAMESPACE_ID = "ns-fixture"
PACK_ID = "ab" * 16
"""Of all fixtures: sealed chunks open under the id only under which they were written."""
KEYS = KeyRing([Key("fixture", bytes(range(32)))])


def _noise(num_bytes: int) -> bytes:
    return random.Random(7).randbytes(num_bytes)


def _halves(num_values: int) -> bytes:
    """Return bf16 values of a normal distribution: what KV looks like."""
    values = random.Random(8)
    return b"".join(struct.pack("<f", values.gauss(0, 1))[2:] for _ in range(num_values))


CONTENT: dict[str, bytes] = {
    "soft": bytes(byte & 7 for byte in _noise(1500)),
    "noise": _noise(700),
    "halves": _halves(1500),
}


def key_of(name: str) -> bytes:
    """Return the key of a chunk of the fixtures."""
    return name.encode().ljust(32, b".") + bytes(4)


class _NamedTier(PackTier):
    def _new_pack_id(self) -> str:
        return PACK_ID


def write(name: str, codecs: CodecChooser, seals: ChunkSeals | None = None) -> None:
    """Write one fixture."""
    payloads = []
    for chunk, content in CONTENT.items():
        view = memoryview(content)
        payloads.append(
            ChunkPayload(key=key_of(chunk), segments=[view[:512], view[512:]], checksum=checksum_of([view]))
        )
    with tempfile.TemporaryDirectory() as folder:
        tier = _NamedTier(Path(folder), codecs=codecs, seals=seals)
        record = tier.write_pack(NAMESPACE_ID, payloads)
        shutil.copyfile(tier.directory / f"{record.pack_id}.kvpack", FOLDER / name)


def main() -> None:
    """Write what the current version writes."""
    for codec in default_codecs():
        write(f"v{PLAIN_VERSION}-{codec.name}.kvpack", CodecChooser([codec]))
        write(f"v{SEALED_VERSION}-{codec.name}.kvpack", CodecChooser([codec]), ChunkSeals(KEYS))


if __name__ == "__main__":
    main()
