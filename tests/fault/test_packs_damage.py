"""Damaged packs: a chunk is read as it was written or not at all, never as wrong bytes."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.core.stored import PackRecord
from kvtier.disk.base import ChunkRead, checksum_of
from kvtier.disk.packs.pack_tier import PackTier
from kvtier.errors import ChunkDamagedError, FormatVersionError, TierIOError
from tests.fakes.chunks import noise, payload_of, read_back, soft

DATA = [soft(3000, 1), noise(2000, 2), soft(5000, 3)]


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> tuple[PackTier, PackRecord, bytes]:
    tier = PackTier(tmp_path_factory.mktemp("packs"))
    record = tier.write_pack("ns", [payload_of(i, data) for i, data in enumerate(DATA)])
    return tier, record, path_of(tier, record).read_bytes()


def path_of(tier: PackTier, record: PackRecord) -> Path:
    return tier.directory / f"{record.pack_id}.kvpack"


def readable(tier: PackTier, record: PackRecord) -> list[bool]:
    """Say which chunks can be read; those that can are right."""
    result = []
    for chunk, data in zip(record.chunks, DATA, strict=True):
        try:
            assert read_back(tier, chunk) == data
            result.append(True)
        except ChunkDamagedError as exc:
            assert exc.key == chunk.key  # noqa: PT017 (either outcome is fine)
            result.append(False)
    return result


@settings(max_examples=150, deadline=None)
@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_costs_its_chunk_and_no_other(
    pack: tuple[PackTier, PackRecord, bytes], where: float, bit: int
) -> None:
    tier, record, original = pack
    start = record.chunks[0].offset
    position = start + int(where * (record.file_bytes - start))
    damaged = bytearray(original)
    damaged[position] ^= 1 << bit
    path_of(tier, record).write_bytes(damaged)
    hit = [chunk.offset <= position < chunk.offset + chunk.stored_bytes for chunk in record.chunks]
    # A few bits of a zstd frame do not matter to what it decodes to, hence >=.
    assert all(ok >= (not was_hit) for ok, was_hit in zip(readable(tier, record), hit, strict=True))
    if hit[1]:  # stored raw: each bit matters
        assert readable(tier, record) == [True, False, True]


@settings(max_examples=100, deadline=None)
@given(where=st.floats(0, 1, exclude_max=True))
def test_a_truncated_pack_keeps_the_chunks_before_the_cut(
    pack: tuple[PackTier, PackRecord, bytes], where: float
) -> None:
    tier, record, original = pack
    length = int(where * record.file_bytes)
    path_of(tier, record).write_bytes(original[:length])
    assert readable(tier, record) == [chunk.offset + chunk.stored_bytes <= length for chunk in record.chunks]
    with pytest.raises(ChunkDamagedError):
        tier.read_record(record.pack_id)


@settings(max_examples=150, deadline=None)
@given(position=st.integers(0, 4095), byte=st.integers(0, 255))
def test_a_damaged_header_never_crashes_its_reader(
    pack: tuple[PackTier, PackRecord, bytes], position: int, byte: int
) -> None:
    tier, record, original = pack
    damaged = bytearray(original)
    damaged[position] = byte
    path_of(tier, record).write_bytes(damaged)
    try:
        rebuilt = tier.read_record(record.pack_id)
    except (ChunkDamagedError, FormatVersionError):
        return
    for chunk in rebuilt.chunks:  # whatever the header says now, payloads are right or refused
        try:
            assert read_back(tier, chunk) in DATA
        except ChunkDamagedError:
            continue


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.unlink(),
        lambda path: path.write_bytes(os.urandom(path.stat().st_size)),
        lambda path: path.write_bytes(bytes(path.stat().st_size)),
    ],
    ids=["empty", "missing", "noise", "zeros"],
)
def test_a_lost_pack_is_damage(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    tier = PackTier(tmp_path)
    record = tier.write_pack("ns", [payload_of(i, data) for i, data in enumerate(DATA)])
    damage(path_of(tier, record))
    assert readable(tier, record) == [False, False, False]
    with pytest.raises(ChunkDamagedError):
        tier.read_record(record.pack_id)


def test_chunks_of_one_pack_are_not_taken_for_each_other(tmp_path: Path) -> None:
    tier = PackTier(tmp_path)
    first, second = (tier.write_pack("ns", [payload_of(1, noise(2000, seed))]) for seed in (1, 2))
    path_of(tier, first).rename(path_of(tier, second))
    with pytest.raises(ChunkDamagedError, match="has checksum"):
        read_back(tier, second.chunks[0])


@pytest.mark.parametrize("expected_bytes", [1000, 3000])
def test_a_frame_of_another_length_is_damage_even_where_the_checksum_agrees(
    tmp_path: Path, expected_bytes: int
) -> None:
    """The buffer holds leftovers that complete a short payload; a long one starts with the right bytes."""
    tier, data = PackTier(tmp_path), soft(3000)
    chunk = tier.write_pack("ns", [payload_of(1, data[:2000])]).chunks[0]
    buffer = bytearray(data[:expected_bytes])
    wrong = chunk._replace(raw_bytes=expected_bytes, checksum=checksum_of([memoryview(buffer)]))
    with pytest.raises(ChunkDamagedError, match=f"cannot be decoded.*payload has {expected_bytes}"):
        tier.read_chunk(wrong, [memoryview(buffer)])


def test_every_flipped_bit_of_a_header_is_noticed(tmp_path: Path) -> None:
    """Version 1 had no checksum of the header: a bit in a key gave its chunk's bytes to another key on a rebuild."""
    tier = PackTier(tmp_path)
    record = tier.write_pack("ns", [payload_of(1, soft(3000))])
    header = path_of(tier, record).read_bytes()[: record.chunks[0].offset]
    with path_of(tier, record).open("r+b", buffering=0) as pack:
        for position, byte in enumerate(header):
            os.pwrite(pack.fileno(), bytes([byte ^ 1 << position % 8]), position)
            with pytest.raises((ChunkDamagedError, FormatVersionError)):
                tier.read_record(record.pack_id)
            os.pwrite(pack.fileno(), bytes([byte]), position)
    assert tier.read_record(record.pack_id) == record


def test_a_batch_over_damaged_packs_loses_what_is_damaged_only(tmp_path: Path) -> None:
    tier = PackTier(tmp_path)
    records = [tier.write_pack("ns", [payload_of(i, data) for i, data in enumerate(DATA)]) for _ in range(6)]
    paths = [path_of(tier, record) for record in records]
    paths[0].unlink()
    os.truncate(paths[1], records[1].chunks[1].offset + 5)
    os.truncate(paths[2], 0)
    flipped = bytearray(paths[3].read_bytes())
    flipped[records[3].chunks[1].offset + 7] ^= 4
    paths[3].write_bytes(flipped)
    paths[4].write_bytes(bytes(records[4].file_bytes))
    reads = [
        ChunkRead(chunk=chunk, into=[memoryview(bytearray(chunk.raw_bytes))])
        for record in records
        for chunk in record.chunks
    ]
    good: list[bool] = []

    def done(read: ChunkRead, error: ChunkDamagedError | TierIOError | None) -> None:
        assert read is reads[len(good)]
        assert error is not None or bytes(read.into[0]) == DATA[len(good) % 3]
        assert not isinstance(error, TierIOError)
        good.append(error is None)

    tier.read_chunks(reads, done, lambda: False)
    assert good == [False] * 3 + [True, False, False] + [False] * 3 + [True, False, True] + [False] * 3 + [True] * 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"offset": 0},
        {"offset": 2**62},
        {"stored_bytes": 2**40 - 1},
        {"stored_bytes": 0},
        {"pack_id": "../../etc/passwd"},
    ],
    ids=str,
)
def test_a_row_that_makes_no_sense_is_a_damaged_chunk(tmp_path: Path, wrong: dict[str, Any]) -> None:
    """Rows come from a file too. Neither the process's memory nor another file may pay for a wrong one."""
    tier = PackTier(tmp_path)
    first, second, third = tier.write_pack("ns", [payload_of(i, data) for i, data in enumerate(DATA)]).chunks
    chunks = [first, second._replace(**wrong), third]
    outcomes: list[type[Exception] | None] = []
    reads = [ChunkRead(chunk=chunk, into=[memoryview(bytearray(chunk.raw_bytes))]) for chunk in chunks]
    tier.read_chunks(reads, lambda _, error: outcomes.append(type(error) if error else None), lambda: False)
    assert outcomes == [None, ChunkDamagedError, None]
    with pytest.raises(ChunkDamagedError):
        tier.rewrite_pack("ns", chunks)
    assert len(list(tmp_path.iterdir())) == 1
