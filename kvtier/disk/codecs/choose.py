"""Which codec a chunk gets: by measured gain, since nothing tells the disk tier what its bytes mean."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.disk.codecs.base import MIN_GAIN_RATIO, Codec
from kvtier.disk.codecs.planes import PlaneCodec
from kvtier.disk.codecs.raw import RawCodec
from kvtier.disk.codecs.split import Split16Codec, Split32Codec
from kvtier.disk.codecs.zstd import ZstdCodec
from kvtier.errors import KvtierError

Encoded = tuple[str, Sequence[memoryview]]


class UnknownCodecError(KvtierError):
    """Stored bytes name a codec that this kvtier does not have."""

    def __init__(self, name: str) -> None:
        super().__init__(f"codec {name!r} is unknown, this kvtier has {', '.join(_BY_NAME)}; upgrade kvtier")
        self.name = name


def default_codecs() -> tuple[Codec, ...]:
    """Return every codec. Their order only breaks ties."""
    return (RawCodec(), Split32Codec(), Split16Codec(), ZstdCodec())


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
    """What is known about the chunks of one namespace and group; `costs` are the codecs', raw first, as sampled."""

    winner: int = 0
    num_chunks: int = 0
    costs: list[float] = field(default_factory=list)


class CodecChooser:
    """Encodes chunks with the codec that paid for chunks like them.

    The first chunks of a stream, and then one of `sample_every`, are encoded with every codec; the others with the
    winner only. A codec's cost is the bytes it stores, and a price for each payload byte that has to be entropy
    decoded: so of two that store nearly the same, the faster one wins. Where it gains less than `MIN_GAIN_RATIO`, its
    cost is that of `raw`. No clock is read: the same chunks in the same order get the same codecs everywhere.
    Thread-safe.

    Args:
        codecs: The candidates; `raw` is one whether it is named or not.
        first_samples: A stream's first chunks to be sampled.
        sample_every: Then one of this many. A sample costs all encoders, about five times the winner.
        max_streams: The least recently used is forgotten beyond that, and sampled again.
    """

    def __init__(
        self,
        codecs: Sequence[Codec],
        *,
        first_samples: int = 2,
        sample_every: int = 64,
        max_streams: int = 1024,
    ) -> None:
        self._codecs: list[Codec] = [RawCodec(), *(codec for codec in codecs if codec.name != RawCodec.name)]
        self._first_samples, self._sample_every, self._max_streams = first_samples, sample_every, max_streams
        self._streams: OrderedDict[str, _Stream] = OrderedDict()
        self._lock = threading.Lock()  # protects _streams and what is in it; never held while encoding

    def encode(self, stream: str, segments: Sequence[memoryview]) -> Encoded:
        """Return codec name and stored pieces of a chunk; they are never longer than the payload.

        Args:
            stream: Names what has bytes of one kind: namespace and group.
            segments: The payload, as `Codec.encode` takes it. Pieces may be views of it.
        """
        winner = self._next(stream)
        if winner is None:
            return self._sample(stream, segments)
        _, encoded = _encode(self._codecs[winner], segments)
        return encoded

    def _next(self, stream: str) -> int | None:
        """Return the winner's position, None when this chunk is a sample."""
        with self._lock:
            state = self._streams.setdefault(stream, _Stream())
            self._streams.move_to_end(stream)
            if len(self._streams) > self._max_streams:
                self._streams.popitem(last=False)
            state.num_chunks += 1
            number = state.num_chunks - self._first_samples
            # Two threads may begin a stream at once: without costs there is no winner yet.
            sampled = number <= 0 or number % self._sample_every == 0 or not state.costs
            return None if sampled else state.winner

    def _sample(self, stream: str, segments: Sequence[memoryview]) -> Encoded:
        """Encode with every codec, and learn. Older samples count half as much each time."""
        costs: list[float] = []
        best: Encoded = (RawCodec.name, segments)
        for codec in self._codecs:
            cost, encoded = _encode(codec, segments)
            if costs and cost < min(costs):
                best = encoded
            costs.append(cost)
        with self._lock:
            state = self._streams.get(stream)
            if state is not None:  # not forgotten meanwhile
                before = state.costs or [0.0] * len(costs)
                state.costs = [old / 2 + new for old, new in zip(before, costs, strict=True)]
                state.winner = state.costs.index(min(state.costs))
        return best


def _encode(codec: Codec, segments: Sequence[memoryview]) -> tuple[float, Encoded]:
    """Return the cost of a chunk with a codec, and the chunk: raw where that gains too little."""
    raw_bytes = sum(segment.nbytes for segment in segments)
    pieces = codec.encode(segments)
    stored_bytes = raw_bytes if pieces is None else sum(piece.nbytes for piece in pieces)
    if pieces is None or stored_bytes > (1 - MIN_GAIN_RATIO) * raw_bytes:
        return raw_bytes, (RawCodec.name, segments)
    coded_bytes = codec.coded_bytes(pieces, raw_bytes) if isinstance(codec, PlaneCodec) else raw_bytes
    return stored_bytes + MIN_GAIN_RATIO * coded_bytes, (codec.name, pieces)
