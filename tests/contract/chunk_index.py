"""What every `ChunkIndex` promises. A test class per disk tier inherits this suite and gives the `rig` fixture.

The fixture calls `rig.check()` after each test: table, rows, files, usage and what engines know agree.
"""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from kvtier.core.chunks.lost_chunks import MissingCause
from kvtier.disk import chunk_index
from kvtier.disk.chunk_index import Dropped
from kvtier.errors import LedgerError, TierIOError
from kvtier.ledger import Ledger
from kvtier.ledger.pack_rows import PackRows
from tests.fakes.chunks import key_of
from tests.fakes.clocks import turns
from tests.fakes.gates import Gate, failing, gated
from tests.fakes.index_rig import IndexRig, keys_of
from tests.fakes.operator import reached
from tests.fakes.rows import namespace_row

Patch = pytest.MonkeyPatch
Change = Callable[[IndexRig], Coroutine[Any, Any, object]]
NUM_TURNS = 8
"""More than any change here needs to reach the ledger's or the tier's thread."""


def ledger_refuses(monkeypatch: Patch, method: str, times: int = 1) -> None:
    failing(monkeypatch, PackRows, method, lambda: LedgerError("disk is full"), times=times)


def tier_refuses(rig: IndexRig, monkeypatch: Patch, method: str = "delete_pack", times: int = 1) -> None:
    failing(
        monkeypatch, type(rig.tier), method, lambda: TierIOError(Path("x"), "unlink", OSError(5, "I/O")), times=times
    )


async def record(rig: IndexRig) -> None:
    """Chunks 1 and 7; 1 is stored already."""
    await rig.index.record(rig.write(1, 7, seed=7))
    rig.announce(keys_of(1, 7), True)


async def record_in_a_block(rig: IndexRig) -> None:
    """Chunks 0 and 8, of a pack each; 0 is stored already."""
    records = [rig.write(0, seed=8), rig.write(8, seed=8)]
    async with rig.index.hold() as change:
        await change.record(records)
    rig.announce(keys_of(0, 8), True)


async def move(rig: IndexRig) -> None:
    """Chunks 0 and 2, as far as they are there."""
    if rig.places(0, 2):
        await rig.index.move(*rig.copy(0, 2))


async def drop(rig: IndexRig) -> None:
    """Chunks 0 and 1."""
    await rig.index.drop(keys_of(0, 1))
    rig.announce([key for key in keys_of(0, 1) if not rig.table.holds(key)], False)


async def drop_cheapest(rig: IndexRig) -> None:
    """One chunk."""
    await rig.index.drop_cheapest(1)


async def drop_packs(rig: IndexRig) -> None:
    """Those from which something is read."""
    await rig.index.drop_packs(list(rig.packs))


async def reject(rig: IndexRig) -> None:
    """Chunks 0 and 1."""
    damaged = rig.places(0, 1)
    rig.packs.damaged |= {stored.pack_id for stored in damaged.values()}
    await rig.index.reject(damaged)


async def repair(rig: IndexRig) -> None:
    """All that is there; nothing is wrong."""
    assert await rig.index.reconcile(keys_of(*range(9)), repair=True) == 0


CHANGES: list[Change] = [record, record_in_a_block, move, drop, drop_cheapest, drop_packs, reject, repair]
LEDGER_CALLS: dict[Change, str] = {
    record: "commit_pack",
    record_in_a_block: "commit_pack",
    move: "move_chunks",
    repair: "find_chunks",
}
"""The call that a change waits for; of the others it is `drop_chunks`."""
changes = pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)


class ChunkIndexContract:
    """The suite; not collected itself."""

    # Record

    def test_a_recorded_chunk_is_on_disk(self, rig: IndexRig) -> None:
        async def scenario() -> None:
            pack = rig.write(0, 1)
            await rig.index.record(pack)
            assert list(rig.located.values()) == list(pack.chunks)
            assert dict(rig.usage.packs) == {pack.pack_id: pack.file_bytes}
            assert rig.announced == {}, "its caller announces it"

        asyncio.run(scenario())

    def test_a_chunk_that_is_stored_again_is_read_from_the_new_pack(self, rig: IndexRig) -> None:
        async def scenario() -> None:
            old = await rig.store(0, 1)
            assert rig.num_holes == 0
            new = await rig.store(1, seed=1)
            assert rig.located == {key_of(0): old.chunks[0], key_of(1): new.chunks[0]}
            assert rig.num_holes == 1

        asyncio.run(scenario())

    def test_a_pack_of_which_all_was_stored_again_is_gone(self, rig: IndexRig) -> None:
        async def scenario() -> None:
            await rig.store(0, 1)
            new = await rig.store(0, 1, 2, seed=1)
            assert rig.tier.list_packs().keys() == {new.pack_id}

        asyncio.run(scenario())

    def test_a_pack_that_is_refused_leaves_nothing(self, rig: IndexRig, monkeypatch: Patch) -> None:
        async def scenario() -> None:
            old = await rig.store(0)
            ledger_refuses(monkeypatch, "commit_pack")
            with pytest.raises(LedgerError):
                await rig.index.record(rig.write(0, 1, seed=1))
            assert rig.located == {key_of(0): old.chunks[0]}
            assert rig.tier.list_packs().keys() == {old.pack_id}

        asyncio.run(scenario())

    def test_what_cannot_be_unlinked_counts_and_the_change_stands(self, rig: IndexRig, monkeypatch: Patch) -> None:
        async def scenario() -> None:
            old = await rig.store(0)
            tier_refuses(rig, monkeypatch, times=2)
            new = await rig.store(0, seed=1)
            ledger_refuses(monkeypatch, "commit_pack")
            refused = rig.write(2)
            with pytest.raises(LedgerError):
                await rig.index.record(refused)
            rig.strays = {old.pack_id, refused.pack_id}
            assert rig.place(0) == new.chunks[0]
            assert rig.usage.packs.keys() == {old.pack_id, new.pack_id, refused.pack_id}
            rig.check()
            await rig.restart()
            assert rig.usage.packs.keys() == {new.pack_id}

        asyncio.run(scenario())

    # Hold

    def test_a_block_records_packs_and_other_rows_in_one_transaction(self, rig: IndexRig) -> None:
        def also(ledger: Ledger) -> None:
            ledger.put_namespace(namespace_row("another"))

        async def scenario() -> None:
            async with rig.index.hold() as change:
                await change.record([rig.write(0), rig.write(1)], also=also)
                assert rig.located.keys() == set(keys_of(0, 1))
            assert "another" in {row.namespace_id for row in rig.ledger.load().namespaces}

        asyncio.run(scenario())

    def test_a_block_whose_transaction_is_refused_changes_nothing(self, rig: IndexRig, monkeypatch: Patch) -> None:
        async def scenario() -> None:
            await rig.store(0)
            written = [rig.write(0, seed=1), rig.write(1)]
            before, usage = rig.located, dict(rig.usage.packs)

            def also(ledger: Ledger) -> None:
                ledger.packs.commit_pack(written[1])
                raise LedgerError("disk is full")

            with pytest.raises(LedgerError):
                async with rig.index.hold() as change:
                    await change.record(written, also=also)
            assert (rig.located, rig.rows, dict(rig.usage.packs)) == (before, before, usage)
            for pack in written:  # its caller's to delete
                rig.tier.delete_pack(pack.pack_id)

        asyncio.run(scenario())

    def test_changes_wait_for_the_end_of_a_block_and_files_too(self, rig: IndexRig) -> None:
        async def scenario() -> None:
            old = await rig.store(0, 1)
            async with rig.index.hold() as change:
                waiting = [asyncio.create_task(each(rig)) for each in (drop, drop_cheapest, repair)]
                await change.record([rig.write(0, 1, seed=1)])
                await change.record([rig.write(1, seed=2)])
                await turns(NUM_TURNS)
                assert rig.located.keys() == set(keys_of(0, 1))
                assert old.pack_id in rig.tier.list_packs(), "packs are unlinked after the block"
            assert old.pack_id not in rig.tier.list_packs()
            await asyncio.gather(*waiting)
            assert rig.located == {}

        asyncio.run(scenario())

    def test_what_a_block_has_committed_stays_when_it_raises(self, rig: IndexRig) -> None:
        async def broken() -> None:
            async with rig.index.hold() as change:
                await change.record([rig.write(0, seed=1)])
                raise ValueError

        async def scenario() -> None:
            old = await rig.store(0)
            with pytest.raises(ValueError):
                await broken()
            assert old.pack_id not in rig.tier.list_packs()
            await rig.store(1)
            assert rig.located.keys() == set(keys_of(0, 1))

        asyncio.run(scenario())

    def test_long_packs_are_taken_in_by_turns(self, rig: IndexRig, monkeypatch: Patch) -> None:
        monkeypatch.setattr(chunk_index, "SLICE_KEYS", 2)
        seen = set[int]()

        async def watch() -> None:
            while True:
                seen.add(len(rig.located))
                await asyncio.sleep(0)

        async def scenario() -> None:
            watching = asyncio.create_task(watch())
            pack = await rig.store(*range(5))
            assert [chunk.key for chunk in await rig.index.chunks_in([pack.pack_id])] == keys_of(*range(5))
            watching.cancel()
            assert seen >= {0, 2, 4}

        asyncio.run(scenario())

    # Load

    def test_a_start_finds_what_the_last_daemon_had(self, rig: IndexRig) -> None:
        async def scenario() -> None:
            await rig.store(0, 1)
            await rig.store(1, 2, seed=1)
            before, files = rig.located, dict(rig.usage.packs)
            await rig.restart()
            assert (rig.located, dict(rig.usage.packs)) == (before, files)
            assert rig.counters.damaged_chunks_disk == 0
            assert rig.packs.damaged == set()

        asyncio.run(scenario())

    def test_rows_beyond_the_end_of_their_file_are_deleted(self, rig: IndexRig) -> None:
        async def scenario() -> None:
            pack = await rig.store(0, 1, 2)
            first, second, _ = pack.chunks
            rig.cut(pack.pack_id, second.offset + second.stored_bytes - 1)
            await rig.restart()
            assert rig.located == {first.key: first}
            assert rig.lost_for == dict.fromkeys(keys_of(1, 2), MissingCause.DROPPED_AS_DAMAGED)
            assert rig.counters.damaged_chunks_disk == 2
            assert rig.counters.packs_set_aside == 0
            assert rig.packs.damaged == {pack.pack_id}
            rig.check()
            await rig.restart()
            assert rig.counters.damaged_chunks_disk == 0

        asyncio.run(scenario())

    def test_a_pack_that_ends_with_its_last_chunk_is_whole(self, rig: IndexRig) -> None:
        async def scenario() -> None:
            pack = await rig.store(0, 1)
            last = pack.chunks[-1]
            rig.cut(pack.pack_id, last.offset + last.stored_bytes)
            await rig.restart()
            assert rig.located.keys() == set(keys_of(0, 1))

        asyncio.run(scenario())

    @pytest.mark.parametrize("left_bytes", [0, 1])
    def test_a_pack_that_lost_all_its_chunks_is_set_aside(self, rig: IndexRig, left_bytes: int) -> None:
        async def scenario() -> None:
            kept, lost = await rig.store(0), await rig.store(1, 2)
            rig.cut(lost.pack_id, left_bytes)
            if not left_bytes:
                rig.tier.delete_pack(lost.pack_id)
            await rig.restart()
            assert rig.located.keys() == {key_of(0)}
            assert rig.tier.list_packs().keys() == {kept.pack_id}
            assert (rig.counters.damaged_chunks_disk, rig.counters.packs_set_aside) == (2, left_bytes)

        asyncio.run(scenario())

    def test_a_start_fails_when_lost_rows_stay(self, rig: IndexRig, monkeypatch: Patch) -> None:
        async def scenario() -> None:
            pack = await rig.store(0)
            rig.cut(pack.pack_id, 1)
            with monkeypatch.context() as patch:
                ledger_refuses(patch, "drop_chunks")
                with pytest.raises(LedgerError):
                    await rig.restart()
            await rig.restart()

        asyncio.run(scenario())

    def test_a_start_goes_on_when_a_damaged_pack_cannot_be_set_aside(
        self, rig: IndexRig, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A rename that the file system refused kept the daemon from starting."""

        async def scenario() -> None:
            kept, lost = await rig.store(0), await rig.store(1)
            rig.cut(lost.pack_id, 1)
            with monkeypatch.context() as patch:
                tier_refuses(rig, patch, "set_aside_pack")
                await rig.restart()
            assert rig.located.keys() == {key_of(0)}
            assert rig.counters.packs_set_aside == 0
            assert dict(rig.usage.packs) == {kept.pack_id: kept.file_bytes, lost.pack_id: 1}, "it takes its space"
            assert "pack_not_deleted" in caplog.text
            await rig.restart()
            assert rig.tier.list_packs().keys() == rig.usage.packs.keys() == {kept.pack_id}

        asyncio.run(scenario())

    def test_a_pack_without_rows_stays_when_rows_of_another_are_deleted(self, rig: IndexRig) -> None:
        """Damage had taken its rows, and any next change took its file: fsck was to judge it."""

        async def scenario() -> None:
            lost, no_rows = await rig.store(1), rig.write(0)
            connection = rig.ledger._database.connection
            connection.execute("INSERT INTO packs VALUES (?, 'ns', ?)", (no_rows.pack_id, no_rows.file_bytes))
            rig.cut(lost.pack_id, 1)
            await rig.restart()
            await rig.store(2)
            await rig.index.drop(keys_of(2))
            rig.announce_again()
            assert dict(rig.usage.packs) == rig.tier.list_packs() == {no_rows.pack_id: no_rows.file_bytes}

        asyncio.run(scenario())

    @pytest.mark.parametrize("when", ["at the start", "at a read"])
    def test_a_file_that_was_not_there_is_no_removed_pack(self, rig: IndexRig, when: str) -> None:
        """It had its name among the packs that were dropped on purpose: when it came back, with a mount or a backup,
        the next start deleted it."""

        async def scenario() -> None:
            pack = await rig.store(0, 1)
            rig.tier.delete_pack(pack.pack_id)
            if when == "at the start":
                await rig.restart()
            else:
                await rig.index.reject({chunk.key: chunk for chunk in pack.chunks})
            assert not rig.ledger.packs.pack_ids()
            assert not rig.ledger.packs.removed_packs()
            assert not rig.usage.packs

        asyncio.run(scenario())

    def test_a_row_with_a_length_that_no_chunk_has_is_damaged(self, rig: IndexRig) -> None:
        """A flipped bit made it a terabyte: the scrub found no memory for it, and never came past it."""

        async def scenario() -> None:
            await rig.store(0, 1)
            connection = rig.ledger._database.connection
            connection.execute("UPDATE chunks SET raw_bytes = raw_bytes + (1 << 39) WHERE key = ?", keys_of(0))
            await rig.restart()
            held = {chunk.key for chunk in rig.table if chunk.on_disk}
            assert held == set(keys_of(1))

        asyncio.run(scenario())

    def test_a_pack_whose_rows_damage_has_taken_stays_when_another_is_recorded(self, rig: IndexRig) -> None:
        async def scenario() -> None:
            pack = await rig.store(0)
            rig.ledger._database.connection.execute("DELETE FROM chunks")
            await rig.restart()
            await rig.store(1)
            assert pack.pack_id in rig.tier.list_packs()
            assert not rig.ledger.packs.removed_packs()

        asyncio.run(scenario())

    def test_a_pack_without_rows_counts(self, rig: IndexRig) -> None:
        async def scenario() -> None:
            pack = rig.write(0)
            connection = rig.ledger._database.connection
            connection.execute("INSERT INTO packs VALUES (?, 'ns', ?)", (pack.pack_id, pack.file_bytes))
            await rig.restart()
            assert dict(rig.usage.packs) == {pack.pack_id: pack.file_bytes}

        asyncio.run(scenario())

    # Move

    def test_moved_chunks_are_read_from_the_copy_and_the_old_packs_are_gone(self, rig: IndexRig) -> None:
        async def scenario() -> None:
            packs = [await rig.store(0, 1), await rig.store(2, 3)]
            await rig.index.drop(keys_of(1, 3))
            rig.announce(keys_of(1, 3), False)
            used_bytes = rig.usage.used_bytes
            copy, copied = rig.copy(0, 2)
            freed_bytes = await rig.index.move(copy, copied)
            assert list(rig.located.values()) == list(copy.chunks)
            assert (
                freed_bytes == used_bytes - rig.usage.used_bytes == sum(p.file_bytes for p in packs) - copy.file_bytes
            )
            assert rig.announced[key_of(0)], "where it lies is nothing to engines"

        asyncio.run(scenario())

    def test_what_was_dropped_or_stored_again_since_the_copy_stays_so(self, rig: IndexRig) -> None:
        async def scenario() -> None:
            await rig.store(0, 1, 2)
            copy, copied = rig.copy(0, 1, 2)
            await rig.index.drop(keys_of(0))
            rig.announce(keys_of(0), False)
            again = await rig.store(1, seed=1)
            await rig.index.move(copy, copied)
            assert rig.located == {key_of(1): again.chunks[0], key_of(2): copy.chunks[2]}

        asyncio.run(scenario())

    def test_a_copy_of_which_nothing_is_taken_over_is_unlinked(self, rig: IndexRig) -> None:
        async def scenario() -> None:
            await rig.store(0)
            copy, copied = rig.copy(0)
            new = await rig.store(0, seed=1)
            assert await rig.index.move(copy, copied) == 0
            assert rig.tier.list_packs().keys() == {new.pack_id}

        asyncio.run(scenario())

    def test_a_copy_that_is_refused_leaves_nothing(self, rig: IndexRig, monkeypatch: Patch) -> None:
        async def scenario() -> None:
            pack = await rig.store(0, 1)
            ledger_refuses(monkeypatch, "move_chunks")
            with pytest.raises(LedgerError):
                await rig.index.move(*rig.copy(0, 1))
            assert list(rig.located.values()) == list(pack.chunks)
            assert rig.tier.list_packs().keys() == {pack.pack_id}

        asyncio.run(scenario())

    def test_what_cannot_be_unlinked_was_not_freed(self, rig: IndexRig, monkeypatch: Patch) -> None:
        """It was reported as freed: write-back tried again what did not fit."""

        async def scenario() -> None:
            pack = await rig.store(0, 1)
            tier_refuses(rig, monkeypatch)
            copy, copied = rig.copy(0, 1)
            assert await rig.index.move(copy, copied) == -copy.file_bytes
            rig.strays = {pack.pack_id}

        asyncio.run(scenario())

    # Drop

    def test_dropped_chunks_are_gone_everywhere(self, rig: IndexRig) -> None:
        async def scenario() -> None:
            pack, other = await rig.store(0, 1), await rig.store(2)
            dropped = await rig.index.drop(keys_of(0, 1, 5))
            rig.announce(keys_of(0, 1), False)
            assert dropped == Dropped(2, sum(chunk.stored_bytes for chunk in pack.chunks))
            assert rig.located.keys() == {key_of(2)}
            assert rig.tier.list_packs().keys() == {other.pack_id}

        asyncio.run(scenario())

    def test_a_drop_of_some_leaves_a_hole(self, rig: IndexRig) -> None:
        async def scenario() -> None:
            pack = await rig.store(0, 1)
            await rig.index.drop(keys_of(0))
            rig.announce(keys_of(0), False)
            assert rig.tier.list_packs().keys() == {pack.pack_id}
            assert rig.num_holes == 1

        asyncio.run(scenario())

    def test_what_lies_elsewhere_or_is_pinned_is_ignored_if_so_asked(self, rig: IndexRig) -> None:
        async def scenario() -> None:
            await rig.store(0, 1, 2, 3)
            places = rig.places(0, 1)
            await rig.store(1, seed=1)
            assert (await rig.index.drop(keys_of(0, 1, 2), only_at=places)).num_chunks == 1
            rig.table.pin(keys_of(2))
            assert (await rig.index.drop(keys_of(2, 3), unpinned_only=True)).num_chunks == 1
            rig.announce(keys_of(0, 3), False)
            assert rig.located.keys() == set(keys_of(1, 2))
            assert (await rig.index.drop(keys_of(1), only_at={})).num_chunks == 0
            assert (await rig.index.drop(keys_of(2))).num_chunks == 1, "pins are asked about on request only"
            rig.announce(keys_of(2), False)

        asyncio.run(scenario())

    def test_files_stay_if_so_asked(self, rig: IndexRig) -> None:
        async def scenario() -> None:
            pack = await rig.store(0)
            assert await rig.index.drop(keys_of(0), keep_files=True) == Dropped(1, pack.chunks[0].stored_bytes)
            rig.announce(keys_of(0), False)
            rig.strays = {pack.pack_id}
            assert rig.rows == {}

        asyncio.run(scenario())

    def test_a_drop_of_nothing_does_not_ask_the_ledger(self, rig: IndexRig, monkeypatch: Patch) -> None:
        async def scenario() -> None:
            await rig.store(0)
            ledger_refuses(monkeypatch, "drop_chunks")
            assert await rig.index.drop(keys_of(1)) == Dropped(0, 0)
            await rig.index.reject({key_of(0): rig.write(0, seed=1).chunks[0]})
            rig.strays = rig.tier.list_packs().keys() - rig.usage.packs.keys()
            for pack_id in rig.strays:
                rig.tier.delete_pack(pack_id)
            rig.strays = set()

        asyncio.run(scenario())

    def test_chunks_of_a_refused_drop_are_on_disk_and_engines_know(self, rig: IndexRig, monkeypatch: Patch) -> None:
        async def scenario() -> None:
            pack = await rig.store(0, 1)
            rig.announce(keys_of(0, 1), False)
            ledger_refuses(monkeypatch, "drop_chunks")
            with pytest.raises(LedgerError):
                await rig.index.drop(keys_of(0, 1))
            assert list(rig.located.values()) == list(pack.chunks)
            assert rig.announced == dict.fromkeys(keys_of(0, 1), True)

        asyncio.run(scenario())

    def test_one_file_that_stays_does_not_keep_the_others(self, rig: IndexRig, monkeypatch: Patch) -> None:
        async def scenario() -> None:
            packs = {(await rig.store(number)).pack_id for number in range(3)}
            tier_refuses(rig, monkeypatch)
            assert (await rig.index.drop(keys_of(0, 1, 2))).num_chunks == 3
            rig.announce(keys_of(0, 1, 2), False)
            rig.strays = set(rig.tier.list_packs())
            assert len(rig.strays) == 1
            assert rig.strays < packs
            rig.check()
            await rig.restart()
            assert rig.tier.list_packs() == {}

        asyncio.run(scenario())

    # Eviction

    def test_the_cheapest_are_evicted_first_and_pinned_ones_never(self, rig: IndexRig) -> None:
        async def scenario() -> None:
            pack = await rig.store(0, 1, 2, 3)
            rig.table.pin(keys_of(3))
            rig.into_host(2)
            assert await rig.index.drop_cheapest(1) == pack.chunks[1].stored_bytes
            assert rig.counters.evicted_chunks_disk == 1
            assert rig.announced[key_of(1)] is False
            assert await rig.index.drop_cheapest(1 << 20) == sum(pack.chunks[n].stored_bytes for n in (0, 2))
            assert rig.located.keys() == {key_of(3)}
            assert rig.announced[key_of(2)] is True, "host memory has it"
            assert rig.lost_for == dict.fromkeys(keys_of(0, 1), MissingCause.EVICTED_FOR_DISK_SPACE)
            assert await rig.index.drop_cheapest(1) == 0
            assert rig.counters.evicted_chunks_disk == 3

        asyncio.run(scenario())

    def test_what_is_pinned_before_its_turn_comes_stays(self, rig: IndexRig) -> None:
        async def scenario() -> None:
            pack = await rig.store(0, 1)
            async with rig.index.hold():
                evictions = [
                    asyncio.create_task(rig.index.drop_cheapest(1 << 20)),
                    asyncio.create_task(rig.index.drop_packs([pack.pack_id])),
                ]
                await turns(NUM_TURNS)
                rig.table.pin(keys_of(0))
            assert sorted(await asyncio.gather(*evictions)) == [0, pack.chunks[1].stored_bytes]
            assert rig.located.keys() == {key_of(0)}

        asyncio.run(scenario())

    def test_unpinned_chunks_of_packs_are_evicted(self, rig: IndexRig) -> None:
        async def scenario() -> None:
            chosen, other = await rig.store(0, 1), await rig.store(2)
            rig.table.pin(keys_of(1))
            assert await rig.index.drop_packs([chosen.pack_id]) == chosen.chunks[0].stored_bytes
            assert rig.located.keys() == set(keys_of(1, 2))
            assert rig.announced == {key_of(0): False, key_of(1): True, key_of(2): True}
            assert await rig.index.drop_packs([other.pack_id, "f" * 32]) == other.chunks[0].stored_bytes
            assert rig.counters.evicted_chunks_disk == 2

        asyncio.run(scenario())

    @pytest.mark.parametrize("evict", [drop_cheapest, drop_packs], ids=lambda evict: evict.__name__)
    def test_an_eviction_that_is_refused_evicts_nothing(self, rig: IndexRig, monkeypatch: Patch, evict: Change) -> None:
        async def scenario() -> None:
            pack = await rig.store(0)
            ledger_refuses(monkeypatch, "drop_chunks")
            with pytest.raises(LedgerError):
                await evict(rig)
            assert rig.counters.evicted_chunks_disk == 0
            rig.check()
            assert await rig.index.drop_cheapest(1) == pack.chunks[0].stored_bytes, "it may be evicted later"

        asyncio.run(scenario())

    # Reject

    def test_a_damaged_chunk_is_deleted_and_its_pack_is_set_aside_when_it_is_empty(self, rig: IndexRig) -> None:
        async def scenario() -> None:
            pack = await rig.store(0, 1)
            rig.packs.damaged.add(pack.pack_id)
            await rig.index.reject(rig.places(0))
            assert rig.rewritten == keys_of(0)
            assert rig.lost_for == {key_of(0): MissingCause.DROPPED_AS_DAMAGED}
            assert rig.num_holes >= 1
            assert rig.tier.list_packs().keys() == {pack.pack_id}
            rig.check()
            await rig.index.drop(keys_of(1))
            rig.announce(keys_of(1), False)
            assert rig.counters.packs_set_aside == 1
            rig.tier.delete_pack(pack.pack_id)  # of one that is not there any longer
            assert rig.usage.used_bytes == 0

        asyncio.run(scenario())

    def test_a_chunk_that_lies_elsewhere_by_now_is_not_damaged(self, rig: IndexRig) -> None:
        async def scenario() -> None:
            await rig.store(0)
            damaged = rig.places(0)
            new = await rig.store(0, seed=1)
            holes = rig.num_holes
            await rig.index.reject(damaged)
            assert rig.place(0) == new.chunks[0]
            assert rig.rewritten == keys_of(0)
            assert rig.num_holes > holes

        asyncio.run(scenario())

    def test_a_damaged_chunk_is_not_served_even_if_the_ledger_refuses(self, rig: IndexRig, monkeypatch: Patch) -> None:
        """A refused drop puts its chunks back, and so did this one: for a moment, or longer, damage was served."""

        async def scenario() -> None:
            pack = await rig.store(0, 1)
            ledger_refuses(monkeypatch, "drop_chunks")
            async with rig.index.hold():
                rejecting = asyncio.create_task(rig.index.reject(rig.places(0)))
                await turns(NUM_TURNS)
                repairing = asyncio.create_task(rig.index.reconcile(keys_of(0), repair=False))
                await turns(NUM_TURNS)
            await rejecting
            assert await repairing == 1, "the row is there, and nothing in the table: not even for the next change"
            assert rig.announced == {key_of(0): False, key_of(1): True}
            assert rig.rewritten == keys_of(0)
            rig.unrecorded = {key_of(0)}
            rig.check()
            new = await rig.store(0, seed=1)
            rig.unrecorded = set()
            assert rig.located == {key_of(0): new.chunks[0], key_of(1): pack.chunks[1]}

        asyncio.run(scenario())

    def test_the_row_of_a_damaged_chunk_is_found_again_by_the_next_start(
        self, rig: IndexRig, monkeypatch: Patch
    ) -> None:
        async def scenario() -> None:
            pack = await rig.store(0)
            ledger_refuses(monkeypatch, "drop_chunks")
            await rig.index.reject(rig.places(0))
            rig.unrecorded = {key_of(0)}
            rig.check()
            await rig.restart()
            assert list(rig.located.values()) == list(pack.chunks)

        asyncio.run(scenario())

    def test_engines_know_of_a_damaged_chunk_that_host_memory_evicted_meanwhile(self, rig: IndexRig) -> None:
        """It seemed to be on disk when host memory let it go, so nothing was announced: engines held it for kept."""

        async def scenario() -> None:
            await rig.store(0)
            rig.into_host(0)
            async with rig.index.hold():
                rejecting = asyncio.create_task(rig.index.reject(rig.places(0)))
                await turns(NUM_TURNS)
                rig.out_of_host(0)
            await rejecting
            assert rig.announced == {key_of(0): False}

        asyncio.run(scenario())

    # Looking

    def test_what_is_read_from_packs_comes_in_their_order_and_by_offset(self, rig: IndexRig) -> None:
        async def scenario() -> None:
            first, second = await rig.store(3, 1, 2), await rig.store(5, 4)
            await rig.store(0)
            found = await rig.index.chunks_in([second.pack_id, first.pack_id])
            assert found == [*second.chunks, *first.chunks]
            assert await rig.index.chunks_in([]) == []

        asyncio.run(scenario())

    def test_a_repair_makes_the_table_follow_the_ledger_and_engines_know(self, rig: IndexRig) -> None:
        """What the repair brought back to the table was not announced: no engine ever asked for it."""

        async def scenario() -> None:
            pack = await rig.store(0, 1, 2, 3)
            rig.table.unplace(key_of(0))
            rig.announce(keys_of(0), False)
            rig.table.place(key_of(1), pack.chunks[1]._replace(offset=1))
            rig.table.place(key_of(2), pack.chunks[2]._replace(pack_id="f" * 32))
            rig.table.place(key_of(4), pack.chunks[3]._replace(key=key_of(4)))
            rig.announce(keys_of(4), True)
            wrong = rig.located
            suspects = keys_of(0, 1, 2, 3, 4, 5)
            assert await rig.index.reconcile(suspects, repair=False) == 4
            assert rig.located == wrong
            assert await rig.index.reconcile(suspects[:1], repair=True) == 1
            assert await rig.index.reconcile(suspects, repair=True) == 3
            assert await rig.index.reconcile(suspects, repair=True) == 0
            assert rig.announced == dict.fromkeys(keys_of(0, 1, 2, 3), True) | {key_of(4): False}
            assert rig.lost_for == {key_of(4): MissingCause.DROPPED_AS_DAMAGED}

        asyncio.run(scenario())

    def test_a_ledger_that_cannot_be_read_repairs_nothing(self, rig: IndexRig, monkeypatch: Patch) -> None:
        async def scenario() -> None:
            pack = await rig.store(0)
            rig.table.unplace(key_of(0))
            ledger_refuses(monkeypatch, "find_chunks")
            with pytest.raises(LedgerError):
                await rig.index.reconcile(keys_of(0), repair=True)
            assert rig.located == {}
            rig.table.place(key_of(0), pack.chunks[0])

        asyncio.run(scenario())

    # Cancellation

    @changes
    def test_a_change_whose_caller_left_is_made_to_its_end(
        self, rig: IndexRig, monkeypatch: Patch, change: Change
    ) -> None:
        """The ledger had committed, and the table, or the files of packs, did not follow."""

        async def scenario() -> None:
            await rig.store(0, 1, 2)
            with gated(monkeypatch, PackRows, LEDGER_CALLS.get(change, "drop_chunks")) as gate:
                await leave(change(rig), gate)
            await all_ended()
            rig.announce_again()

        asyncio.run(scenario())

    @changes
    def test_a_change_whose_caller_left_before_its_call_began_is_made(self, rig: IndexRig, change: Change) -> None:
        """The call was taken out of the ledger's queue: dropped chunks had rows, and no place in the table."""

        async def scenario() -> None:
            await rig.store(0, 1, 2)
            gate = Gate()
            ahead = asyncio.create_task(rig.resources.in_ledger(gate.wait))
            await leave(change(rig), gate)
            await ahead
            await all_ended()
            rig.announce_again()

        asyncio.run(scenario())

    @pytest.mark.parametrize("change", [record, move, drop, drop_cheapest, reject], ids=lambda change: change.__name__)
    def test_a_change_whose_caller_left_before_its_turn_is_made(self, rig: IndexRig, change: Change) -> None:
        """What an eviction had chosen when its caller left was on disk, and no longer in the queue for eviction."""

        async def scenario() -> None:
            await rig.store(0, 1, 2)
            before = rig.located
            async with rig.index.hold():
                caller = asyncio.create_task(change(rig))
                await turns(NUM_TURNS)
                caller.cancel()
                await turns(NUM_TURNS)
                assert rig.located == before
            with pytest.raises(asyncio.CancelledError):
                await caller
            assert rig.located != before
            rig.announce_again()

        asyncio.run(scenario())

    @pytest.mark.parametrize("evict", [drop_cheapest, drop_packs], ids=lambda evict: evict.__name__)
    def test_an_eviction_whose_caller_left_is_counted_and_announced(
        self, rig: IndexRig, monkeypatch: Patch, evict: Change
    ) -> None:
        async def scenario() -> None:
            await rig.store(0)
            with gated(monkeypatch, PackRows, "drop_chunks") as gate:
                await leave(evict(rig), gate)
            await all_ended()
            assert rig.announced == {key_of(0): False}
            assert rig.counters.evicted_chunks_disk == 1

        asyncio.run(scenario())

    @pytest.mark.parametrize("in_a_block", [False, True])
    def test_files_are_unlinked_although_the_caller_left(
        self, rig: IndexRig, monkeypatch: Patch, in_a_block: bool
    ) -> None:
        """The first file was gone and counted, the others stayed until the next start."""

        async def replaced() -> None:
            new = rig.write(0, 1, 2, seed=1)
            async with rig.index.hold() as change:
                await change.record([new])

        async def scenario() -> None:
            for number in range(3):
                await rig.store(number)
            with gated(monkeypatch, type(rig.tier), "delete_pack") as gate:
                await leave(replaced() if in_a_block else rig.index.drop(keys_of(0, 1, 2)), gate)
            await all_ended()
            rig.announce(keys_of(0, 1, 2), in_a_block)
            assert len(rig.tier.list_packs()) == in_a_block

        asyncio.run(scenario())

    def test_who_leaves_a_queue_for_the_block_holds_nothing(self, rig: IndexRig) -> None:
        async def enter() -> None:
            async with rig.index.hold():
                pytest.fail("it was cancelled")

        async def scenario() -> None:
            async with rig.index.hold():
                waiting = [asyncio.create_task(enter()), asyncio.create_task(repair(rig))]
                await turns(NUM_TURNS)
                for task in waiting:
                    task.cancel()
                await asyncio.wait(waiting)
                assert all(task.cancelled() for task in waiting)
            await rig.store(0)

        asyncio.run(scenario())

    # Two at once

    @changes
    def test_changes_that_meet_are_made_one_after_the_other(
        self, rig: IndexRig, monkeypatch: Patch, change: Change
    ) -> None:
        async def scenario() -> None:
            for other in CHANGES:
                await rig.store(0, 1, seed=1)
                await rig.store(2, seed=2)
                with gated(monkeypatch, PackRows, LEDGER_CALLS.get(change, "drop_chunks")) as gate:
                    running = [asyncio.create_task(change(rig))]
                    await reached(gate.reached)
                    running.append(asyncio.create_task(other(rig)))
                    await turns(NUM_TURNS)
                    gate.open()
                    await asyncio.gather(*running)
                rig.announce_again()
                rig.check()

        asyncio.run(scenario())


async def leave(change: Coroutine[Any, Any, object], gate: Gate) -> None:
    """Cancel a change's caller, twice, while a call of the change, or one ahead of it, is at the gate; open it."""
    caller = asyncio.create_task(change)
    await turns(NUM_TURNS)
    await reached(gate.reached)
    for _ in range(2):
        caller.cancel()
        await turns(NUM_TURNS)
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await caller


async def all_ended() -> None:
    """Wait for the callers that left."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)
