"""The pack tier beyond its contract: files, names, codec, and what other tools see."""

import json
import math
import mmap
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open

from kvtier.core.stored import StoredChunk
from kvtier.disk.base import ChunkRead
from kvtier.disk.codecs import CodecChooser
from kvtier.disk.codecs.zstd import ZstdCodec
from kvtier.disk.files.file_ops import FileFacts, FileOps
from kvtier.disk.files.scratch import ScratchPool
from kvtier.disk.packs.pack_loading import MAX_OPEN_PACKS
from kvtier.disk.packs.pack_reading import TURN_MAX_BYTES
from kvtier.disk.packs.pack_tier import PackTier
from kvtier.errors import ChunkDamagedError, InvalidArgumentError, TierIOError
from tests.fakes.chunks import key_of, noise, payload_of, read_back, soft


@pytest.fixture
def tier(tmp_path: Path) -> PackTier:
    return PackTier(tmp_path / "state" / "packs")


def path_of(tier: PackTier, pack_id: str) -> Path:
    return tier.directory / f"{pack_id}.kvpack"


@pytest.fixture
def zstd_tier(tmp_path: Path) -> PackTier:
    return PackTier(tmp_path / "packs", codecs=CodecChooser([ZstdCodec()]))


def test_safetensors_reads_a_pack(zstd_tier: PackTier) -> None:
    tier, data = zstd_tier, noise(5000)
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


class SlowDisk(FileOps):
    """Each read past the page cache takes some time; or the file system refuses a call."""

    def __init__(self, seconds: Sequence[float] = (), refused: str = "") -> None:
        self.seconds, self.refused = iter(seconds), refused

    def preadv(self, fd: int, into: Sequence[memoryview], offset: int) -> int:
        if self.refused == "preadv":
            raise OSError(5, "Input/output error")
        time.sleep(next(self.seconds))
        return sum(part.nbytes for part in into)

    def set_direct(self, fd: int, on: bool) -> None:
        if self.refused == "set_direct":
            raise OSError(22, "Invalid argument")

    def fsync(self, fd: int) -> None:
        if self.refused == "fsync":
            raise OSError(28, "No space left on device")


def test_the_better_of_two_passes_is_the_read_rate(tmp_path: Path) -> None:
    tier = PackTier(tmp_path, ops=SlowDisk([0.1] * 4 + [0.01] * 4))
    rate = tier.read_rate()
    assert rate is not None
    assert 16 * 1024**2 / 0.3 < rate <= 16 * 1024**2 / 0.04
    assert list(tmp_path.iterdir()) == []


def test_the_read_rate_is_that_of_a_file_of_four_spans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, written, write_all = SlowDisk([0.0] * 8), list[int](), SlowDisk.write_all

    def noted(ops: SlowDisk, fd: int, buffers: list[memoryview], offset: int) -> None:
        written.append(offset)
        write_all(ops, fd, buffers, offset)

    monkeypatch.setattr(SlowDisk, "write_all", noted)
    assert PackTier(tmp_path, ops=disk).read_rate() is not None
    assert written == [number * 4 * 1024**2 for number in range(4)]


@pytest.mark.parametrize("refused", ["preadv", "set_direct", "fsync"])
def test_without_direct_reads_the_read_rate_is_unknown(tmp_path: Path, refused: str) -> None:
    assert PackTier(tmp_path, ops=SlowDisk(refused=refused)).read_rate() is None
    assert PackTier(tmp_path, direct_reads=False).read_rate() is None
    assert list(tmp_path.iterdir()) == []


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
def test_zstd_is_kept_only_where_it_gains(zstd_tier: PackTier, data: bytes, codec: str) -> None:
    chunk = zstd_tier.write_pack("ns", [payload_of(1, data)]).chunks[0]
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


def test_sweep_removes_temporary_files_and_what_it_is_given_only(tier: PackTier) -> None:
    kept, removed = (tier.write_pack("ns", [payload_of(1, soft(100))]) for _ in range(2))
    temp, foreign = tier.directory / f"{'c' * 32}.kvpack.tmp", tier.directory / "notes.kvpack"
    temp.touch()
    foreign.touch()
    assert set(tier.sweep([removed.pack_id])) == {f"{removed.pack_id}.kvpack", temp.name}
    assert set(tier.directory.iterdir()) == {path_of(tier, kept.pack_id), foreign}


def test_a_sweep_is_durable_for_what_was_unlinked_before_it(tier: PackTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller forgets the names: after a power failure the file came back, and was taken for a lost pack."""
    record, synced = tier.write_pack("ns", [payload_of(1, soft(100))]), []
    tier.delete_pack(record.pack_id)
    monkeypatch.setattr(FileOps, "fsync_dir", lambda ops, path: synced.append(path))
    assert tier.sweep([]) == []
    assert synced == []
    assert tier.sweep([record.pack_id]) == []
    assert synced == [tier.directory]


def test_what_is_gone_is_gone_also_after_a_loss_of_power(tier: PackTier, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, gone = (tier.write_pack("ns", [payload_of(1, soft(100))]).pack_id for _ in range(2))
    tier.delete_pack(gone)
    synced: list[Path] = []
    monkeypatch.setattr(FileOps, "fsync_dir", lambda ops, path: synced.append(path))
    assert tier.gone([kept]) == set()
    assert synced == []
    assert tier.gone([kept, gone]) == {gone}
    assert synced == [tier.directory]


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


class BadSectorOps(FileOps):
    """No read of more than one chunk, and none of the bytes at `bad`, succeeds."""

    def __init__(self, bad: int) -> None:
        self.bad = bad

    def preadv(self, fd: int, into: Sequence[memoryview], offset: int) -> int:
        num_bytes = sum(view.nbytes for view in into)
        if num_bytes > 10_000 or offset <= self.bad < offset + num_bytes:
            raise OSError(5, "Input/output error")
        return super().preadv(fd, into, offset)


@pytest.mark.parametrize("bad_chunk", [None, 0, 1, 3])
def test_a_bad_sector_costs_its_chunk_only(tmp_path: Path, bad_chunk: int | None) -> None:
    data = [noise(9000, number) for number in range(4)]
    chunks = PackTier(tmp_path).write_pack("ns", [payload_of(i, each) for i, each in enumerate(data)]).chunks
    tier = PackTier(tmp_path, ops=BadSectorOps(-1 if bad_chunk is None else chunks[bad_chunk].offset + 17))
    buffers = [bytearray(9000) for _ in data]
    reads = [ChunkRead(chunk=each, into=[memoryview(into)]) for each, into in zip(chunks, buffers, strict=True)]
    errors: dict[int, object] = {}
    tier.read_chunks(reads, lambda read, error: errors.update({reads.index(read): error}), lambda: False)
    for number, each in enumerate(data):
        if number == bad_chunk:
            assert isinstance(errors[number], TierIOError)
        else:
            assert errors[number] is None
            assert buffers[number] == each


def test_no_descriptor_is_left_open(tier: PackTier) -> None:
    before = os.listdir("/proc/self/fd")  # noqa: PTH208 (a count, not paths)
    record = tier.write_pack("ns", [payload_of(1, soft(1000))])
    read_back(tier, record.chunks[0])
    with pytest.raises(ChunkDamagedError):
        read_back(tier, record.chunks[0]._replace(offset=10**9))
    assert len(os.listdir("/proc/self/fd")) == len(before)  # noqa: PTH208


# Reading past the page cache, ahead of the decoder


class WatchedOps(FileOps):
    """Nothing is ever in the page cache; notes each read: whether it was direct, and how long."""

    def __init__(self) -> None:
        self.reads: list[tuple[bool, int]] = []
        self.opened_paths: list[Path] = []
        self._direct = False

    def open(self, path: Path, flags: int) -> int:
        self.opened_paths.append(path)
        return super().open(path, flags)

    def resident_bytes(self, fd: int, offset: int, length: int) -> int:
        return 0

    def set_direct(self, fd: int, on: bool) -> None:
        self._direct = on
        super().set_direct(fd, on)

    def preadv(self, fd: int, into: Sequence[memoryview], offset: int) -> int:
        self.reads.append((self._direct, sum(view.nbytes for view in into)))
        return super().preadv(fd, into, offset)


class WarmOps(WatchedOps):
    """Where everything is in the page cache."""

    def resident_bytes(self, fd: int, offset: int, length: int) -> int:
        return length


def read_all(tier: PackTier, chunks: Sequence[StoredChunk]) -> list[memoryview]:
    """Read a batch into page-aligned memory; every read must succeed."""
    buffers = [memoryview(mmap.mmap(-1, chunk.raw_bytes)) for chunk in chunks]
    errors: list[Exception | None] = []
    reads = [ChunkRead(chunk=chunk, into=[buffer]) for chunk, buffer in zip(chunks, buffers, strict=True)]
    tier.read_chunks(reads, lambda _, error: errors.append(error), lambda: False)
    assert errors == [None] * len(chunks)
    return buffers


@pytest.mark.parametrize("make", [soft, noise])
def test_a_cold_batch_is_read_directly_in_few_reads(tmp_path: Path, make: Callable[[int, int], bytes]) -> None:
    ops = WatchedOps()
    tier = PackTier(tmp_path, ops=ops)
    data = [make(65536, seed) for seed in range(100)]
    record = tier.write_pack("ns", [payload_of(n, each) for n, each in enumerate(data)])
    ops.opened_paths.clear()
    assert [bytes(buffer) for buffer in read_all(tier, record.chunks)] == data
    assert ops.opened_paths == [path_of(tier, record.pack_id)]
    assert len(ops.reads) <= 3
    if tmp_path_takes_direct_reads(tmp_path):
        assert all(direct for direct, _ in ops.reads)


def test_raw_chunks_in_the_page_cache_need_no_scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = PackTier(tmp_path, ops=WarmOps())
    record = tier.write_pack("ns", [payload_of(n, noise(65536, n)) for n in range(20)])
    monkeypatch.setattr(ScratchPool, "take", lambda *_: pytest.fail("scratch was taken"))
    assert [bytes(buffer) for buffer in read_all(tier, record.chunks)] == [noise(65536, n) for n in range(20)]


def test_what_is_in_the_page_cache_is_read_through_it(tmp_path: Path) -> None:
    ops = WarmOps()
    tier = PackTier(tmp_path, ops=ops)
    record = tier.write_pack("ns", [payload_of(n, soft(300_000, n)) for n in range(3)])
    assert [bytes(buffer) for buffer in read_all(tier, record.chunks)] == [soft(300_000, n) for n in range(3)]
    assert not any(direct for direct, _ in ops.reads)


class PartlyWarmOps(WatchedOps):
    """Where this share of everything is in the page cache."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self._share = share

    def resident_bytes(self, fd: int, offset: int, length: int) -> int:
        return math.ceil(self._share * length)


@pytest.mark.parametrize(("share", "is_direct"), [(0.45, True), (0.5, False)])
def test_what_is_in_the_page_cache_by_half_is_read_through_it(tmp_path: Path, share: float, is_direct: bool) -> None:
    if not tmp_path_takes_direct_reads(tmp_path):
        pytest.skip("no direct reads here")
    ops = PartlyWarmOps(share)
    tier = PackTier(tmp_path, ops=ops)
    record = tier.write_pack("ns", [payload_of(n, soft(300_000, n)) for n in range(3)])
    assert [bytes(buffer) for buffer in read_all(tier, record.chunks)] == [soft(300_000, n) for n in range(3)]
    assert {direct for direct, _ in ops.reads} == {is_direct}


def test_a_pack_that_is_deleted_while_it_is_read_is_read_to_its_end(tmp_path: Path) -> None:
    tier = PackTier(tmp_path, ops=WatchedOps())
    record = tier.write_pack("ns", [payload_of(n, noise(1_000_000, n)) for n in range(12)])
    buffers = [bytearray(chunk.raw_bytes) for chunk in record.chunks]
    errors: list[Exception | None] = []

    def done(_: ChunkRead, error: Exception | None) -> None:
        tier.delete_pack(record.pack_id)
        errors.append(error)

    reads = [
        ChunkRead(chunk=chunk, into=[memoryview(buffer)]) for chunk, buffer in zip(record.chunks, buffers, strict=True)
    ]
    tier.read_chunks(reads, done, lambda: False)
    assert errors == [None] * 12
    assert buffers == [noise(1_000_000, n) for n in range(12)]


def test_no_thread_and_no_descriptor_outlives_a_batch_even_when_its_caller_fails(tier: PackTier) -> None:
    record = tier.write_pack("ns", [payload_of(n, noise(1_000_000, n)) for n in range(20)])
    reads = [ChunkRead(chunk=chunk, into=[memoryview(bytearray(chunk.raw_bytes))]) for chunk in record.chunks]

    def done(*_: object) -> None:
        raise KeyboardInterrupt

    threads = set(threading.enumerate())
    before = os.listdir("/proc/self/fd")  # noqa: PTH208 (a count, not paths)
    with pytest.raises(KeyboardInterrupt):
        tier.read_chunks(reads, done, lambda: False)
    assert not set(threading.enumerate()) - threads
    assert len(os.listdir("/proc/self/fd")) == len(before)  # noqa: PTH208


def test_one_call_decodes_while_another_reads_ahead(tmp_path: Path) -> None:
    """Two decoders took Python's lock from each other at every numpy call: with small chunks both got half as far."""
    read_in: set[str] = set()

    class NamingOps(FileOps):
        def preadv(self, fd: int, into: Sequence[memoryview], offset: int) -> int:
            read_in.add(threading.current_thread().name)
            return super().preadv(fd, into, offset)

    tier = PackTier(tmp_path, ops=NamingOps(), codecs=CodecChooser([ZstdCodec()]))
    (chunk,) = tier.write_pack("ns", [payload_of(1, soft(3000))]).chunks
    decoding, go_on, done_in = threading.Event(), threading.Event(), list[str]()

    def done(_: ChunkRead, error: object) -> None:
        assert error is None
        done_in.append(threading.current_thread().name)
        decoding.set()
        assert go_on.wait(10)

    def reader(name: str) -> threading.Thread:
        reads = [ChunkRead(chunk=chunk, into=[memoryview(bytearray(3000))])]
        thread = threading.Thread(target=tier.read_chunks, args=(reads, done, lambda: False), name=name)
        thread.start()
        return thread

    first = reader("first")
    assert decoding.wait(10)
    second = reader("second")
    until = time.monotonic() + 10
    while "second" not in read_in and time.monotonic() < until:
        time.sleep(0.001)
    assert read_in == {"first", "second"}
    second.join(0.05)  # time enough to decode, if it might
    assert done_in == ["first"]
    go_on.set()
    first.join(10)
    second.join(10)
    assert done_in == ["first", "second"]


def test_calls_decode_long_chunks_at_once(tmp_path: Path) -> None:
    tier = PackTier(tmp_path, codecs=CodecChooser([ZstdCodec()]))
    (chunk,) = tier.write_pack("ns", [payload_of(1, soft(TURN_MAX_BYTES + 1))]).chunks
    assert chunk.codec == "zstd"
    both, outcomes = threading.Barrier(2), list[object]()

    def done(_: ChunkRead, error: object) -> None:
        both.wait(10)  # each waits for the other within its own turn
        outcomes.append(error)

    readers = [
        threading.Thread(
            target=tier.read_chunks,
            args=([ChunkRead(chunk=chunk, into=[memoryview(bytearray(chunk.raw_bytes))])], done, lambda: False),
        )
        for _ in range(2)
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(20)
    assert outcomes == [None, None]


def test_rewriting_copies_stored_bytes_without_encoding_them(tier: PackTier, monkeypatch: pytest.MonkeyPatch) -> None:
    record = tier.write_pack("ns", [payload_of(1, soft(50_000)), payload_of(2, noise(50_000))])
    monkeypatch.setattr(CodecChooser, "encode", lambda *_: pytest.fail("a chunk was encoded"))
    copy = tier.rewrite_pack("ns", record.chunks[::-1])
    for new, old in zip(copy.chunks, record.chunks[::-1], strict=True):
        assert stored_bytes(tier, new) == stored_bytes(tier, old)


def stored_bytes(tier: PackTier, chunk: StoredChunk) -> bytes:
    return path_of(tier, chunk.pack_id).read_bytes()[chunk.offset : chunk.offset + chunk.stored_bytes]


def test_a_link_is_no_pack(tier: PackTier) -> None:
    """It would be read as one, counted with the length of its target's name."""
    record = tier.write_pack("ns", [payload_of(1, soft(100))])
    path_of(tier, "0" * 32).symlink_to(path_of(tier, record.pack_id))
    assert tier.list_packs() == {record.pack_id: record.file_bytes}


class CountingClockOps(FileOps):
    """A file changed as late as it was renamed, counted in renames."""

    def __init__(self) -> None:
        self.renamed: list[str] = []

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self.renamed.append(target.name)

    def listing(self, directory: Path) -> dict[str, FileFacts]:
        found = super().listing(directory)
        return {name: replace(facts, changed_ns=self.renamed.index(name)) for name, facts in found.items()}


def test_a_file_that_goes_while_its_folder_is_listed_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two packs that were set aside together: the second listing met the first one's file, and failed."""
    for name in ("gone", "there"):
        (tmp_path / name).write_bytes(b"x")
    scandir = os.scandir

    @contextmanager
    def then_unlink(folder: Path) -> Iterator[list[os.DirEntry[str]]]:
        with scandir(folder) as entries:
            found = list(entries)
        (tmp_path / "gone").unlink()
        yield found

    monkeypatch.setattr(os, "scandir", then_unlink)
    assert FileOps().listing(tmp_path).keys() == {"there"}


@pytest.mark.parametrize(("max_packs", "max_bytes"), [(2, 10**9), (100, 2 * 4500)])
def test_quarantine_keeps_the_newest_within_its_bounds(tmp_path: Path, max_packs: int, max_bytes: int) -> None:
    tier = PackTier(tmp_path, ops=CountingClockOps(), set_aside_max_packs=max_packs, set_aside_max_bytes=max_bytes)
    records = [tier.write_pack("ns", [payload_of(1, soft(100, seed))]) for seed in range(5)]
    for number, record in enumerate(records):
        tier.set_aside_pack(record.pack_id)
        assert set(tier.packs_set_aside()) == {each.pack_id for each in records[: number + 1][-2:]}
    assert tier.list_packs() == {}


def tmp_path_takes_direct_reads(folder: Path) -> bool:
    path = folder / "probe"
    path.write_bytes(bytes(4096))
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            return os.preadv(fd, [mmap.mmap(-1, 4096)], 0) == 4096
        finally:
            os.close(fd)
    except OSError:
        return False
    finally:
        path.unlink()


def test_one_batch_holds_few_descriptors_however_many_packs_it_reads(tmp_path: Path) -> None:
    """A long prompt may lie in thousands of packs: each costs a descriptor while it is open."""

    class CountingOps(FileOps):
        def __init__(self) -> None:
            self.open_fds: set[int] = set()
            self.most = self.num_opened = 0

        def open(self, path: Path, flags: int) -> int:
            fd = super().open(path, flags)
            self.open_fds.add(fd)
            self.most, self.num_opened = max(self.most, len(self.open_fds)), self.num_opened + 1
            return fd

        def close(self, fd: int) -> None:
            self.open_fds.discard(fd)
            super().close(fd)

    num_packs = MAX_OPEN_PACKS + 10
    writer, ops = PackTier(tmp_path / "packs"), CountingOps()
    payloads = [payload_of(number, noise(3000, number)) for number in range(num_packs)]
    chunks = [writer.write_pack("ns", [payload]).chunks[0] for payload in payloads]
    reads = [ChunkRead(chunk=chunk, into=[memoryview(bytearray(3000))]) for chunk in chunks]
    errors: list[object] = []
    PackTier(tmp_path / "packs", ops=ops).read_chunks(reads, lambda _, error: errors.append(error), lambda: False)
    assert errors == [None] * num_packs
    assert [bytes(read.into[0]) for read in reads] == [noise(3000, number) for number in range(num_packs)]
    assert ops.most == MAX_OPEN_PACKS
    assert ops.num_opened == num_packs
    assert ops.open_fds == set()
