"""The pack tier against a dict, with damage and failing calls: bytes and files are conserved after every step."""

import errno
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtier.core.stored import PackRecord, StoredChunk
from kvtier.disk.base import ChunkRead
from kvtier.disk.packs.pack_tier import PackTier
from kvtier.errors import ChunkDamagedError, TierIOError
from tests.fakes.chunks import key_of, noise, payload_of, soft
from tests.fakes.failing_ops import FailingOps
from tests.fakes.keys import seals_of

MAX_SET_ASIDE = 3
numbers = st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True)
choices = st.integers(0, 1000)
failures = st.one_of(st.just(0), st.integers(1, 15))
"""The call that fails; 0 for none."""


class DiskTierMachine(RuleBasedStateMachine):
    """Model: packs by id, what each chunk holds, which chunks are damaged, and how many packs are set aside."""

    @initialize(direct=st.booleans(), sealed=st.booleans())
    def start(self, direct: bool, sealed: bool) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kvtier-test-"))
        self.ops = FailingOps(errno.ENOSPC)
        self.direct = direct
        self.open_tier("a", *("b",) * sealed)
        self.packs: dict[str, PackRecord] = {}
        self.contents: dict[tuple[str, bytes], bytes] = {}
        self.damaged: set[tuple[str, bytes]] = set()
        self.damaged_packs: list[PackRecord] = []

    def open_tier(self, *key_ids: str) -> None:
        """Open the folder with these keys; with one only, nothing new is sealed."""
        self.tier = PackTier(
            self.folder,
            ops=self.ops,
            direct_reads=self.direct,
            set_aside_max_packs=MAX_SET_ASIDE,
            seals=seals_of(*key_ids) if len(key_ids) > 1 else None,
        )

    @rule(key_ids=st.permutations(["a", "b", "c"]))
    def rotate(self, key_ids: list[str]) -> None:
        """A restart with encryption on, and another key first."""
        self.open_tier(*key_ids)

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)

    @rule(chosen=numbers, seed=choices, fails=failures)
    def write(self, chosen: list[int], seed: int, fails: int) -> None:
        contents = {key_of(number): content(number, seed) for number in chosen}
        payloads = [payload_of(number, contents[key_of(number)], cuts=(seed % 100,)) for number in chosen]
        record = self.attempt(fails, lambda: self.tier.write_pack("ns", payloads))
        if record is not None:
            self.add(record, contents)

    @rule(which=st.lists(choices, min_size=1, max_size=6), fails=failures)
    def rewrite(self, which: list[int], fails: int) -> None:
        chunks = {chunk.key: chunk for chunk in self.pick(which)}  # each key once
        if not chunks:
            return
        try:
            record = self.attempt(fails, lambda: self.tier.rewrite_pack("ns", list(chunks.values())))
        except ChunkDamagedError as error:
            named = [chunk for chunk in chunks.values() if chunk.key == error.key]
            assert {place(chunk) for chunk in named} & self.damaged
            for left in self.folder.glob("*.kvpack.tmp"):
                assert fails, "only a file that could not be unlinked stays, for the next sweep"
                left.unlink()
            return
        if record is not None:
            self.add(record, {chunk.key: self.contents[place(chunk)] for chunk in chunks.values()})

    @rule(which=st.lists(choices, min_size=1, max_size=12), fails=failures, stop=st.integers(1, 15))
    def read(self, which: list[int], fails: int, stop: int) -> None:
        chunks = self.pick(which)
        reads = [ChunkRead(chunk=chunk, into=[memoryview(bytearray(chunk.raw_bytes))]) for chunk in chunks]
        seen: list[ChunkRead] = []
        numbers_of = {id(read): number for number, read in enumerate(reads)}  # the same chunk may be read twice

        def done(read: ChunkRead, error: ChunkDamagedError | TierIOError | None) -> None:
            seen.append(read)
            if error is None:
                assert bytes(read.into[0]) == self.contents[place(read.chunk)]
            elif isinstance(error, ChunkDamagedError):
                assert place(read.chunk) in self.damaged
            else:
                assert fails

        self.ops.fail_in(fails) if fails else self.ops.heal()
        self.tier.read_chunks(reads, done, lambda: len(seen) >= stop)
        self.ops.heal()
        # In order; what went straight into its segments has begun, and ends, whatever was left out before it.
        seen_numbers = [numbers_of[id(read)] for read in seen]
        assert seen_numbers == sorted(set(seen_numbers))
        assert seen_numbers[:stop] == list(range(min(stop, len(reads))))
        assert len(seen) >= min(stop, len(reads))

    @rule(which=choices, fails=failures)
    def delete(self, which: int, fails: int) -> None:
        record = self.pick_pack(which)
        if record is None:
            return

        def delete() -> None:
            self.tier.delete_pack(record.pack_id)

        self.attempt(fails, delete)
        if not (self.folder / f"{record.pack_id}.kvpack").exists():
            self.forget(record)

    @rule(which=choices)
    def quarantine(self, which: int) -> None:
        record = self.pick_pack(which)
        if record is not None:
            self.tier.set_aside_pack(record.pack_id)
            self.forget(record)
            self.damaged_packs.append(record)

    @rule(which=choices)
    def sweep(self, which: int) -> None:
        """A restart whose ledger says of one of the packs that it was removed."""
        removed = self.pick_pack(which)
        if removed is not None:
            self.forget(removed)
        (self.folder / f"{'e' * 32}.kvpack.tmp").write_bytes(b"torn")
        assert len(self.tier.sweep([removed.pack_id] if removed else [])) == 1 + (removed is not None)

    @rule(which=choices, where=choices, bit=st.integers(0, 7))
    def damage(self, which: int, where: int, bit: int) -> None:
        for chunk in self.pick([which]):
            path = self.folder / f"{chunk.pack_id}.kvpack"
            data = bytearray(path.read_bytes())
            data[chunk.offset + where % chunk.stored_bytes] ^= 1 << bit
            path.write_bytes(data)
            self.damaged.add(place(chunk))

    @rule(fails=failures)
    def probe(self, fails: int) -> None:
        self.attempt(fails, self.tier.probe)

    @invariant()
    def bytes_and_files_are_conserved(self) -> None:
        if not hasattr(self, "packs"):
            return
        assert self.tier.list_packs() == {pack_id: record.file_bytes for pack_id, record in self.packs.items()}
        set_aside = self.tier.packs_set_aside()
        assert len(set_aside) == min(len(self.damaged_packs), MAX_SET_ASIDE)
        sizes = {path.name: path.stat().st_size for path in self.folder.iterdir()}
        assert len(sizes) == len(self.packs) + len(set_aside)
        assert sum(sizes.values()) == sum(r.file_bytes for r in self.packs.values()) + sum(set_aside.values())

    @invariant()
    def every_chunk_is_right_or_known_to_be_damaged(self) -> None:
        if hasattr(self, "packs"):
            chunks = [chunk for record in self.packs.values() for chunk in record.chunks]
            reads = [ChunkRead(chunk=chunk, into=[memoryview(bytearray(chunk.raw_bytes))]) for chunk in chunks]
            errors: list[Exception | None] = []
            self.tier.read_chunks(reads, lambda _, error: errors.append(error), lambda: False)
            for read, error in zip(reads, errors, strict=True):
                if error is None:
                    assert bytes(read.into[0]) == self.contents[place(read.chunk)]
                else:
                    assert place(read.chunk) in self.damaged

    def attempt(self, fails: int, call: Callable[[], PackRecord | None]) -> PackRecord | None:
        """Return what the call returned, None when it was refused."""
        self.ops.fail_in(fails) if fails else self.ops.heal()
        try:
            return call()
        except TierIOError:
            assert fails
            return None
        finally:
            self.ops.heal()

    def add(self, record: PackRecord, contents: dict[bytes, bytes]) -> None:
        self.packs[record.pack_id] = record
        self.contents |= {place(chunk): contents[chunk.key] for chunk in record.chunks}

    def forget(self, record: PackRecord) -> None:
        del self.packs[record.pack_id]
        for chunk in record.chunks:
            del self.contents[place(chunk)]
            self.damaged.discard(place(chunk))

    def pick_pack(self, which: int) -> PackRecord | None:
        records = list(self.packs.values())
        return records[which % len(records)] if records else None

    def pick(self, which: list[int]) -> list[StoredChunk]:
        chunks = [chunk for record in self.packs.values() for chunk in record.chunks]
        return [chunks[number % len(chunks)] for number in which] if chunks else []


def place(chunk: StoredChunk) -> tuple[str, bytes]:
    """Return what identifies a chunk's bytes."""
    return chunk.pack_id, chunk.key


def content(number: int, seed: int) -> bytes:
    """Return one version of a chunk, compressible or not."""
    return (soft if seed % 2 else noise)(200 + 50 * number, seed)


TestDiskTier = DiskTierMachine.TestCase
TestDiskTier.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
