"""The chooser takes the codec that measured best, samples seldom, and forgets what it must."""

import threading
from collections.abc import Sequence

import pytest

from kvtier.disk.codecs import Codec, CodecChooser, UnknownCodecError, codec_by_name, default_codecs
from kvtier.errors import KvtierError
from tests.unit.disk.codecs.payloads import payload

LENGTH = 300_000


class CountingCodec:
    """Resources a share of the payload, and counts."""

    def __init__(self, name: str, share: float) -> None:
        self.name, self.share, self.calls = name, share, 0

    def encode(self, segments: Sequence[memoryview]) -> Sequence[memoryview] | None:
        self.calls += 1
        return [memoryview(bytes(int(len(segments[0]) * self.share)))]

    def decode(self, stored: memoryview, into: Sequence[memoryview]) -> None:
        raise NotImplementedError


def chosen(chooser: CodecChooser, data: bytes, stream: str = "ns/0") -> str:
    """Return the codec's name, having checked that the chunk comes back."""
    name, pieces = chooser.encode(stream, [memoryview(data)])
    stored = b"".join(pieces)
    assert len(stored) <= len(data)
    out = bytearray(len(data))
    codec_by_name(name).decode(memoryview(stored), [memoryview(out)])
    assert out == data
    return name


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("bf16", "split16"),
        ("fp16", "split16"),
        ("fp32", "split32"),
        ("random", "raw"),
        ("zeros", "zstd"),
    ],
)
def test_each_kind_of_bytes_gets_its_codec(kind: str, name: str) -> None:
    chooser = CodecChooser(default_codecs())
    assert [chosen(chooser, payload(kind, LENGTH, seed)) for seed in range(5)] == [name] * 5


def test_bytes_in_which_every_plane_is_coded_go_to_zstd() -> None:
    """fp8 KV once went to split32: within 3 % of zstd's length, which it takes longer to decode."""
    skewed = bytes(payload("random", LENGTH)).translate(bytes(min(255, n // 2) for n in range(256)))
    assert chosen(CodecChooser(default_codecs()), skewed) == "zstd"


def test_only_samples_pay_for_every_codec() -> None:
    good, bad = CountingCodec("good", 0.5), CountingCodec("bad", 0.9)
    chooser = CodecChooser([bad, good], first_samples=2, sample_every=10)
    names = [chooser.encode("s", [memoryview(bytes(1000))])[0] for _ in range(32)]
    assert names == ["good"] * 32
    assert (good.calls, bad.calls) == (32, 2 + 3)


@pytest.mark.parametrize(("share", "name"), [(0.9, "good"), (0.975, "raw"), (1.0, "raw"), (1.2, "raw")])
def test_under_three_per_cent_it_is_raw(share: float, name: str) -> None:
    chooser = CodecChooser([CountingCodec("good", share)], first_samples=1)
    assert [chooser.encode("s", [memoryview(bytes(10_000))])[0] for _ in range(3)] == [name] * 3


def test_a_chunk_that_the_winner_does_not_shorten_is_raw() -> None:
    chooser = CodecChooser(default_codecs(), first_samples=1)
    assert chosen(chooser, payload("bf16", LENGTH)) == "split16"
    assert chosen(chooser, payload("random", LENGTH)) == "raw"
    assert chosen(chooser, payload("bf16", LENGTH)) == "split16"


def test_a_chunk_of_odd_length_is_raw_when_the_winner_cannot_take_it() -> None:
    chooser = CodecChooser(default_codecs(), first_samples=1)
    assert chosen(chooser, payload("bf16", LENGTH)) == "split16"
    assert chosen(chooser, payload("bf16", LENGTH + 1)) == "raw"


def test_a_stream_that_changes_gets_another_codec() -> None:
    chooser = CodecChooser(default_codecs(), first_samples=1, sample_every=4)
    assert chosen(chooser, payload("fp32", LENGTH)) == "split32"
    assert [chosen(chooser, payload("bf16", LENGTH)) for _ in range(20)][-1] == "split16"


def test_streams_do_not_mix() -> None:
    chooser = CodecChooser(default_codecs(), first_samples=1)
    for _ in range(3):
        assert chosen(chooser, payload("bf16", LENGTH), "ns/0") == "split16"
        assert chosen(chooser, payload("fp32", LENGTH), "ns/1") == "split32"


def test_memory_is_bounded_and_a_forgotten_stream_is_sampled_again() -> None:
    good, bad = CountingCodec("good", 0.5), CountingCodec("bad", 0.9)
    chooser = CodecChooser([good, bad], first_samples=1, max_streams=2)
    for stream in ("a", "b", "c", "b", "a"):
        chooser.encode(stream, [memoryview(bytes(100))])
    assert bad.calls == 4  # only the second "b" was remembered


def test_threads_share_a_chooser() -> None:
    chooser = CodecChooser(default_codecs(), sample_every=3)
    names: list[str] = []

    def work(seed: int) -> None:
        names.extend(chosen(chooser, payload("bf16", LENGTH, seed + turn)) for turn in range(6))

    threads = [threading.Thread(target=work, args=(10 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert names == ["split16"] * 24


def test_names_are_short_ascii_and_known() -> None:
    codecs: tuple[Codec, ...] = default_codecs()
    assert {codec.name for codec in codecs} == {"raw", "zstd", "split16", "split32"}
    for codec in codecs:
        assert len(codec.name.encode("ascii")) <= 16
        assert codec_by_name(codec.name).name == codec.name


def test_an_unknown_codec_is_named() -> None:
    with pytest.raises(UnknownCodecError, match=r"'split64' is unknown.*upgrade") as raised:
        codec_by_name("split64")
    assert isinstance(raised.value, KvtierError)
