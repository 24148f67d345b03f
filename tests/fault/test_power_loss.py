"""Power is lost behind every recorded operation of tier and ledger, with every kind of loss: durable means durable.

A story is acted once, on ops that record it: by a tier, in the order that the daemon promises, and by a daemon. Then
the machine stops behind each of its events in turn; what had not been synced is lost or kept, whole or torn
(`tests/fakes/lost_power.py`), and a new tier starts from what is left.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

import kvtier.service.cache
from kvtier.core.stored import PackRecord, StoredChunk
from kvtier.disk.files.observed_ops import ObservedFileOps
from kvtier.disk.packs.pack_tier import PackTier
from kvtier.errors import TierIOError
from kvtier.ledger import Ledger
from kvtier.ledger.sql.database import Database
from kvtier.obs.counters import Counters
from kvtier.obs.histogram import Histogram
from tests.fakes.chunks import key_of, noise, payload_of, read_back, soft
from tests.fakes.lost_power import Commit, Event, RecordingOps, Survival, left_after
from tests.fakes.operator import evict, make_durable, on_disk, unpin
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key, config_in, running

CHOICES = [(0, 0.0), (0, 1.0), *((seed, probability) for seed in range(4) for probability in (0.1, 0.5, 0.9))]

Row = tuple[StoredChunk, bytes]


class Story:
    """Resources as the daemon does: file first, row second; on delete the row first, unlink last."""

    def __init__(self, folder: Path, forgets: Sequence[str] = (), *, row_first: bool = False) -> None:
        self.ops = RecordingOps(forgets)
        self.tier = PackTier(folder, ops=self.ops)
        self.rows: dict[bytes, Row] = {}
        self.row_first = row_first

    def act(self) -> list[Event]:
        """Store, replace, fail, compact, evict, quarantine, probe."""
        first = self.store({1: soft(3000, 1), 2: noise(2500, 2), 3: soft(1200, 3)})
        second = self.store({4: noise(700, 4), 5: soft(2600, 5)})
        self.store({1: noise(1500, 6)})
        self.ops.fail_fsync = True
        with pytest.raises(TierIOError):
            self.store({9: soft(800, 9)})
        self.compact([first, second])
        third = self.store({6: noise(900, 7), 7: soft(900, 8)})
        self.evict(third)
        self.tier.probe()
        fourth = self.store({8: noise(600, 10)})
        self.drop_rows(fourth)
        self.tier.set_aside_pack(fourth.pack_id)
        return self.ops.events

    def store(self, contents: dict[int, bytes]) -> PackRecord:
        record = self.tier.write_pack("ns", [payload_of(number, data) for number, data in contents.items()])
        self.take_rows(record, {key_of(number): data for number, data in contents.items()})
        return record

    def compact(self, records: Sequence[PackRecord]) -> None:
        live = [chunk for record in records for chunk in record.chunks if self.rows[chunk.key][0] == chunk]
        record = self.tier.rewrite_pack("ns", live)
        self.take_rows(record, {chunk.key: self.rows[chunk.key][1] for chunk in live})
        for old in records:
            self.tier.delete_pack(old.pack_id)

    def evict(self, record: PackRecord) -> None:
        if self.row_first:
            self.drop_rows(record)
            self.tier.delete_pack(record.pack_id)
        else:  # the wrong order
            self.tier.delete_pack(record.pack_id)
            self.drop_rows(record)

    def take_rows(self, record: PackRecord, contents: dict[bytes, bytes]) -> None:
        self.rows = self.rows | {chunk.key: (chunk, contents[chunk.key]) for chunk in record.chunks}
        self.ops.events.append(Commit(self.rows))

    def drop_rows(self, record: PackRecord) -> None:
        self.rows = {key: row for key, row in self.rows.items() if row[0].pack_id != record.pack_id}
        self.ops.events.append(Commit(self.rows))


class RecordedOps(ObservedFileOps, RecordingOps):
    """The operations of a daemon, recorded together with what its ledger commits."""

    def __init__(self, forgets: Sequence[str] = ()) -> None:
        RecordingOps.__init__(self, forgets)

    def observed_by(self, counters: Counters, fsync_s: Histogram) -> "RecordedOps":
        """Count for the cache that is opened."""
        ObservedFileOps.__init__(self, counters, fsync_s)
        return self

    @contextmanager
    def recording(self, payload: Callable[[bytes], bytes]) -> Iterator[None]:
        """Have each cache that is opened meanwhile use these operations; `payload` says what a key's chunk holds."""
        transaction, ops = Database.transaction, self

        @contextmanager
        def recorded(database: Database) -> Iterator[object]:
            is_outer = not database._is_open
            with transaction(database) as sql:
                yield sql
            if is_outer:
                packs = Ledger(database, None).load().packs.values()
                chunks = [chunk for record in packs for chunk in record.chunks]
                ops.events.append(Commit({chunk.key: (chunk, payload(chunk.key)) for chunk in chunks}))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kvtier.service.cache, "ObservedFileOps", self.observed_by)
            patch.setattr(Database, "transaction", recorded)
            yield


def daemon_story(folder: Path, forgets: Sequence[str] = ()) -> list[Event]:
    """Have a daemon store prompts, store one again, and evict; return what it did to its packs and to its ledger."""
    config, ops = config_in(folder), RecordedOps(forgets)
    keys = {name: [chunk_key((name, number)) for number in range(3)] for name in ("a", "b", "c")}

    async def scenario() -> None:
        async with running(config) as stub, ScriptedEngine(config) as engine:
            for name in ("a", "b"):
                await make_durable(stub, engine, keys[name], name)
            await evict(stub, "a", force=True)
            await engine.wait_held(keys["a"], held=False)
            await engine.store(keys["a"])
            await on_disk(stub, 6)
            await unpin(stub, "b")
            await evict(stub, "b")
            await make_durable(stub, engine, keys["c"], "c")

    with ops.recording(ScriptedEngine(config).payload):
        asyncio.run(scenario())
    return ops.events


def check_every_loss(folder: Path, events: Sequence[Event]) -> int:
    """Start from each remainder; return how many there were."""
    rows: dict[bytes, Row] = {}
    num_starts = 0
    for num_events in range(len(events) + 1):
        if num_events and isinstance(event := events[num_events - 1], Commit):
            rows = dict(event.rows)  # type: ignore[arg-type]
        for seed, probability in CHOICES:
            target = folder / f"{num_events}-{seed}-{probability}"
            target.mkdir()
            for name, content in left_after(events[:num_events], Survival(seed, probability)).items():
                (target / name).write_bytes(content)
            check_start(PackTier(target), rows)
            num_starts += 1
    return num_starts


def check_start(tier: PackTier, rows: dict[bytes, Row]) -> None:
    """What the ledger knows is there, whole and right; nothing else is, except what was set aside."""
    known = {chunk.pack_id for chunk, _ in rows.values()}
    tier.sweep(())
    assert set(tier.list_packs()) >= known
    for pack_id in tier.list_packs().keys() - known:
        tier.read_record(pack_id)  # whole, and adopted, or called removed by the ledger
        tier.delete_pack(pack_id)
    for key, (chunk, content) in rows.items():
        assert read_back(tier, chunk) == content
        assert chunk in tier.read_record(chunk.pack_id).chunks
        assert chunk.key == key
    assert {path.suffix for path in tier.directory.iterdir()} <= {".kvpack", ".kvpack-damaged"}
    replaced = tier.write_pack("ns", [payload_of(1, soft(100))])  # and the tier works
    assert read_back(tier, replaced.chunks[0]) == soft(100)


def tier_story(folder: Path, forgets: Sequence[str] = ()) -> list[Event]:
    """Act the story of a tier under a ledger that keeps to the order."""
    return Story(folder / "live", forgets, row_first=True).act()


STORIES = pytest.mark.parametrize("story", [tier_story, daemon_story])


@STORIES
def test_a_durable_chunk_survives_any_loss_of_power_and_nothing_else_is_left(
    tmp_path: Path, story: Callable[[Path], list[Event]]
) -> None:
    events = story(tmp_path)
    assert len(events) >= 40
    num_starts = check_every_loss(tmp_path, events)
    assert num_starts == (len(events) + 1) * len(CHOICES)


@STORIES
@pytest.mark.parametrize("forgotten", ["fsync", "fsync_dir"])
def test_the_model_finds_a_tier_that_leaves_out_a_sync(
    tmp_path: Path, story: Callable[[Path, Sequence[str]], list[Event]], forgotten: str
) -> None:
    """The suite's own alarm: without it, a model that loses nothing would pass for a tier that loses nothing."""
    events = story(tmp_path, [forgotten])
    with pytest.raises(Exception, match=r"assert|damaged|missing|pack ends|checksum|is not a kvtier pack"):
        check_every_loss(tmp_path, events)


def test_the_model_finds_a_daemon_that_unlinks_before_the_row_is_gone(tmp_path: Path) -> None:
    events = Story(tmp_path / "live", row_first=False).act()
    with pytest.raises(AssertionError):
        check_every_loss(tmp_path, events)
