"""Write one small pack of this kvtier's format version per codec, beside this file.

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
from kvtier.disk.packs.pack_format import FORMAT_VERSION
from kvtier.disk.packs.pack_tier import PackTier

FOLDER = Path(__file__).parent
NAMESPACE_ID = "ns-fixture"


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


def write(name: str, codecs: CodecChooser) -> None:
    """Write one fixture."""
    payloads = []
    for chunk, content in CONTENT.items():
        view = memoryview(content)
        payloads.append(
            ChunkPayload(key=key_of(chunk), segments=[view[:512], view[512:]], checksum=checksum_of([view]))
        )
    with tempfile.TemporaryDirectory() as folder:
        tier = PackTier(Path(folder), codecs=codecs)
        record = tier.write_pack(NAMESPACE_ID, payloads)
        shutil.copyfile(tier.directory / f"{record.pack_id}.kvpack", FOLDER / name)


def main() -> None:
    """Write what the current version writes."""
    for codec in default_codecs():
        write(f"v{FORMAT_VERSION}-{codec.name}.kvpack", CodecChooser([codec]))


if __name__ == "__main__":
    main()
