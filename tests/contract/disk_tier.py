"""What every `DiskTier` promises. A test class per tier inherits this suite and gives the `tier` fixture."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvtier.core.stored import StoredChunk
from kvtier.disk.base import ChunkPayload, ChunkRead, DiskTier, checksum_of
from kvtier.errors import ChunkDamagedError, InvalidArgumentError, TierIOError
from tests.fakes.chunks import key_of, noise, payload_of, read_back, soft, split


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

    def test_a_pack_that_is_not_compressed_is_read_as_it_was_written(self, tier: DiskTier) -> None:
        data = [soft(50_000), b"\0" * 10_000]
        record = tier.write_pack("ns", [payload_of(i, each) for i, each in enumerate(data)], compressed=False)
        assert [chunk.opened()[3:6:2] for chunk in record.chunks] == [(50_000, "raw"), (10_000, "raw")]
        assert [read_back(tier, chunk) for chunk in record.chunks] == data

    def test_stored_bytes_from_elsewhere_become_a_pack(self, tier: DiskTier) -> None:
        """Those of a bundle are never sealed, whatever the tier does."""
        data = {number: noise(3000, number) for number in range(3)}
        chunks = [
            StoredChunk(key_of(number), "e" * 32, 0, 3000, 3000, "raw", checksum_of([memoryview(content)]))
            for number, content in data.items()
        ]
        by_key = {key_of(number): content for number, content in data.items()}
        record = tier.write_stored("ns", chunks, lambda chunk: by_key[chunk.key])
        assert [read_back(tier, chunk) for chunk in record.chunks] == list(data.values())
        with pytest.raises(ChunkDamagedError) as caught:
            tier.write_stored("ns", chunks, lambda chunk: bytes(3000))
        assert caught.value.key == key_of(0)
        assert list(tier.list_packs()) == [record.pack_id]

    def test_the_read_rate_is_positive_or_unknown_and_leaves_nothing(self, tier: DiskTier) -> None:
        rate = tier.read_rate()
        assert rate is None or rate > 0
        assert tier.list_packs() == {}
        assert tier.sweep(()) == []

    def test_reads_may_be_prepared_at_any_time(self, tier: DiskTier) -> None:
        tier.prepare_reads()
        record = tier.write_pack("ns", [payload_of(1, soft(1000))])
        tier.prepare_reads()
        assert read_back(tier, record.chunks[0]) == soft(1000)

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

    def test_sweep_removes_what_is_named_and_no_other_pack(self, tier: DiskTier) -> None:
        kept, removed = (tier.write_pack("ns", [payload_of(1, soft(1000))]) for _ in range(2))
        names = tier.sweep({removed.pack_id, "e" * 32})
        assert len(names) == 1
        assert names[0].startswith(removed.pack_id)
        assert list(tier.list_packs()) == [kept.pack_id]
        assert tier.sweep({removed.pack_id}) == []

    def test_it_knows_what_it_has_written_and_not_deleted(self, tier: DiskTier) -> None:
        kept, deleted = (tier.write_pack("ns", [payload_of(1, soft(1000))]) for _ in range(2))
        copied = tier.rewrite_pack("ns", kept.chunks)
        assert tier.written_packs() == {kept.pack_id, deleted.pack_id, copied.pack_id}
        tier.delete_pack(deleted.pack_id)
        assert tier.written_packs() == {kept.pack_id, copied.pack_id}

    def test_several_reads_run_at_once_with_a_write(self, tier: DiskTier) -> None:
        data = [soft(20_000, seed) for seed in range(8)]
        record = tier.write_pack("ns", [payload_of(i, each) for i, each in enumerate(data)])
        with ThreadPoolExecutor(4) as pool:
            reads = [pool.submit(read_back, tier, chunk) for _ in range(4) for chunk in record.chunks]
            writes = [pool.submit(tier.write_pack, "ns", [payload_of(9, soft(20_000))]) for _ in range(3)]
            assert [read.result() for read in reads] == data * 4
            assert {write.result().pack_id for write in writes} < set(tier.list_packs())

    # Batches

    def test_a_batch_is_read_in_the_order_given(self, tier: DiskTier) -> None:
        data = {n: (soft if n % 2 else noise)(5000 + n, n) for n in range(30)}
        records = [tier.write_pack("ns", [payload_of(n, data[n]) for n in range(i, 30, 3)]) for i in range(3)]
        chunks = {number_of(chunk): chunk for record in records for chunk in record.chunks}
        for order in (range(30), range(29, -1, -1), [*range(0, 30, 2), *range(1, 30, 2)], [3, 3, 4, 3]):
            batch = Batch([chunks[n] for n in order], cuts=(13, 4096))
            tier.read_chunks(batch.reads, batch.done, lambda: False)
            assert batch.numbers == list(order)
            assert batch.errors == [None] * len(order)
            assert batch.payloads == [data[n] for n in order]

    def test_an_empty_batch_is_nothing(self, tier: DiskTier) -> None:
        tier.read_chunks([], lambda *_: pytest.fail("there is nothing to be done"), lambda: False)

    def test_one_damaged_chunk_or_one_missing_pack_does_not_spoil_the_others(self, tier: DiskTier) -> None:
        records = [tier.write_pack("ns", [payload_of(n, soft(3000, n)) for n in range(3)]) for _ in range(3)]
        chunks = [chunk for record in records for chunk in record.chunks]
        tier.delete_pack(records[1].pack_id)
        chunks[1] = chunks[1]._replace(checksum=chunks[1].checksum ^ 1)
        batch = Batch(chunks)
        tier.read_chunks(batch.reads, batch.done, lambda: False)
        good = [True, False, True, False, False, False, True, True, True]
        assert [error is None for error in batch.errors] == good
        for chunk, error, payload in zip(chunks, batch.errors, batch.payloads, strict=True):
            if error is None:
                assert payload == soft(3000, number_of(chunk))
            else:
                assert isinstance(error, ChunkDamagedError)
                assert error.key == chunk.key

    def test_segments_of_another_length_are_refused_for_that_chunk(self, tier: DiskTier) -> None:
        for data in (soft(3000), noise(3000)):
            first, second = tier.write_pack("ns", [payload_of(1, data), payload_of(2, data)]).chunks
            batch = Batch([first, second])
            batch.reads[0] = ChunkRead(chunk=first, into=[memoryview(bytearray(2999))])
            tier.read_chunks(batch.reads, batch.done, lambda: False)
            assert [type(error) for error in batch.errors] == [ChunkDamagedError, type(None)]
            assert bytes(batch.reads[1].into[0]) == data

    @pytest.mark.parametrize("make", [soft, noise])
    def test_a_cancelled_batch_leaves_out_what_has_not_begun(
        self, tier: DiskTier, make: Callable[[int, int], bytes]
    ) -> None:
        records = [tier.write_pack("ns", [payload_of(n, make(4096, n))]) for n in range(40)]
        batch = Batch([record.chunks[0] for record in records])
        tier.read_chunks(batch.reads, batch.done, lambda: len(batch.numbers) >= 5)
        finished = len(batch.numbers)
        assert 5 <= finished < 20  # what was being read when it was cancelled may end
        assert batch.numbers == list(range(finished))
        assert batch.payloads[:finished] == [make(4096, n) for n in range(finished)]
        assert batch.payloads[finished:] == [bytes(4096)] * (40 - finished)

    def test_a_batch_that_was_cancelled_before_reads_nothing(self, tier: DiskTier) -> None:
        record = tier.write_pack("ns", [payload_of(n, noise(4096, n)) for n in range(4)])
        batch = Batch(list(record.chunks))
        tier.read_chunks(batch.reads, batch.done, lambda: True)
        assert batch.numbers == []
        assert batch.payloads == [bytes(4096)] * 4

    # Rewriting

    def test_a_rewritten_pack_holds_the_same_chunks_and_the_old_ones_stay(self, tier: DiskTier) -> None:
        data = {n: (soft if n % 2 else noise)(3000, n) for n in range(6)}
        old = [tier.write_pack("ns", [payload_of(n, data[n]) for n in numbers]) for numbers in ((0, 1, 2), (3, 4, 5))]
        wanted = [old[1].chunks[0], old[0].chunks[1], old[1].chunks[2], old[0].chunks[0]]
        new = tier.rewrite_pack("ns", wanted)
        assert [c._replace(pack_id="", offset=0) for c in new.chunks] == [
            c._replace(pack_id="", offset=0) for c in wanted
        ]
        assert {chunk.pack_id for chunk in new.chunks} == {new.pack_id}
        assert new.namespace_id == "ns"
        assert tier.list_packs() == {record.pack_id: record.file_bytes for record in (*old, new)}
        for record in (*old, new):
            assert [read_back(tier, chunk) for chunk in record.chunks] == [data[number_of(c)] for c in record.chunks]

    def test_a_damaged_chunk_ends_a_rewrite_by_name_and_leaves_nothing(self, tier: DiskTier) -> None:
        for make in (soft, noise):
            record = tier.write_pack("ns", [payload_of(n, make(3000, n)) for n in range(3)])
            before = tier.list_packs()
            chunks = list(record.chunks)
            chunks[1] = chunks[1]._replace(checksum=chunks[1].checksum ^ 1)
            with pytest.raises(ChunkDamagedError) as caught:
                tier.rewrite_pack("ns", chunks)
            assert caught.value.key == key_of(1)
            assert tier.list_packs() == before

    def test_a_rewrite_of_nothing_or_of_a_key_twice_is_refused(self, tier: DiskTier) -> None:
        chunk = tier.write_pack("ns", [payload_of(1, soft(100))]).chunks[0]
        for chunks in ([], [chunk, chunk]):
            with pytest.raises(InvalidArgumentError):
                tier.rewrite_pack("ns", chunks)

    # Quarantine and probe

    def test_a_quarantined_pack_is_out_of_reach_and_never_swept_or_counted(self, tier: DiskTier) -> None:
        bad, good = (tier.write_pack("ns", [payload_of(1, soft(1000))]) for _ in range(2))
        tier.set_aside_pack(bad.pack_id)
        tier.set_aside_pack(bad.pack_id)
        assert tier.list_packs() == {good.pack_id: good.file_bytes}
        assert tier.sweep({bad.pack_id}) == []
        with pytest.raises(ChunkDamagedError):
            read_back(tier, bad.chunks[0])
        tier.delete_pack(bad.pack_id)
        assert read_back(tier, good.chunks[0]) == soft(1000)

    def test_packs_that_were_deleted_or_set_aside_are_gone(self, tier: DiskTier) -> None:
        kept, deleted, bad = (tier.write_pack("ns", [payload_of(1, soft(100))]).pack_id for _ in range(3))
        tier.delete_pack(deleted)
        tier.set_aside_pack(bad)
        assert tier.gone([kept, deleted, bad, "unknown"]) == {deleted, bad, "unknown"}

    def test_a_probe_of_a_tier_that_works_changes_nothing(self, tier: DiskTier) -> None:
        record = tier.write_pack("ns", [payload_of(1, soft(1000))])
        tier.probe()
        assert tier.list_packs() == {record.pack_id: record.file_bytes}
        assert tier.sweep(()) == []


class Batch:
    """Reads of some chunks, and what came of them."""

    def __init__(self, chunks: Sequence[StoredChunk], cuts: Sequence[int] = ()) -> None:
        self._buffers = [bytearray(chunk.raw_bytes) for chunk in chunks]
        self.reads = [
            ChunkRead(chunk=chunk, into=split(memoryview(buffer), cuts))
            for chunk, buffer in zip(chunks, self._buffers, strict=True)
        ]
        self.numbers: list[int] = []
        self.errors: list[ChunkDamagedError | TierIOError | None] = []

    def done(self, read: ChunkRead, error: ChunkDamagedError | TierIOError | None) -> None:
        self.numbers.append(number_of(read.chunk))
        self.errors.append(error)

    @property
    def payloads(self) -> list[bytes]:
        return [bytes(buffer) for buffer in self._buffers]


def number_of(chunk: StoredChunk) -> int:
    """Return the number that `key_of` was given."""
    return int.from_bytes(chunk.key[:32], "big")
