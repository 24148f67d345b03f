"""The pack tier beyond its contract: files, names, codec, and what other tools see."""

import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors import safe_open

from kvtier.errors import ChunkDamagedError, InvalidArgumentError, TierIOError
from kvtier.tiers.file_ops import FileOps
from kvtier.tiers.packs import PackTier
from tests.fakes.chunks import key_of, noise, payload_of, read_back, soft


@pytest.fixture
def tier(tmp_path: Path) -> PackTier:
    return PackTier(tmp_path / "state" / "packs")


def path_of(tier: PackTier, pack_id: str) -> Path:
    return tier.directory / f"{pack_id}.kvpack"


def test_safetensors_reads_a_pack(tier: PackTier) -> None:
    data = noise(5000)
    record = tier.write_pack("ns-1", [payload_of(1, data), payload_of(2, soft(5000))])
    with safe_open(path_of(tier, record.pack_id), framework="np") as pack:
        metadata = pack.metadata()
        assert set(pack.keys()) == {key_of(1).hex(), key_of(2).hex()}
        assert pack.get_tensor(key_of(1).hex()).tobytes() == data
        assert pack.get_tensor(key_of(2).hex()).shape == (record.chunks[1].stored_bytes,)
    assert metadata["kvtier.format"] == "2"
    assert metadata["kvtier.namespace"] == "ns-1"
    facts = json.loads(metadata["kvtier.chunks"])
    assert [facts[key_of(i).hex()]["codec"] for i in (1, 2)] == ["raw", "zstd"]


def test_a_pack_describes_itself(tier: PackTier) -> None:
    record = tier.write_pack("ns", [payload_of(i, soft(3000, i)) for i in range(50)])
    assert tier.read_record(record.pack_id) == record


def test_read_record_of_a_missing_or_empty_pack_is_damage(tier: PackTier) -> None:
    for pack_id in ("0" * 32, "1" * 32):
        if pack_id[0] == "1":
            path_of(tier, pack_id).touch()
        with pytest.raises(ChunkDamagedError):
            tier.read_record(pack_id)


@pytest.mark.parametrize(("data", "codec"), [(soft(10_000), "zstd"), (noise(10_000), "raw"), (b"a", "raw")])
def test_zstd_is_kept_only_where_it_gains(tier: PackTier, data: bytes, codec: str) -> None:
    chunk = tier.write_pack("ns", [payload_of(1, data)]).chunks[0]
    assert chunk.codec == codec
    assert chunk.stored_bytes <= chunk.raw_bytes


def test_chunks_lie_back_to_back_from_a_page_on(tier: PackTier) -> None:
    record = tier.write_pack("ns", [payload_of(i, soft(1000, i)) for i in range(5)])
    offset = record.chunks[0].offset
    assert offset % 4096 == 0
    for chunk in record.chunks:
        assert chunk.offset == offset
        offset += chunk.stored_bytes
    assert record.file_bytes == offset == path_of(tier, record.pack_id).stat().st_size


def test_only_the_owner_can_read_packs(tier: PackTier) -> None:
    record = tier.write_pack("ns", [payload_of(1, soft(100))])
    assert stat.S_IMODE(tier.directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(path_of(tier, record.pack_id).stat().st_mode) == 0o600


def test_sweep_removes_temporary_files_and_orphans_only(tier: PackTier) -> None:
    kept, orphan = (tier.write_pack("ns", [payload_of(1, soft(100))]) for _ in range(2))
    temp, foreign = tier.directory / f"{'c' * 32}.kvpack.tmp", tier.directory / "notes.kvpack"
    temp.touch()
    foreign.touch()
    assert set(tier.sweep([kept.pack_id])) == {f"{orphan.pack_id}.kvpack", temp.name}
    assert set(tier.directory.iterdir()) == {path_of(tier, kept.pack_id), foreign}


@pytest.mark.parametrize("pack_id", ["", "../../etc/passwd", "A" * 32, "0" * 31])
def test_a_pack_id_is_never_a_path(tier: PackTier, pack_id: str) -> None:
    with pytest.raises(InvalidArgumentError):
        tier.delete_pack(pack_id)


def test_an_unknown_codec_is_damage(tier: PackTier) -> None:
    chunk = tier.write_pack("ns", [payload_of(1, soft(100))]).chunks[0]
    with pytest.raises(ChunkDamagedError, match="codec 'lzma' is unknown"):
        read_back(tier, chunk._replace(codec="lzma"))


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TierIOError, match="cannot create"):
        PackTier(tmp_path / "file" / "packs")


class OneByteOps(FileOps):
    """Every read and write moves one byte."""

    def pwritev(self, fd: int, pieces: Sequence[memoryview], offset: int) -> int:
        return super().pwritev(fd, [pieces[0][:1]], offset)

    def preadv(self, fd: int, into: Sequence[memoryview], offset: int) -> int:
        return super().preadv(fd, [into[0][:1]], offset)


def test_short_reads_and_writes_are_continued(tmp_path: Path) -> None:
    tier = PackTier(tmp_path, ops=OneByteOps())
    for data in (soft(700), noise(700)):
        record = tier.write_pack("ns", [payload_of(1, data, cuts=(13,))])
        assert read_back(tier, record.chunks[0], cuts=(300,)) == data
        assert tier.read_record(record.pack_id) == record


def test_no_descriptor_is_left_open(tier: PackTier) -> None:
    before = os.listdir("/proc/self/fd")  # noqa: PTH208 (a count, not paths)
    record = tier.write_pack("ns", [payload_of(1, soft(1000))])
    read_back(tier, record.chunks[0])
    with pytest.raises(ChunkDamagedError):
        read_back(tier, record.chunks[0]._replace(offset=10**9))
    assert len(os.listdir("/proc/self/fd")) == len(before)  # noqa: PTH208
