"""What every `DiskTier` promises. A test class per tier inherits this suite and gives the `tier` fixture."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from kvtier.errors import ChunkDamagedError, InvalidArgumentError
from kvtier.tiers.base import ChunkPayload, DiskTier, checksum_of
from tests.fakes.chunks import key_of, noise, payload_of, read_back, soft


class DiskTierContract:
    """The suite; not collected itself."""

    def test_a_chunk_is_read_as_it_was_written(self, tier: DiskTier) -> None:
        data = [soft(50_000), noise(50_000), b"\0" * 10_000, b"x"]
        record = tier.write_pack("ns", [payload_of(i, each) for i, each in enumerate(data)])
        assert [read_back(tier, chunk) for chunk in record.chunks] == data

    def test_a_record_says_what_was_written(self, tier: DiskTier) -> None:
        payloads = [payload_of(1, soft(5000)), payload_of(2, noise(3000))]
        record = tier.write_pack("ns", payloads)
        assert record.namespace_id == "ns"
        assert [(c.key, c.raw_bytes, c.checksum) for c in record.chunks] == [
            (p.key, p.raw_bytes, p.checksum) for p in payloads
        ]
        assert {chunk.pack_id for chunk in record.chunks} == {record.pack_id}
        assert tier.list_packs() == {record.pack_id: record.file_bytes}

    def test_segments_may_be_cut_anywhere_on_both_sides(self, tier: DiskTier) -> None:
        for data in (soft(9000), noise(9000)):
            record = tier.write_pack("ns", [payload_of(1, data, cuts=(1, 4000))])
            assert read_back(tier, record.chunks[0], cuts=(3000, 3001, 8999)) == data

    def test_packs_are_independent(self, tier: DiskTier) -> None:
        first = tier.write_pack("ns", [payload_of(1, soft(1000))])
        second = tier.write_pack("ns", [payload_of(1, soft(2000))])
        tier.delete_pack(first.pack_id)
        assert tier.list_packs() == {second.pack_id: second.file_bytes}
        assert read_back(tier, second.chunks[0]) == soft(2000)

    def test_a_payload_that_changed_since_its_checksum_is_named_and_nothing_is_left(self, tier: DiskTier) -> None:
        data = soft(1000)
        wrong = ChunkPayload(key=key_of(2), segments=[memoryview(data)], checksum=checksum_of([memoryview(data)]) ^ 1)
        with pytest.raises(ChunkDamagedError) as caught:
            tier.write_pack("ns", [payload_of(1, soft(1000)), wrong])
        assert caught.value.key == key_of(2)
        assert tier.list_packs() == {}

    @pytest.mark.parametrize("numbers", [[], [1, 1]])
    def test_no_chunks_or_a_key_twice_is_refused(self, tier: DiskTier, numbers: list[int]) -> None:
        with pytest.raises(InvalidArgumentError):
            tier.write_pack("ns", [payload_of(number, soft(100)) for number in numbers])
        assert tier.list_packs() == {}

    def test_a_missing_pack_is_a_damaged_chunk(self, tier: DiskTier) -> None:
        record = tier.write_pack("ns", [payload_of(1, soft(1000))])
        tier.delete_pack(record.pack_id)
        with pytest.raises(ChunkDamagedError):
            read_back(tier, record.chunks[0])

    def test_a_wrong_checksum_or_length_is_a_damaged_chunk(self, tier: DiskTier) -> None:
        chunk = tier.write_pack("ns", [payload_of(1, soft(1000))]).chunks[0]
        for damaged in (chunk._replace(checksum=chunk.checksum ^ 1), chunk._replace(raw_bytes=999)):
            with pytest.raises(ChunkDamagedError):
                tier.read_chunk(damaged, [memoryview(bytearray(1000))])

    def test_delete_is_idempotent(self, tier: DiskTier) -> None:
        record = tier.write_pack("ns", [payload_of(1, soft(1000))])
        tier.delete_pack(record.pack_id)
        tier.delete_pack(record.pack_id)
        assert tier.list_packs() == {}

    def test_sweep_keeps_what_is_known(self, tier: DiskTier) -> None:
        kept, orphan = (tier.write_pack("ns", [payload_of(1, soft(1000))]) for _ in range(2))
        removed = tier.sweep({kept.pack_id})
        assert len(removed) == 1
        assert removed[0].startswith(orphan.pack_id)
        assert list(tier.list_packs()) == [kept.pack_id]
        assert tier.sweep({kept.pack_id}) == []

    def test_several_reads_run_at_once_with_a_write(self, tier: DiskTier) -> None:
        data = [soft(20_000, seed) for seed in range(8)]
        record = tier.write_pack("ns", [payload_of(i, each) for i, each in enumerate(data)])
        with ThreadPoolExecutor(4) as pool:
            reads = [pool.submit(read_back, tier, chunk) for _ in range(4) for chunk in record.chunks]
            writes = [pool.submit(tier.write_pack, "ns", [payload_of(9, soft(20_000))]) for _ in range(3)]
            assert [read.result() for read in reads] == data * 4
            assert {write.result().pack_id for write in writes} < set(tier.list_packs())
