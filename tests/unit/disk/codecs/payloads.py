"""Payloads that look like KV, and payloads that do not; segments with guard bytes around them."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvtier.disk.codecs import Codec
from kvtier.disk.codecs.raw import RawCodec
from kvtier.disk.codecs.split import Split16Codec, Split32Codec
from kvtier.disk.codecs.zstd import ZstdCodec

CODECS: tuple[Codec, ...] = (RawCodec(), ZstdCodec(1), ZstdCodec(7), Split16Codec(), Split32Codec())
GUARD = 0xA5
GUARD_BYTES = 3


def _floats(rng: np.random.Generator, length: int) -> npt.NDArray[np.float32]:
    scale = float(np.exp(rng.standard_normal()))
    return rng.standard_normal(length // 2 + 4).astype(np.float32) * np.float32(scale)


MAKERS: dict[str, Callable[[np.random.Generator, int], bytes]] = {
    "zeros": lambda _, length: bytes(length),
    "random": lambda rng, length: rng.bytes(length),
    "nan": lambda _, length: (b"\xc0\x7f\xff\xff\x01\xff" * (length // 6 + 1))[:length],
    "bf16": lambda rng, length: (_floats(rng, length).view(np.uint32) >> 16).astype("<u2").tobytes()[:length],
    "fp16": lambda rng, length: _floats(rng, length).astype(np.float16).tobytes()[:length],
    "fp32": lambda rng, length: _floats(rng, length).tobytes()[:length],
    "ramp": lambda _, length: (np.arange(length, dtype=np.uint32) // 7).astype(np.uint8).tobytes(),
    "half empty": lambda rng, length: rng.bytes(length // 2).ljust(length, b"\0"),
}


def payload(kind: str, length: int, seed: int = 0) -> bytes:
    """Return `length` bytes of a kind."""
    made = MAKERS[kind](np.random.default_rng(seed), length)
    assert len(made) == length
    return made


def cut(data: memoryview, lengths: Sequence[int]) -> list[memoryview]:
    """Return segments of the given lengths, and one more with what is left."""
    segments, start = [], 0
    for length in lengths:
        segments.append(data[start : start + length])
        start = min(start + length, len(data))
    return [*segments, data[start:]]


class Target:
    """Writable segments at odd offsets, with guard bytes around each."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._buffer = bytearray([GUARD]) * (sum(lengths) + GUARD_BYTES * (len(lengths) + 1))
        self.segments, start = [], GUARD_BYTES
        for length in lengths:
            self.segments.append(memoryview(self._buffer)[start : start + length])
            start += length + GUARD_BYTES

    def content(self) -> bytes:
        """Return what the segments hold."""
        return b"".join(self.segments)

    def check_guards(self) -> None:
        """Fail when something was written outside of the segments."""
        start = 0
        for segment in self.segments:
            assert self._buffer[start : start + GUARD_BYTES] == bytes([GUARD]) * GUARD_BYTES
            start += GUARD_BYTES + len(segment)
        assert self._buffer[start:] == bytes([GUARD]) * GUARD_BYTES


def encoded(codec: Codec, data: bytes) -> bytes:
    """Return the stored bytes of a payload that the codec takes."""
    pieces = codec.encode([memoryview(data)])
    assert pieces is not None
    return b"".join(pieces)
