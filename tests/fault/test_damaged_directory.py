"""A stopped daemon's directory is damaged: the next start comes up or refuses, and never serves a wrong byte.

`fsck --offline --repair` makes it clean and loses nothing that can be read; what is lost is stored again when computed.
"""

import asyncio
import os
import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier._pb import cache_pb2
from kvtier.config import DaemonConfig
from kvtier.core.layout import ChunkKey
from kvtier.errors import LedgerError
from tests.fakes.fsck import assert_clean, check
from tests.fakes.operator import Stub, make_durable, prompt_of
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key, config_in, running, wait_durable

SEEDS = range(int(os.environ.get("KVTIER_CHAOS_DAMAGES", "1")))
"""Each kind of damage is done so often, elsewhere each time."""
PROMPTS = {name: [chunk_key((name, i)) for i in range(3)] for name in ("a", "b", "c")}
"""A pack each."""


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as a daemon leaves it."""
    folder = tmp_path_factory.mktemp("intact")

    async def scenario() -> None:
        config = config_in(folder)
        config = replace(config, disk=replace(config.disk, pack_linger_s=0.5))
        async with running(config) as stub, ScriptedEngine(config) as engine:
            for name, keys in PROMPTS.items():
                await make_durable(stub, engine, keys, name)

    asyncio.run(scenario())
    assert len(packs_in(folder)) == len(PROMPTS)
    return folder


def packs_in(folder: Path) -> list[Path]:
    return sorted((folder / "disk" / "packs").glob("*.kvpack"))


def flip(path: Path, rng: random.Random, first: int, end: int) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(first, end)] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def data_offset(pack: Path) -> int:
    return 8 + int.from_bytes(pack.read_bytes()[:8], "little")


def header_flipped(folder: Path, rng: random.Random) -> None:
    flip(pack := packs_in(folder)[0], rng, 0, data_offset(pack))


def payload_flipped(folder: Path, rng: random.Random) -> None:
    flip(pack := packs_in(folder)[0], rng, data_offset(pack), pack.stat().st_size)


def truncated(folder: Path, rng: random.Random) -> None:
    pack = packs_in(folder)[0]
    os.truncate(pack, rng.randrange(1, pack.stat().st_size))


def zero_length(folder: Path, rng: random.Random) -> None:
    os.truncate(rng.choice(packs_in(folder)), 0)


def missing(folder: Path, rng: random.Random) -> None:
    rng.choice(packs_in(folder)).unlink()


def all_missing(folder: Path, _: random.Random) -> None:
    shutil.rmtree(folder / "disk" / "packs")


def swapped(folder: Path, rng: random.Random) -> None:
    one, two = rng.sample(packs_in(folder), 2)
    one_data, two_data = one.read_bytes(), two.read_bytes()
    one.write_bytes(two_data)
    two.write_bytes(one_data)


def torn_last(folder: Path, rng: random.Random) -> None:
    """Sectors of the newest pack never reached the disk, as if its fsync had lied."""
    pack = max(packs_in(folder), key=lambda path: path.stat().st_mtime_ns)
    data = bytearray(pack.read_bytes())
    for at in rng.sample(range(0, len(data), 512), len(data) // 1024):
        data[at : at + 512] = bytes(len(data[at : at + 512]))
    pack.write_bytes(data)


def temporary_files(folder: Path, rng: random.Random) -> None:
    (folder / "disk" / "packs" / f"{'e' * 32}.kvpack.tmp").write_bytes(rng.randbytes(5000))
    (folder / "disk" / "tmp").mkdir(exist_ok=True)
    (folder / "disk" / "tmp" / "spool").write_bytes(rng.randbytes(5000))


def orphan(folder: Path, _: random.Random) -> None:
    shutil.copy(packs_in(folder)[0], folder / "disk" / "packs" / f"{'e' * 32}.kvpack")


def ledger_flipped(folder: Path, rng: random.Random) -> None:
    path = folder / "disk" / "ledger.sqlite"
    flip(path, rng, 0, path.stat().st_size)


def ledger_overwritten(folder: Path, found: bytes, by: bytes) -> None:
    path = folder / "disk" / "ledger.sqlite"
    data = path.read_bytes()
    assert found in data
    path.write_bytes(data.replace(found, by))


def ledger_name_of_a_column(folder: Path, _: random.Random) -> None:
    """fsck ended with UnicodeDecodeError."""
    ledger_overwritten(folder, b"    fingerprint ", b"    finger\xf0rint ")


def ledger_text_that_is_none(folder: Path, _: random.Random) -> None:
    """fsck advised to look who owns the file: SQLite's module calls undecodable text an operational error."""
    ledger_overwritten(folder, b'{"weights"', b'{"w\xf0ights"')


def ledger_id_of_a_pack(folder: Path, _: random.Random) -> None:
    """A start ended with InvalidArgumentError: pack_id must be 32 lower-case hex digits."""
    with closing(sqlite3.connect(folder / "disk" / "ledger.sqlite")) as sql, sql:
        for table in ("packs", "chunks"):
            sql.execute(f"UPDATE {table} SET pack_id = 'z' || substr(pack_id, 2)")


def ledger_truncated(folder: Path, rng: random.Random) -> None:
    path = folder / "disk" / "ledger.sqlite"
    os.truncate(path, rng.randrange(1, path.stat().st_size))


def ledger_zero_length(folder: Path, _: random.Random) -> None:
    os.truncate(folder / "disk" / "ledger.sqlite", 0)


def ledger_missing(folder: Path, _: random.Random) -> None:
    (folder / "disk" / "ledger.sqlite").unlink()


Damage = Callable[[Path, random.Random], None]
ONE_PACK: list[Damage] = [header_flipped, payload_flipped, truncated, zero_length, missing, torn_last]
NO_LOSS: list[Damage] = [header_flipped, temporary_files, orphan, swapped]
PACKS: list[Damage] = [*ONE_PACK, all_missing, swapped, temporary_files, orphan]
LEDGER: list[Damage] = [
    ledger_flipped,
    ledger_name_of_a_column,
    ledger_text_that_is_none,
    ledger_id_of_a_pack,
    ledger_truncated,
    ledger_zero_length,
    ledger_missing,
]


def damaged(intact: Path, folder: Path, damage: Damage, seed: int) -> DaemonConfig:
    """Return the configuration of a copy that was damaged."""
    shutil.copytree(intact / "disk", folder / "disk")
    damage(folder, random.Random(f"{damage.__name__} {seed}"))
    return config_in(folder)


async def readable(config: DaemonConfig) -> set[ChunkKey]:
    """Load every prompt; return the keys of what was readable, whose bytes are right."""
    found = set()
    async with ScriptedEngine(config) as engine:
        for acquire_id, keys in enumerate(PROMPTS.values(), 1):
            # One by one: a prefix ends at its first hole.
            for index, key in enumerate(keys):
                leased = await engine.acquire(10 * acquire_id + index, [key])
                for chunk in leased.values():
                    assert engine.read(key, chunk) == engine.payload(key), "wrong bytes"
                    found.add(key)
    return found


async def recompute(config: DaemonConfig, stub: Stub) -> None:
    """Pin what is not pinned any longer, store what is wanted: everything is durable again."""
    async with ScriptedEngine(config) as engine:
        for number, (name, keys) in enumerate(PROMPTS.items()):
            # Free where the pin is as it was.
            status = await stub.Pin(
                cache_pb2.PinRequest(name=name, tokens=range(100 * number, 100 * number + 48), replace=True)
            )
            await engine.bind(status.pin_id, keys)
            await engine.store([key for key in keys if not engine.held[key]])
            await wait_durable(stub, name)


async def lives_again(config: DaemonConfig) -> set[ChunkKey]:
    """Start, read, recompute; return what was readable."""
    async with running(config) as stub:
        found = await readable(config)
        await recompute(config, stub)
    async with running(config):
        assert await readable(config) == {key for keys in PROMPTS.values() for key in keys}
    return found


def num_kept(damage: Damage) -> int:
    """Return how many chunks at least survive."""
    if damage in NO_LOSS:
        return 9
    return 6 if damage in ONE_PACK else 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("damage", PACKS)
def test_a_start_over_damaged_packs_serves_what_is_whole(
    intact: Path, tmp_path: Path, damage: Damage, seed: int
) -> None:
    config = damaged(intact, tmp_path, damage, seed)

    async def pins_stand() -> None:
        async with running(config) as stub:
            for name in PROMPTS:
                assert (await prompt_of(stub, name)).pinned

    asyncio.run(pins_stand())
    found = asyncio.run(lives_again(config))
    # Swapped packs hold nothing that their rows describe: only fsck looks for it under other names.
    assert len(found) >= (3 if damage is swapped else num_kept(damage))
    check(config.disk.disk_dir, repair=True)
    assert_clean(config.disk.disk_dir)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("damage", [missing, all_missing])
def test_packs_that_come_back_are_served_again(intact: Path, tmp_path: Path, damage: Damage, seed: int) -> None:
    """A file system that was not mounted, or a ledger that was restored first: the start that found no packs had the
    next one delete them all."""
    config = damaged(intact, tmp_path, damage, seed)

    async def start() -> set[ChunkKey]:
        async with running(config):
            return await readable(config)

    assert len(asyncio.run(start())) < 9
    shutil.copytree(intact / "disk" / "packs", tmp_path / "disk" / "packs", dirs_exist_ok=True)
    assert len(asyncio.run(start())) == 9
    assert len(asyncio.run(start())) == 9
    check(config.disk.disk_dir, repair=True)
    assert_clean(config.disk.disk_dir)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("damage", [*PACKS, *LEDGER])
def test_fsck_makes_a_damaged_directory_clean_and_loses_nothing_readable(
    intact: Path, tmp_path: Path, damage: Damage, seed: int
) -> None:
    config = damaged(intact, tmp_path, damage, seed)
    check(config.disk.disk_dir, repair=True)
    assert_clean(config.disk.disk_dir)
    found = asyncio.run(lives_again(config))
    assert len(found) >= num_kept(damage)
    if damage in (ledger_missing, ledger_zero_length):
        assert len(found) == 9, "packs are adopted by their headers"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("damage", LEDGER)
def test_a_start_over_a_damaged_ledger_comes_up_or_says_what_is_wrong(
    intact: Path, tmp_path: Path, damage: Damage, seed: int
) -> None:
    """A ledger of no bytes was taken for a new one, and every pack, then without a row, was swept."""
    config = damaged(intact, tmp_path, damage, seed)
    before = {path.name: path.read_bytes() for path in packs_in(tmp_path)}

    async def scenario() -> None:
        async with running(config) as stub:
            for name in PROMPTS:
                assert (await prompt_of(stub, name)).pinned
            assert len(await readable(config)) == 9

    # What is lost whole is made again from copies and packs.
    if damage in (ledger_missing, ledger_zero_length, ledger_id_of_a_pack):
        asyncio.run(scenario())
        return
    if damage in (ledger_flipped, ledger_truncated):  # it may hit what no row needs; less than a page is no ledger
        with suppress(LedgerError):
            asyncio.run(scenario())
            return
    else:
        with pytest.raises(LedgerError, match=str(config.disk.disk_dir / "ledger.sqlite")):
            asyncio.run(scenario())
    assert {path.name: path.read_bytes() for path in packs_in(tmp_path)} == before, "a refusal touches nothing"
