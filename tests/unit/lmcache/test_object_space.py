"""An object space with a real daemon: what is stored comes back, and every failure is a miss."""

import ctypes
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from kvtier.client.engine_session import Attachment
from kvtier.config import DaemonConfig
from kvtier.core.layout import ChunkKey
from kvtier.errors import ArenaError
from kvtier_lmcache import object_space
from kvtier_lmcache.object_space import ObjectSpace
from tests.fakes.caching_daemon import caching_daemon, pack_bytes
from tests.fakes.object_client import DEADLINE_S, ObjectClient, open_space, some_objects
from tests.fakes.scripted_engine import config_in
from tests.fakes.waiting import wait_for

KIB, MIB = 1 << 10, 1 << 20


def test_what_is_stored_is_found_and_loaded(tmp_path: Path) -> None:
    config = config_in(tmp_path, host_bytes=16 * MIB)
    objects = some_objects(20, 100_001)
    keys, unknown = [*objects], [*some_objects(3, 1, seed=1)]
    with caching_daemon(config), open_space(config.server.socket, 100_001) as space:
        client = ObjectClient(space)
        assert client.lookup(keys) == []
        assert client.store(objects)
        assert client.store(objects)  # again: nothing to do
        assert client.lookup([unknown[0], *keys, unknown[1]]) == [*range(1, 21)]
        wanted = [unknown[2], *keys, keys[3], keys[3]]
        assert client.load(wanted) == {index: objects[key] for index, key in enumerate(wanted) if index}
        assert space.held_bytes == 20 * 100_001


def test_another_session_finds_what_was_stored(tmp_path: Path) -> None:
    """LMCache's server is restarted: what the daemon holds counts, and is found at once."""
    config = config_in(tmp_path, host_bytes=16 * MIB)
    objects = some_objects(5, 64 * KIB)
    with caching_daemon(config):
        with open_space(config.server.socket, 64 * KIB) as space:
            assert ObjectClient(space).store(objects)
        with open_space(config.server.socket, 64 * KIB) as space:
            client = ObjectClient(space)
            assert client.lookup([*objects]) == [*range(5)]
            assert space.held_bytes == 5 * 64 * KIB
            assert client.load([*objects]) == dict(enumerate(objects.values()))
        with open_space(config.server.socket, 32 * KIB) as other:  # another layout is another namespace
            assert ObjectClient(other).lookup([*objects]) == []


def test_rows_are_mapped_while_there_is_nothing_to_do(tmp_path: Path) -> None:
    """A new process copies out of rows that it has not touched at half the rate."""
    config = config_in(tmp_path, host_bytes=16 * MIB)
    objects = some_objects(16, 256 * KIB)
    with caching_daemon(config):
        with open_space(config.server.socket, 256 * KIB) as space:
            assert ObjectClient(space).store(objects)
        with open_space(config.server.socket, 256 * KIB):
            wait_for(lambda: _mapped_bytes(config.host.arena_dir) >= 16 * 256 * KIB)


def _mapped_bytes(folder: Path) -> int:
    """Return what of this folder's files this process has in its page tables."""
    found, num_bytes = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            found = str(folder) in line
        elif found and line.startswith("Rss:"):
            num_bytes += int(line.split()[1]) * KIB
    return num_bytes


def test_more_than_host_memory_is_loaded_from_disk(tmp_path: Path) -> None:
    config = config_in(tmp_path, host_bytes=2 * MIB)
    objects = some_objects(64, 256 * KIB)
    with caching_daemon(config), open_space(config.server.socket, 256 * KIB) as space:
        client = ObjectClient(space)
        _store_all(config, client, objects)
        assert client.load([*objects]) == dict(enumerate(objects.values()))


def _store_all(config: DaemonConfig, client: ObjectClient, objects: dict[ChunkKey, bytes]) -> None:
    """Store until all are on disk: what is stored faster than that is evicted from a small host memory."""

    def are_on_disk() -> bool:
        missing = [key for key in objects if not client.lookup([key])]
        if missing:
            client.store({key: objects[key] for key in missing[:4]})
        return not missing and pack_bytes(config) >= sum(map(len, objects.values()))

    wait_for(are_on_disk, 30)


def test_the_disk_is_bounded_and_what_is_evicted_is_reported(tmp_path: Path) -> None:
    """Evictions are reported, so that LMCache subtracts them; what is held is right, also after both restarted."""
    config = config_in(tmp_path, host_bytes=4 * MIB, disk_bytes=8 * MIB)
    objects = some_objects(100, 256 * KIB)
    evicted: list[ChunkKey] = []
    with caching_daemon(config), open_space(config.server.socket, 256 * KIB, on_evicted=evicted.extend) as space:
        client = ObjectClient(space)
        for key, data in objects.items():
            assert client.store({key: data})
        wait_for(lambda: len(evicted) > 60)
        assert pack_bytes(config) <= 8 * MIB
        found = client.lookup([*objects])
        assert len(found) == 100 - len(set(evicted))
        assert space.held_bytes == len(found) * 256 * KIB
        loaded = client.load([*objects])
        assert loaded.items() <= dict(enumerate(objects.values())).items()
    with caching_daemon(config), open_space(config.server.socket, 256 * KIB) as space:  # both restarted
        client = ObjectClient(space)
        again = client.lookup([*objects])
        assert space.held_bytes == len(again) * 256 * KIB
        assert client.load([*objects]).keys() <= {*again}


def test_a_daemon_that_is_killed_is_a_miss_until_it_is_back(tmp_path: Path) -> None:
    config = config_in(tmp_path, host_bytes=16 * MIB)
    objects = some_objects(8, 256 * KIB)
    with open_space(config.server.socket, 256 * KIB) as space:
        client = ObjectClient(space)
        assert client.load([*objects]) == {}  # there is no daemon yet
        assert not client.store(objects)
        with pytest.raises(AssertionError, match="ready"):  # daemon_process: it did not end well
            _store_and_kill(config, space, objects)
        wait_for(lambda: not space.is_serving)
        assert client.lookup([*objects]) == []
        assert client.load([*objects]) == {}
        shutil.rmtree(config.host.arena_dir)  # what comes back comes from disk
        config.host.arena_dir.mkdir(mode=0o700)
        with caching_daemon(config):
            wait_for(lambda: space.is_serving, 60)
            assert client.lookup([*objects]) == [*range(8)]
            assert client.load([*objects]) == dict(enumerate(objects.values()))


def _store_and_kill(config: DaemonConfig, space: ObjectSpace, objects: dict[ChunkKey, bytes]) -> None:
    with caching_daemon(config) as process:
        wait_for(lambda: space.is_serving)
        assert ObjectClient(space).store(objects)
        wait_for(lambda: pack_bytes(config) >= sum(map(len, objects.values())))
        process.kill()


def test_a_daemon_that_hangs_costs_one_timeout(tmp_path: Path) -> None:
    config = config_in(tmp_path, host_bytes=16 * MIB)
    objects = some_objects(4, 64 * KIB)
    with caching_daemon(config) as process, open_space(config.server.socket, 64 * KIB, timeout_s=1.0) as space:
        client = ObjectClient(space)
        assert client.store(objects)
        os.kill(process.pid, signal.SIGSTOP)
        try:
            assert client.load([*objects]) == {}
            assert space.num_late == 1
            assert client.lookup([*objects]) == []
            assert not client.store(some_objects(1, 64 * KIB, seed=5))
        finally:
            os.kill(process.pid, signal.SIGCONT)
        wait_for(lambda: space.is_serving)
        assert client.load([*objects]) == dict(enumerate(objects.values()))


def test_stores_to_a_daemon_that_hangs_cost_one_timeout(tmp_path: Path) -> None:
    """Each of them kept LMCache's memory for the timeout, as long as the daemon hung."""
    config = config_in(tmp_path, host_bytes=16 * MIB)
    with caching_daemon(config) as process, open_space(config.server.socket, 64 * KIB, timeout_s=1.0) as space:
        client = ObjectClient(space)
        assert client.store(some_objects(1, 64 * KIB))
        os.kill(process.pid, signal.SIGSTOP)
        try:
            assert not client.store(some_objects(1, 64 * KIB, seed=1))
            wait_for(lambda: space.num_late == 1)
            assert not space.is_serving
            assert not client.store(some_objects(1, 64 * KIB, seed=2))
        finally:
            os.kill(process.pid, signal.SIGCONT)
        wait_for(lambda: space.is_serving)
        assert client.store(some_objects(1, 64 * KIB, seed=3))


def test_an_arena_that_cannot_be_mapped_costs_no_request_a_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """LMCache's container has a /dev/shm of its own: each lookup waited for the timeout, each attempt was logged."""
    attempts = list[Attachment]()

    def refuse(attachment: Attachment, object_bytes: int) -> None:
        attempts.append(attachment)
        raise ArenaError("cannot open arena")

    monkeypatch.setattr(object_space, "OpenArena", refuse)
    config = config_in(tmp_path, host_bytes=16 * MIB)
    with caching_daemon(config), open_space(config.server.socket, 64 * KIB) as space:
        client, objects = ObjectClient(space), some_objects(1, 64 * KIB)
        wait_for(lambda: len(attempts) > 2)
        began_s = time.monotonic()
        assert client.lookup([*objects]) == []
        assert client.load([*objects]) == {}
        assert not client.store(objects)
        assert time.monotonic() - began_s < DEADLINE_S / 2
    assert caplog.text.count("cannot open arena") == 1


def test_a_daemon_that_stores_pins_only_takes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_in(tmp_path, host_bytes=16 * MIB)
    with (
        caching_daemon(config, store="pinned"),
        open_space(config.server.socket, 64 * KIB) as space,
    ):
        assert not ObjectClient(space).store(some_objects(1, 64 * KIB))
        assert "cache.store" in caplog.text


def test_tasks_that_are_open_at_the_end_fail(tmp_path: Path) -> None:
    """Those that waited for the first session were never answered, and LMCache waited for them."""
    answers = list[str]()
    with open_space(tmp_path / "no-daemon", 4096) as space:
        keys = [*some_objects(1, 4096)]
        space.lookup(keys, lambda found: answers.append(f"lookup {found}"))
        space.load(keys, [0], lambda loaded: answers.append(f"load {loaded}"))
        space.store(keys, [0], lambda stored, is_complete: answers.append(f"store {stored} {is_complete}"))
    assert sorted(answers) == ["load []", "lookup []", "store [] False"]


def test_an_error_of_lmcaches_own_ends_no_thread(tmp_path: Path) -> None:
    """Two tasks whose ends failed, as by a listener of LMCache: the second one's ended the thread, and no store or load
    ever ended again."""
    config = config_in(tmp_path, host_bytes=16 * MIB)
    objects = some_objects(3, 64 * KIB)
    with caching_daemon(config), open_space(config.server.socket, 64 * KIB) as space:
        client = ObjectClient(space)
        wait_for(lambda: space.is_serving)

        def fail(*_: object) -> None:
            raise ValueError("a listener fails")

        address = ctypes.addressof(memory := ctypes.create_string_buffer(64 * KIB))
        for key in some_objects(3, 64 * KIB, seed=1):
            space.store([key], [address], fail)
        assert client.store(objects)
        assert client.load([*objects]) == dict(enumerate(objects.values()))
        assert memory
