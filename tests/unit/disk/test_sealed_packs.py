"""Sealed packs: a chunk is what was sealed for its place, or a miss; without the key it stays and is a miss."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtier.core.stored import PackRecord, StoredChunk
from kvtier.disk.base import ChunkRead
from kvtier.disk.codecs import CodecChooser
from kvtier.disk.codecs.zstd import ZstdCodec
from kvtier.disk.packs import chunk_seals
from kvtier.disk.packs.pack_format import reserve_bytes
from kvtier.disk.packs.pack_reading import OPEN_LATE_MAX_BYTES
from kvtier.disk.packs.pack_tier import PackTier
from kvtier.errors import ChunkDamagedError, ChunkSealedError, ChunkTamperedError
from kvtier.obs.counters import Counters
from kvtier.sealing import Key, KeyRing
from tests.fakes.chunks import key_of, noise, payload_of, read_back, soft, split
from tests.fakes.keys import key_of_id, seals_of

DATA = [soft(3000, 1), noise(2000, 2), noise(2000, 3), b"x"]


def tier_in(folder: Path, *key_ids: str, counters: Counters | None = None, **options: Any) -> PackTier:
    return PackTier(folder, seals=seals_of(*key_ids, counters=counters), **options)


def written(tier: PackTier, data: Sequence[bytes] = DATA) -> PackRecord:
    return tier.write_pack("ns", [payload_of(number, each) for number, each in enumerate(data)])


def test_nothing_of_a_payload_is_in_the_file_and_the_header_says_which_key(tmp_path: Path) -> None:
    tier = tier_in(tmp_path, "k1")
    record = tier.write_pack("ns", [payload_of(number, each) for number, each in enumerate(DATA)], compressed=False)
    content = (tmp_path / f"{record.pack_id}.kvpack").read_bytes()
    assert [data[start : start + 16] in content for data in DATA[:3] for start in range(0, 1900, 100)] == [False] * 57
    name = key_of_id("k1").name
    assert f'"kvtier.key":"{name}"'.encode() in content
    assert b'"kvtier.format":"3"' in content
    assert key_of_id("k1").secret not in content
    assert {chunk.codec for chunk in record.chunks} == {f"raw@{name}"}
    assert record == tier.read_record(record.pack_id)
    assert record == tier_in(tmp_path).read_record(record.pack_id), "a header needs no key"
    assert record.sealed_by == name


def test_a_sealed_pack_fits_what_was_reserved_for_it(tmp_path: Path) -> None:
    tier = tier_in(tmp_path, "longest-id-there")
    for data in (noise(100), noise(10), b""):
        record = written(tier, [data] * 700)
        sizes = [(chunk.key, chunk.raw_bytes) for chunk in record.chunks]
        most = reserve_bytes("ns", sizes, tier.writes_with) + sum(num_bytes + 16 for _, num_bytes in sizes)
        assert record.file_bytes <= most
        assert [read_back(tier, chunk) for chunk in record.chunks] == [data] * 700


@pytest.mark.parametrize("direct", [True, False])
def test_any_flipped_byte_is_a_miss_and_never_other_bytes(tmp_path: Path, direct: bool) -> None:
    counters = Counters()
    tier = tier_in(tmp_path, "k1", counters=counters, direct_reads=direct, codecs=CodecChooser([ZstdCodec()]))
    record = written(tier, [soft(300), noise(40)])
    path = tmp_path / f"{record.pack_id}.kvpack"
    good = path.read_bytes()
    num_flipped = 0
    for chunk in record.chunks:
        for place in range(chunk.offset, chunk.offset + chunk.stored_bytes):
            data = bytearray(good)
            data[place] ^= 1 << place % 8
            path.write_bytes(data)
            num_flipped += 1
            with pytest.raises(ChunkTamperedError) as caught:
                read_back(tier, chunk)
            assert (caught.value.path, caught.value.key) == (path, chunk.key)
            other = next(each for each in record.chunks if each is not chunk)
            assert len(read_back(tier, other)) == other.raw_bytes
    assert counters.tampered_chunks == num_flipped
    assert counters.key_missing_reads == 0
    path.write_bytes(good)
    assert [read_back(tier, chunk) for chunk in record.chunks] == [soft(300), noise(40)]


def forged(chunk: StoredChunk, other: StoredChunk) -> dict[str, StoredChunk]:
    """Return rows that lie about a chunk, as who can write to the ledger could have them."""
    return {
        "place": chunk._replace(offset=other.offset, stored_bytes=other.stored_bytes),
        "key": chunk._replace(key=other.key),
        "pack": chunk._replace(pack_id="e" * 32),
        "codec": chunk._replace(codec=f"zstd@{chunk.sealed_by}"),
        "key's name": chunk._replace(codec=f"raw@{key_of_id('k2').name}"),
        "seal": chunk._replace(codec="raw"),
        "length": chunk._replace(stored_bytes=chunk.stored_bytes - 1),
        "no bytes": chunk._replace(stored_bytes=3),
        "payload": chunk._replace(raw_bytes=chunk.raw_bytes - 1),
    }


@pytest.mark.parametrize("what", forged(*[StoredChunk(key_of(1), "a" * 32, 0, 99, 83, "raw@k", 0)] * 2))
def test_a_chunk_is_bound_to_its_place_its_key_its_pack_and_its_codec(tmp_path: Path, what: str) -> None:
    tier = tier_in(tmp_path, "k1", "k2")
    first, second = written(tier, [noise(500, 1), noise(500, 2)]).chunks
    shutil.copyfile(tmp_path / f"{first.pack_id}.kvpack", tmp_path / f"{'e' * 32}.kvpack")
    lie = forged(first, second)[what]
    with pytest.raises(ChunkDamagedError):
        tier.read_chunk(lie, [memoryview(bytearray(lie.raw_bytes))])
    with pytest.raises(ChunkDamagedError):
        tier.rewrite_pack("ns", [lie])


def test_a_chunk_that_a_batch_wants_twice_comes_twice_however_its_segments_lie(tmp_path: Path) -> None:
    """One that opens straight into its segment was taken for tampered, where another read of it had opened it."""
    counters = Counters()
    tier = tier_in(tmp_path, "k1", counters=counters)
    record = written(tier)
    buffers = [bytearray(chunk.raw_bytes) for chunk in record.chunks for _ in range(3)]
    cut = [split(memoryview(buffer), cuts) for buffer, cuts in zip(buffers, [(1,), (), (0,)] * 4, strict=True)]
    wanted = [chunk for chunk in record.chunks for _ in range(3)]
    errors: list[object] = []
    reads = [ChunkRead(chunk=chunk, into=into) for chunk, into in zip(wanted, cut, strict=True)]
    tier.read_chunks(reads, lambda _, error: errors.append(error), lambda: False)
    assert errors == [None] * 12
    assert buffers == [each for each in DATA for _ in range(3)]
    assert counters.tampered_chunks == 0


def test_in_one_batch_short_and_long_compressed_chunks_open_and_a_flipped_byte_costs_one(tmp_path: Path) -> None:
    """Short ones are opened by the thread that decodes, long ones ahead of it; a span may hold both, and raw ones."""
    tier = tier_in(tmp_path, "k1", codecs=CodecChooser([ZstdCodec()]))
    data = [soft(200_000, 1), soft(200_000, 2), *(soft(3000, seed) for seed in range(3, 8)), noise(2000, 9)]
    data += [soft(OPEN_LATE_MAX_BYTES + 1, seed) for seed in range(60)]
    record = written(tier, data)
    assert {chunk.codec_name for chunk in record.chunks} == {"zstd", "raw"}
    path = tmp_path / f"{record.pack_id}.kvpack"
    content = bytearray(path.read_bytes())
    for damaged in (0, 4, 7, 50):
        changed = bytearray(content)
        changed[record.chunks[damaged].offset + 20] ^= 1
        path.write_bytes(changed)
        buffers = [bytearray(chunk.raw_bytes) for chunk in record.chunks]
        errors: list[Exception | None] = []
        reads = [
            ChunkRead(chunk=chunk, into=[memoryview(into)]) for chunk, into in zip(record.chunks, buffers, strict=True)
        ]
        tier.read_chunks(reads, lambda _, error: errors.append(error), lambda: False)  # noqa: B023
        assert [type(error) for error in errors] == [
            ChunkTamperedError if number == damaged else type(None) for number in range(len(data))
        ]
        assert [bytes(buffer) for buffer in buffers if buffer is not buffers[damaged]] == [
            each for number, each in enumerate(data) if number != damaged
        ]
        with pytest.raises(ChunkTamperedError):
            tier.rewrite_pack("ns", record.chunks)


def test_chunks_that_are_swapped_do_not_open(tmp_path: Path) -> None:
    tier = tier_in(tmp_path, "k1")
    record = written(tier, [noise(500, 1), noise(500, 2)])
    path, (first, second) = tmp_path / f"{record.pack_id}.kvpack", record.chunks
    data = path.read_bytes()
    start, end = data[first.offset : second.offset], data[second.offset :]
    path.write_bytes(data[: first.offset] + end + start)
    for chunk in record.chunks:
        with pytest.raises(ChunkTamperedError):
            read_back(tier, chunk)


def test_without_the_key_a_chunk_is_a_miss_that_is_no_damage(tmp_path: Path) -> None:
    record, counters = written(tier_in(tmp_path, "k1")), Counters()
    for tier in (tier_in(tmp_path, "k2", counters=counters), tier_in(tmp_path, counters=counters)):
        assert not tier.can_open(record.sealed_by)
        with pytest.raises(ChunkSealedError, match=r"key .k1.*disk\.key_file") as caught:
            read_back(tier, record.chunks[0])
        assert caught.value.name == key_of_id("k1").name
        with pytest.raises(ChunkSealedError):
            tier.rewrite_pack("ns", record.chunks)
    assert counters.key_missing_reads >= 4, "a rewrite reads ahead"
    assert counters.tampered_chunks == 0


def test_another_key_of_the_same_id_is_a_missing_key(tmp_path: Path) -> None:
    """Not damage: chunks that are damaged are dropped."""
    record = written(tier_in(tmp_path, "k1"))
    wrong = chunk_seals.ChunkSeals(KeyRing([Key("k1", bytes(32))]))
    with pytest.raises(ChunkSealedError):
        read_back(PackTier(tmp_path, seals=wrong), record.chunks[0])


def test_plain_and_sealed_packs_are_read_side_by_side_and_copied_into_one(tmp_path: Path) -> None:
    plain = written(PackTier(tmp_path), DATA[:2])
    old = tier_in(tmp_path, "old").write_pack("ns", [payload_of(2, DATA[2]), payload_of(3, DATA[3])])
    tier = tier_in(tmp_path, "new", "old")
    chunks = [*plain.chunks, *old.chunks]
    assert [read_back(tier, chunk) for chunk in chunks] == DATA
    copy = tier.rewrite_pack("ns", chunks)
    assert {chunk.sealed_by for chunk in copy.chunks} == {key_of_id("new").name}
    assert [chunk.opened()[3:] for chunk in copy.chunks] == [chunk.opened()[3:] for chunk in chunks]
    assert [read_back(tier_in(tmp_path, "new"), chunk) for chunk in copy.chunks] == DATA


def test_plain_packs_are_written_as_before(tmp_path: Path) -> None:
    record = written(PackTier(tmp_path))
    content = (tmp_path / f"{record.pack_id}.kvpack").read_bytes()
    assert b'"kvtier.format":"2"' in content
    assert b"kvtier.key" not in content
    assert record.sealed_by == ""


def test_no_nonce_comes_twice_under_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sealed again, of the same chunks, is sealed under another key, at other places."""
    used: list[tuple[str, int]] = []

    class Recorded(chunk_seals.PackSeal):
        def __init__(self, key: Key, pack_id: str) -> None:
            super().__init__(key, pack_id)
            self.pack_id = pack_id

        def seal(self, chunk: StoredChunk, pieces: Sequence[memoryview], offset: int) -> tuple[StoredChunk, memoryview]:
            used.append((self.pack_id, offset))
            return super().seal(chunk, pieces, offset)

    monkeypatch.setattr(chunk_seals, "PackSeal", Recorded)
    tier = tier_in(tmp_path, "k1")
    records = [written(tier, [b"", b"", *DATA]) for _ in range(5)]
    for record in records:
        tier.rewrite_pack("ns", record.chunks)
    assert len(used) == len(set(used)) == 60
    seal = chunk_seals.PackSeal(key_of_id("k1"), "a" * 32)
    seal.seal(records[0].chunks[0].opened(), [memoryview(b"a")], 4096)
    with pytest.raises(AssertionError, match="sealed for once"):
        seal.seal(records[0].chunks[0].opened(), [memoryview(b"b")], 4096)
