"""Which codec a chunk gets: by measured gain, since nothing tells the disk tier what its bytes mean."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.errors import KvtierError
from kvtier.tiers.codecs.base import Codec
from kvtier.tiers.codecs.raw import RawCodec
from kvtier.tiers.codecs.split16 import Split16Codec
from kvtier.tiers.codecs.split32 import Split32Codec
from kvtier.tiers.codecs.zstd import ZstdCodec

MIN_GAIN_RATIO = 0.03
"""A codec must store this much less than a faster one, raw included: else the faster decoding is worth more."""
FIRST_SAMPLES = 2
SAMPLE_EVERY = 64
"""A sample costs all encoders, about five times the winner: one in 64 is a few per cent."""
MAX_STREAMS = 1024
_DECAY = 0.5

Encoded = tuple[str, Sequence[memoryview]]


class UnknownCodecError(KvtierError):
    """Stored bytes name a codec that this kvtier does not have."""

    def __init__(self, name: str) -> None:
        super().__init__(f"codec {name!r} is unknown, this kvtier has {', '.join(_BY_NAME)}; upgrade kvtier")
        self.name = name


def default_codecs(zstd_level: int = 1) -> tuple[Codec, ...]:
    """Return every codec, fastest to decode first (docs/adr/0008-codecs.md has the measurement).

    Args:
        zstd_level: For `zstd`, 1..22.
    """
    return (RawCodec(), Split32Codec(), Split16Codec(), ZstdCodec(zstd_level))


_BY_NAME: dict[str, Codec] = {codec.name: codec for codec in default_codecs()}


def codec_by_name(name: str) -> Codec:
    """Return the codec that decodes what was stored under a name.

    Raises:
        UnknownCodecError: A newer kvtier wrote it.
    """
    codec = _BY_NAME.get(name)
    if codec is None:
        raise UnknownCodecError(name)
    return codec


@dataclass
class _Stream:
    """What is known about the chunks of one namespace and group."""

    winner: int = 0
    num_chunks: int = 0
    stored_bytes: list[float] = field(default_factory=list)


class CodecChooser:
    """Encodes chunks with the codec that paid for chunks like them.

    The first chunks of a stream, and then one of `sample_every`, are encoded with every codec; the others with the
    winner only. The rule, in samples and for each single chunk: going from the fastest codec to the slowest, a codec
    takes over when it stores at least `MIN_GAIN_RATIO` less than the one before it. The same chunks in the same order
    get the same codecs, on every machine: no clock is read. Thread-safe.
    """

    def __init__(
        self,
        codecs: Sequence[Codec],
        *,
        first_samples: int = FIRST_SAMPLES,
        sample_every: int = SAMPLE_EVERY,
        max_streams: int = MAX_STREAMS,
    ) -> None:
        """Choose among codecs.

        Args:
            codecs: Fastest to decode first, without `raw`, or with it at the front.
            first_samples: A stream's first chunks to be sampled.
            sample_every: Then one of so many.
            max_streams: The least recently used is forgotten beyond that, and sampled anew.
        """
        self._raw: Codec = RawCodec()
        self._codecs = [codec for codec in codecs if codec.name != self._raw.name]
        self._first_samples, self._sample_every, self._max_streams = first_samples, sample_every, max_streams
        self._streams: OrderedDict[str, _Stream] = OrderedDict()
        self._lock = threading.Lock()  # protects _streams and what is in it; never held while encoding

    def encode(self, stream: str, segments: Sequence[memoryview]) -> Encoded:
        """Return codec name and stored pieces of a chunk; they are never longer than the payload.

        Args:
            stream: Names what has bytes of one kind: namespace and group.
            segments: The payload, as `Codec.encode` takes it. Pieces may be views of it.
        """
        raw_bytes = sum(segment.nbytes for segment in segments)
        winner = self._next(stream)
        if winner is None:
            return self._sample(stream, segments, raw_bytes)
        if winner == 0:
            return self._raw.name, segments
        codec = self._codecs[winner - 1]
        pieces = codec.encode(segments)
        if pieces is None or not _pays(_length(pieces), raw_bytes):
            return self._raw.name, segments
        return codec.name, pieces

    def _next(self, stream: str) -> int | None:
        """Return the winner's position (0 is raw), None when this chunk is a sample."""
        with self._lock:
            state = self._streams.setdefault(stream, _Stream())
            self._streams.move_to_end(stream)
            if len(self._streams) > self._max_streams:
                self._streams.popitem(last=False)
            state.num_chunks += 1
            number = state.num_chunks - self._first_samples
            sampled = number <= 0 or number % self._sample_every == 0 or not state.stored_bytes
            return None if sampled else state.winner

    def _sample(self, stream: str, segments: Sequence[memoryview], raw_bytes: int) -> Encoded:
        best: Encoded = (self._raw.name, segments)
        best_bytes, stored_bytes = raw_bytes, [raw_bytes]
        for codec in self._codecs:
            pieces = codec.encode(segments)
            length = raw_bytes if pieces is None else _length(pieces)
            stored_bytes.append(length)
            if pieces is not None and _pays(length, best_bytes):
                best, best_bytes = (codec.name, pieces), length
        self._learn(stream, stored_bytes)
        return best

    def _learn(self, stream: str, stored_bytes: Sequence[int]) -> None:
        with self._lock:
            state = self._streams.get(stream)
            if state is None:  # forgotten meanwhile
                return
            before = state.stored_bytes or [0.0] * len(stored_bytes)
            state.stored_bytes = [_DECAY * old + new for old, new in zip(before, stored_bytes, strict=True)]
            state.winner = _winner(state.stored_bytes)


def _winner(stored_bytes: Sequence[float]) -> int:
    winner = 0
    for position, length in enumerate(stored_bytes):
        if _pays(length, stored_bytes[winner]):
            winner = position
    return winner


def _pays(length: float, than: float) -> bool:
    return length <= (1 - MIN_GAIN_RATIO) * than and length < than


def _length(pieces: Sequence[memoryview]) -> int:
    return sum(piece.nbytes for piece in pieces)
