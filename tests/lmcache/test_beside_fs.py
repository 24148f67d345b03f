"""The adapter in LMCache's own hands, beside LMCache's `fs` adapter: what each serves of damaged files."""

import random
from pathlib import Path

from benchmarks.harness.process import free_port
from kvtier.client.admin import AdminClient
from tests.fakes.caching_daemon import (
    caching_daemon,
    cut_each_file,
    damaged_chunks,
    evict_from_memory,
    flip_a_bit_of_each,
)
from tests.fakes.pin_coordinator import pin_coordinator
from tests.fakes.scripted_engine import config_in
from tests.fakes.waiting import wait_for
from tests.lmcache.adapter_process import ObjectId, adapter, kvtier_spec

OBJECT_BYTES = 128 * 1024
NUM_OBJECTS = 16


def _objects() -> dict[ObjectId, bytes]:
    chance = random.Random(1)
    return {ObjectId(number): chance.randbytes(OBJECT_BYTES) for number in range(NUM_OBJECTS)}


def test_fs_serves_flipped_bits(tmp_path: Path) -> None:
    """The measure: LMCache's `fs` returns every damaged object as loaded. Cut files are misses there too."""
    objects, folder = _objects(), tmp_path / "fs"
    with adapter({"type": "fs", "base_path": str(folder)}, tmp_path / "log") as driver:
        assert driver.store(objects)
        assert flip_a_bit_of_each(objects.values(), folder, ".data") == NUM_OBJECTS
        loaded = driver.load([*objects], OBJECT_BYTES)
        assert len(loaded) == NUM_OBJECTS
        assert not {*loaded.values()} & {*objects.values()}  # wrong bytes, all of them
        cut_each_file(folder, ".data")
        assert driver.load([*objects], OBJECT_BYTES) == {}


def test_kvtier_serves_no_wrong_byte(tmp_path: Path) -> None:
    config, port, objects = config_in(tmp_path, host_bytes=16 << 20), free_port(), _objects()
    bad = [*objects][::2]
    right = {index: data for index, (each, data) in enumerate(objects.items()) if each not in bad}
    with (
        caching_daemon(config, metrics_port=port),
        adapter(kvtier_spec(config.server.socket), tmp_path / "lmcache.log") as driver,
    ):
        assert driver.store(objects)
        evict_from_memory(config, NUM_OBJECTS)
        assert flip_a_bit_of_each([objects[each] for each in bad], config.disk.disk_dir, ".kvpack") == len(bad)
        assert driver.load([*objects], OBJECT_BYTES) == right
        assert damaged_chunks(port) == len(bad)
        wait_for(lambda: len(driver.lookup([*objects], OBJECT_BYTES)) == len(right))
        evict_from_memory(config, len(right))
        cut_each_file(config.disk.disk_dir, ".kvpack")
        loaded = driver.load([*objects], OBJECT_BYTES)
        assert len(loaded) < len(right)
        assert loaded.items() <= right.items()


def test_salts_models_and_layouts_are_apart(tmp_path: Path) -> None:
    config = config_in(tmp_path, host_bytes=16 << 20)
    one, data = ObjectId(1), b"\1" * OBJECT_BYTES
    with (
        caching_daemon(config),
        adapter(kvtier_spec(config.server.socket), tmp_path / "lmcache.log") as driver,
    ):
        assert driver.store({one: data})
        others = [ObjectId(1, salt="a"), ObjectId(1, model="org/other"), ObjectId(2)]
        assert driver.lookup([one, *others], OBJECT_BYTES) == [0]
        assert driver.load([one, *others], OBJECT_BYTES) == {0: data}
        assert driver.load([one], OBJECT_BYTES // 2) == {}


def test_only_what_is_stored_is_pinned_not_what_a_lookup_describes(tmp_path: Path) -> None:
    """With a serializer, LMCache describes its own objects in a lookup, and stores others: pins were made of both, and
    those of the first were never durable, in a namespace in which nothing is."""
    config, one = config_in(tmp_path, host_bytes=16 << 20), ObjectId(1, model="model")
    with (
        caching_daemon(config),
        AdminClient(config.server.socket) as admin,
        pin_coordinator() as coordinator,
        adapter(
            kvtier_spec(config.server.socket, coordinator_url=coordinator.url, pin_poll_s=1), tmp_path / "lmcache.log"
        ) as driver,
    ):
        coordinator.hashes = [b"\1" * 32]
        assert driver.lookup([one], OBJECT_BYTES) == []
        assert driver.store({one: b"\1" * (OBJECT_BYTES // 2)})
        assert driver.lookup([one], OBJECT_BYTES) == [0]
        wait_for(lambda: bool(admin.list()))
        num_pages = coordinator.num_pages
        wait_for(lambda: coordinator.num_pages > num_pages + 1)
        rows = {each.namespace_id: each.row_bytes for each in admin.namespaces()}
        assert {*rows.values()} == {OBJECT_BYTES, OBJECT_BYTES // 2}
        bound = [rows[binding.namespace_id] for each in admin.list() for binding in each.bindings]
        assert bound == [OBJECT_BYTES // 2]


def test_usage_is_right_after_a_restart_of_both(tmp_path: Path) -> None:
    """LMCache counts the bytes of an adapter from zero; here the daemon knows what it holds."""
    config, objects = config_in(tmp_path, host_bytes=16 << 20), _objects()
    num_bytes = NUM_OBJECTS * OBJECT_BYTES
    with (
        caching_daemon(config),
        adapter(kvtier_spec(config.server.socket), tmp_path / "lmcache.log") as driver,
    ):
        assert driver.store(objects)
        assert driver.usage() == (num_bytes, {"": num_bytes})
        evict_from_memory(config, NUM_OBJECTS)
    with (
        caching_daemon(config),
        adapter(kvtier_spec(config.server.socket), tmp_path / "lmcache.log") as driver,
    ):
        assert driver.lookup([*objects], OBJECT_BYTES) == [*range(NUM_OBJECTS)]
        assert driver.usage()[0] == num_bytes
        assert driver.load([*objects], OBJECT_BYTES) == dict(enumerate(objects.values()))


def test_without_a_daemon_everything_is_a_miss(tmp_path: Path) -> None:
    objects = _objects()
    with adapter(kvtier_spec(tmp_path / "no.sock"), tmp_path / "log") as driver:
        assert driver.lookup([*objects], OBJECT_BYTES) == []
        assert driver.load([*objects], OBJECT_BYTES) == {}
        assert not driver.store(objects)
        assert not driver.status()["is_healthy"]
