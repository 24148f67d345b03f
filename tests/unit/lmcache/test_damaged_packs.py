"""Damage to the daemon's packs: never a wrong byte, a miss, and counted."""

from pathlib import Path

from benchmarks.harness.process import free_port
from tests.fakes.caching_daemon import (
    caching_daemon,
    cut_each_file,
    damaged_chunks,
    evict_from_memory,
    flip_a_bit_of_each,
)
from tests.fakes.object_client import ObjectClient, open_space, some_objects
from tests.fakes.scripted_engine import config_in
from tests.fakes.waiting import wait_for

OBJECT_BYTES = 128 * 1024


def test_flipped_bits_are_misses_and_counted(tmp_path: Path) -> None:
    config, port = config_in(tmp_path, host_bytes=16 << 20), free_port()
    objects = some_objects(16, OBJECT_BYTES)
    keys, bad = [*objects], [*objects][::2]
    with (
        caching_daemon(config, metrics_port=port),
        open_space(config.server.socket, OBJECT_BYTES) as space,
    ):
        client = ObjectClient(space)
        assert client.store(objects)
        evict_from_memory(config, 16)
        assert flip_a_bit_of_each([objects[key] for key in bad], config.disk.disk_dir, ".kvpack") == 8
        assert client.load(keys) == {index: objects[key] for index, key in enumerate(keys) if key not in bad}
        assert damaged_chunks(port) == 8
        wait_for(lambda: client.lookup(bad) == [])  # it forgot them, and takes them again
        assert client.store({key: objects[key] for key in bad})
        assert client.load(keys) == dict(enumerate(objects.values()))


def test_cut_packs_are_misses(tmp_path: Path) -> None:
    config = config_in(tmp_path, host_bytes=16 << 20)
    objects = some_objects(16, OBJECT_BYTES)
    with caching_daemon(config), open_space(config.server.socket, OBJECT_BYTES) as space:
        client = ObjectClient(space)
        assert client.store(objects)
        evict_from_memory(config, 16)
        cut_each_file(config.disk.disk_dir, ".kvpack")
        loaded = client.load([*objects])
        assert len(loaded) < 16
        assert loaded.items() <= dict(enumerate(objects.values())).items()
