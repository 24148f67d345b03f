"""Packs and ledger together against a dict, with crashes between any two steps."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtier.core.stored import PackRecord
from kvtier.disk.packs.pack_tier import PackTier
from kvtier.errors import ChunkDamagedError
from kvtier.ledger import Ledger
from tests.fakes.chunks import key_of, noise, payload_of, read_back, soft
from tests.fakes.rows import namespace_row

numbers = st.lists(st.integers(0, 7), min_size=1, max_size=4, unique=True)
seeds = st.integers(0, 1000)


class StoreMachine(RuleBasedStateMachine):
    """The model says which chunk holds what; the disk may hold files that a restart sweeps, or finds without a row."""

    @initialize()
    def start(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="kvtier-test-"))
        self.tier = PackTier(self.directory / "packs")
        self.ledger = Ledger.open(self.directory / "ledger.db")
        self.ledger.put_namespace(namespace_row())
        self.model: dict[bytes, bytes] = {}
        self.without_row: set[str] = set()

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            self.ledger.close()
            shutil.rmtree(self.directory)

    @rule(chosen=numbers, seed=seeds, unlinks=st.booleans())
    def store(self, chosen: list[int], seed: int, unlinks: bool) -> None:
        emptied = self.ledger.packs.commit_pack(self.write(chosen, seed))
        self.model |= {key_of(number): content(number, seed) for number in chosen}
        self.unlink(emptied, unlinks)

    @rule(chosen=numbers, seed=seeds)
    def crash_before_the_row(self, chosen: list[int], seed: int) -> None:
        self.without_row.add(self.write(chosen, seed).pack_id)

    @rule(chosen=numbers, unlinks=st.booleans())
    def drop(self, chosen: list[int], unlinks: bool) -> None:
        emptied = self.ledger.packs.drop_chunks("ns", [key_of(number) for number in chosen])
        for number in chosen:
            self.model.pop(key_of(number), None)
        self.unlink(emptied, unlinks)

    @rule(which=st.integers(0, 100))
    def lose_a_pack(self, which: int) -> None:
        packs = sorted(self.ledger.load().packs.items())
        if not packs:
            return
        pack_id, record = packs[which % len(packs)]
        self.tier.delete_pack(pack_id)
        self.expect_damage(record)
        for chunk in record.chunks:
            del self.model[chunk.key]
        self.ledger.packs.drop_pack(pack_id)

    @rule()
    def restart(self) -> None:
        self.ledger.close()
        self.ledger = Ledger.open(self.directory / "ledger.db")
        self.tier.sweep(removed := self.ledger.packs.removed_packs())
        self.ledger.packs.forget_removed(removed)
        known = {pack_id: record.file_bytes for pack_id, record in self.ledger.load().packs.items()}
        on_disk = self.tier.list_packs()
        assert {pack_id: on_disk[pack_id] for pack_id in known} == known
        assert on_disk.keys() - known.keys() == self.without_row, (
            "what was dropped is gone, what was never known is not"
        )

    @invariant()
    def every_chunk_is_read_as_written(self) -> None:
        if not hasattr(self, "model"):
            return
        records = self.ledger.load().packs.values()
        assert all(record.chunks for record in records)
        stored = [chunk for record in records for chunk in record.chunks]
        assert len(stored) == len(self.model)
        assert {chunk.key: read_back(self.tier, chunk) for chunk in stored} == self.model

    def write(self, chosen: list[int], seed: int) -> PackRecord:
        return self.tier.write_pack("ns", [payload_of(number, content(number, seed)) for number in chosen])

    def unlink(self, pack_ids: list[str], does: bool) -> None:
        for pack_id in pack_ids if does else ():
            self.tier.delete_pack(pack_id)

    def expect_damage(self, record: PackRecord) -> None:
        for chunk in record.chunks:
            try:
                read_back(self.tier, chunk)
            except ChunkDamagedError:
                continue
            raise AssertionError(f"{chunk} was read from a pack that is gone")


def content(number: int, seed: int) -> bytes:
    """Return one version of a chunk, compressible or not."""
    return (soft if seed % 2 else noise)(200 + number, seed)


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=15, stateful_step_count=15, deadline=None)
