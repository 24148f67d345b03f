"""The digest of an adapter is known without reading if its files are as they were when they were read; else never."""

import logging
import mmap
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier_connector.engine.lora import adapter_digests, adapter_files
from kvtier_connector.engine.lora.adapter_digests import Adapter, AdapterDigests
from kvtier_connector.engine.lora.adapter_files import adapter_digest, stat_adapter
from kvtier_connector.engine.lora.remembered_digests import RememberedDigests
from tests.fakes.waiting import wait_for

EXT, FUSE = 0xEF53, 0x65735546
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


class Engine:
    """What one run of vLLM knows of adapters; its background thread runs when the test says so."""

    def __init__(self, cache: Path) -> None:
        self.tasks: list[Callable[[], None]] = []
        remembered = RememberedDigests(cache)
        remembered.load()
        self.digests = AdapterDigests(self.tasks.append, remembered)

    def first_request(self, adapter: Adapter) -> bytes | None:
        """Return the digest that serves the first request's lookup."""
        num_tasks = len(self.tasks)
        digest = self.digests.digest(adapter)
        wait_for(lambda: len(self.tasks) > num_tasks)
        return digest or self.digests.digest(adapter)

    def read(self) -> None:
        """The background thread does what it was given."""
        while self.tasks:
            self.tasks.pop(0)()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "lora_adapters.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / CONFIG).write_text("{}")
    (folder / WEIGHTS).write_bytes(b"weights")
    return folder


@pytest.fixture
def adapter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Adapter:
    """An adapter on a local file system, whatever the tests' folder is on; its last change is long ago."""
    monkeypatch.setattr(adapter_files, "_file_system", lambda path: EXT)
    monkeypatch.setattr(adapter_files, "MIN_AGE_NS", 0)
    return Adapter("sql", str(folder), 1)


@pytest.fixture
def read_before(adapter: Adapter, folder: Path, cache: Path) -> bytes:
    """An earlier run has read the adapter; return its digest."""
    engine = Engine(cache)
    assert engine.first_request(adapter) is None
    engine.read()
    digest = engine.digests.digest(adapter)
    assert digest == adapter_digest(folder)
    return digest


def set_back(path: Path, write: Callable[[], object]) -> None:
    """Change a file, in another tick of the file system's clock, and set its modification time back."""
    before = path.stat()
    while path.stat().st_ctime_ns == before.st_ctime_ns:
        write()
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns


def rewrite(folder: Path) -> None:
    set_back(folder / WEIGHTS, lambda: (folder / WEIGHTS).write_bytes(b"changed"))


def rename_over(folder: Path) -> None:
    other = folder / "other.tmp"
    other.write_bytes(b"changed")
    before = (folder / WEIGHTS).stat()
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(folder / WEIGHTS)


def copy_over(folder: Path) -> None:
    other = folder.with_name("other")
    shutil.copytree(folder, other)
    (other / WEIGHTS).write_bytes(b"changed")
    before = (folder / WEIGHTS).stat()
    os.utime(other / WEIGHTS, ns=(before.st_atime_ns, before.st_mtime_ns))
    shutil.copytree(other, folder, dirs_exist_ok=True)


def exchange_folders(folder: Path) -> None:
    other = folder.with_name("other")
    shutil.copytree(folder, other)
    set_back(other / WEIGHTS, lambda: (other / WEIGHTS).write_bytes(b"changed"))
    folder.rename(folder.with_name("old"))
    other.rename(folder)


def change_config(folder: Path) -> None:
    set_back(folder / CONFIG, lambda: (folder / CONFIG).write_text("[]"))


def add_a_file(folder: Path) -> None:
    (folder / "new_embeddings.bin").write_bytes(b"")


def point_elsewhere(folder: Path) -> None:
    before = (folder / WEIGHTS).stat()
    other = folder.with_name("blob")
    other.write_bytes(b"changed")
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to(other)


CHANGES = (rewrite, rename_over, copy_over, exchange_folders, change_config, add_a_file, point_elsewhere)


def test_the_digest_of_an_earlier_run_serves_the_first_request(
    adapter: Adapter, read_before: bytes, cache: Path
) -> None:
    engine = Engine(cache)
    assert not engine.digests.is_worth_waiting(adapter), "no request has come"
    assert engine.first_request(adapter) == read_before
    assert not engine.digests.is_read(adapter)
    assert engine.digests.is_worth_waiting(adapter)
    engine.read()
    assert engine.digests.digest(adapter) == read_before
    assert engine.digests.is_read(adapter)
    assert engine.digests.is_worth_waiting(adapter)


@pytest.mark.parametrize("change", CHANGES)
def test_changed_files_are_read_first(
    adapter: Adapter, folder: Path, read_before: bytes, cache: Path, change: Callable[[Path], None]
) -> None:
    change(folder)
    engine = Engine(cache)
    assert engine.first_request(adapter) is None
    assert not engine.digests.is_worth_waiting(adapter), "the check is over"
    engine.read()
    assert engine.digests.digest(adapter) == adapter_digest(folder) != read_before
    later = Engine(cache)
    assert later.first_request(adapter) == adapter_digest(folder)


def test_an_adapter_loaded_again_hits_at_once(adapter: Adapter, read_before: bytes, cache: Path) -> None:
    engine = Engine(cache)
    engine.first_request(adapter)
    engine.read()
    assert engine.first_request(adapter._replace(load_id=2)) == read_before


def test_a_copy_elsewhere_is_read_first(adapter: Adapter, folder: Path, read_before: bytes, cache: Path) -> None:
    copy = folder.with_name("copy")
    shutil.copytree(folder, copy)
    engine = Engine(cache)
    assert engine.first_request(Adapter("sql", str(copy), 1)) is None


def test_files_that_changed_just_before_they_were_read_are_not_remembered(
    adapter: Adapter, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A further change in the same tick of the file system's clock would not show."""
    monkeypatch.setattr(adapter_files, "MIN_AGE_NS", 60 * 10**9)
    engine = Engine(cache)
    engine.first_request(adapter)
    engine.read()
    assert engine.digests.is_read(adapter)
    assert Engine(cache).first_request(adapter) is None


def test_times_that_any_user_may_set_are_not_relied_on(
    adapter: Adapter, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_files, "_file_system", lambda path: FUSE)
    engine = Engine(cache)
    engine.first_request(adapter)
    engine.read()
    assert engine.digests.is_read(adapter)
    assert Engine(cache).first_request(adapter) is None


def test_a_write_through_a_mapping_shows(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To pages that the kernel has yet to write to the disk, it changes no time: the reading has them written."""
    monkeypatch.setattr(adapter_files, "MIN_AGE_NS", 0)
    if not stat_adapter(folder).is_reliable:
        pytest.skip("the tests' folder is on an overlay or in memory")
    adapter, engine = Adapter("sql", str(folder), 1), Engine(cache)
    with (folder / WEIGHTS).open("r+b") as file, mmap.mmap(file.fileno(), 7) as mapped:
        mapped[:] = b"WEIGHTS"
        engine.first_request(adapter)
        engine.read()
        assert Engine(cache).first_request(adapter) == adapter_digest(folder)
        mapped[:] = b"changed"
        assert Engine(cache).first_request(adapter) is None


def test_files_that_change_while_they_are_read_have_no_digest(
    adapter: Adapter, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def read_and_change(at: Path) -> bytes:
        digest = adapter_digest(at)
        rewrite(at)
        return digest

    monkeypatch.setattr(adapter_digests, "adapter_digest", read_and_change)
    engine = Engine(cache)
    engine.first_request(adapter)
    engine.read()
    assert engine.digests.digest(adapter) is None
    assert "the files change while they are read" in caplog.text
    assert Engine(cache).first_request(adapter) is None


def test_a_stat_that_did_not_show_a_change_is_reported_and_not_relied_on_again(
    adapter: Adapter,
    folder: Path,
    read_before: bytes,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Only root can do that, by writing to the device below the file system, or a fault in the kernel."""
    stat = stat_adapter(folder)
    rewrite(folder)
    monkeypatch.setattr(adapter_digests, "stat_adapter", lambda at: stat)
    monkeypatch.setattr(adapter_digests, "RETRY_S", 0.0)
    engine = Engine(cache)
    assert engine.first_request(adapter) == read_before
    engine.read()
    (record,) = (record for record in caplog.records if record.levelno == logging.ERROR)
    assert "has other content than when it was read before" in record.getMessage()
    assert engine.digests.digest(adapter) is None
    assert not engine.digests.is_worth_waiting(adapter)
    assert not engine.tasks, "it is not tried again"
    assert Engine(cache).first_request(adapter) is None


def test_files_that_change_before_the_check_is_confirmed_are_not_cached(
    adapter: Adapter, folder: Path, read_before: bytes, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """VLLM may have loaded either."""
    engine = Engine(cache)
    assert engine.first_request(adapter) == read_before
    rewrite(folder)
    engine.read()
    assert engine.digests.digest(adapter) is None
    assert not engine.digests.is_read(adapter)
    assert "have changed since vLLM loaded it" in caplog.text
    assert not [record for record in caplog.records if record.levelno == logging.ERROR]
    assert engine.first_request(adapter._replace(load_id=2)) == adapter_digest(folder), "what was read just now"


@pytest.mark.parametrize("is_remembered", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_files_that_change_between_load_and_first_request_are_not_cached(
    adapter: Adapter, folder: Path, cache: Path, read_before: bytes, change: Callable[[Path], None], is_remembered: bool
) -> None:
    """VLLM has the others: under the digest of these, its KV would be served to an engine that loads these."""
    engine = Engine(cache if is_remembered else cache.with_name("empty"))
    engine.digests.note_load(adapter)
    change(folder)
    assert engine.first_request(adapter) is None
    engine.read()
    assert engine.digests.digest(adapter) is None
    assert not engine.digests.is_worth_waiting(adapter)
    again = adapter._replace(load_id=2)
    engine.digests.note_load(again)
    assert engine.digests.is_replaced(again), "vLLM's prefix cache may have KV of the first load, under this name"


def test_other_weights_under_an_id_or_a_name_and_path_cannot_be_distinguished(
    adapter: Adapter, folder: Path, cache: Path, tmp_path: Path
) -> None:
    """Removed and loaded again under its id, or in place; vLLM's prefix cache knows name and path only."""
    digests = Engine(cache).digests
    digests.note_load(adapter)
    digests.note_load(adapter)  # once more, the same
    digests.note_load(adapter._replace(load_id=7))  # and under another id
    assert not digests.is_replaced(adapter)
    (folder / WEIGHTS).write_bytes(b"other weights")
    digests.note_load(adapter._replace(load_id=8))
    assert digests.is_replaced(adapter._replace(load_id=8)), "KV of the weights before would get the name of these"
    digests.note_load(adapter)
    elsewhere = adapter._replace(path=str(tmp_path / "elsewhere"))
    assert digests.is_replaced(adapter)
    assert digests.is_replaced(adapter._replace(load_id=2))
    assert digests.is_replaced(elsewhere)
    assert not digests.is_replaced(elsewhere._replace(load_id=2))
    digests.note_load(elsewhere._replace(load_id=3), in_place=True)
    assert digests.is_replaced(elsewhere._replace(load_id=2))


def test_a_load_that_is_no_longer_cached_is_not_read_again(
    adapter: Adapter, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two requests have asked for it before the first reading was over."""
    monkeypatch.setattr(adapter_digests, "RETRY_S", 0.0)
    engine = Engine(cache)
    engine.digests.note_load(adapter)
    kept = folder.with_name("kept")
    folder.rename(kept)
    shutil.copytree(kept, folder)
    for _ in range(2):
        assert engine.first_request(adapter) is None
    assert len(engine.tasks) > 1
    engine.tasks.pop(0)()
    shutil.rmtree(folder)
    kept.rename(folder)
    engine.read()
    assert engine.digests.digest(adapter) is None
    assert not engine.digests.is_read(adapter)
    assert caplog.text.count("have changed since vLLM loaded it") == 1


def test_files_that_stay_as_they_were_loaded_are_cached(adapter: Adapter, cache: Path, read_before: bytes) -> None:
    engine = Engine(cache)
    engine.digests.note_load(adapter)
    assert engine.first_request(adapter) == read_before
    engine.read()
    assert engine.digests.is_read(adapter)


def test_a_load_of_what_is_not_here_is_not_noted(adapter: Adapter, folder: Path, cache: Path) -> None:
    """VLLM may download it."""
    engine = Engine(cache)
    folder.rename(folder.with_name("later"))
    engine.digests.note_load(adapter)
    folder.with_name("later").rename(folder)
    engine.first_request(adapter)
    engine.read()
    assert engine.digests.is_read(adapter)


def test_without_a_thread_for_the_check_the_files_are_read(
    adapter: Adapter, cache: Path, read_before: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a container's limit of processes the adapter's first request ended vLLM's engine."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    engine = Engine(cache)
    assert engine.first_request(adapter) is None
    assert not engine.digests.is_worth_waiting(adapter)
    engine.read()
    assert engine.digests.digest(adapter) == read_before


def test_an_adapter_that_is_gone_waits_for_nothing(
    adapter: Adapter, folder: Path, read_before: bytes, cache: Path
) -> None:
    shutil.rmtree(folder)
    engine = Engine(cache)
    assert engine.first_request(adapter) is None
    assert not engine.digests.is_worth_waiting(adapter)
    engine.read()
    assert engine.digests.digest(adapter) is None


def test_an_adapter_with_pins_is_read_as_they_are_bound(adapter: Adapter, read_before: bytes, cache: Path) -> None:
    """Known earlier, its digest would find no bound pin: a miss where a short wait brings a hit."""
    engine = Engine(cache)
    engine.digests.digest_for_pin(adapter._replace(load_id=0))
    assert engine.digests.digest(adapter) is None
    assert engine.digests.is_worth_waiting(adapter)
    engine.read()
    assert engine.digests.digest(adapter) == read_before


def test_two_engines_remember_in_one_file(adapter: Adapter, folder: Path, cache: Path) -> None:
    other = adapter._replace(path=str(shutil.copytree(folder, folder.with_name("other"))))
    engines = Engine(cache), Engine(cache)
    for engine, own in zip(engines, (adapter, other), strict=True):
        engine.first_request(own)
        engine.read()
    later = Engine(cache)
    assert later.first_request(adapter) == later.first_request(other) == adapter_digest(folder)


def test_the_file_keeps_the_newest(cache: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier_connector.engine.lora.remembered_digests.MAX_ADAPTERS", 3)
    remembered, stat = RememberedDigests(cache), stat_adapter(folder)
    for number in range(5):
        remembered.put(f"/adapters/{number}", stat, bytes(32))
    later = RememberedDigests(cache)
    later.load()
    assert [number for number in range(5) if later.knows(f"/adapters/{number}")] == [2, 3, 4]
    assert cache.stat().st_mode & 0o777 == 0o600
    assert cache.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("text", ["", "[]", '{"/adapters/sql": "abc"}', '{"/adapters/sql": 7}', "[" * 100_000])
def test_a_damaged_file_is_ignored(cache: Path, text: str) -> None:
    cache.parent.mkdir()
    cache.write_text(text)
    remembered = RememberedDigests(cache)
    remembered.load()
    assert not remembered.knows("/adapters/sql")


def test_a_file_that_others_may_write_is_not_used(
    adapter: Adapter, read_before: bytes, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A user who writes it could have one adapter's KV served for another."""
    for mode in (0o620, 0o602):
        cache.chmod(mode)
        assert Engine(cache).first_request(adapter) is None
    assert "only vLLM's own user can write" in caplog.text
    cache.chmod(0o600)
    assert Engine(cache).first_request(adapter) == read_before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's file")
def test_another_users_file_is_not_used(adapter: Adapter, read_before: bytes, cache: Path) -> None:
    os.chown(cache, 65534, 65534)
    assert Engine(cache).first_request(adapter) is None


def test_a_link_or_a_pipe_is_not_used(adapter: Adapter, read_before: bytes, cache: Path) -> None:
    cache.rename(cache.with_name("real"))
    cache.symlink_to(cache.with_name("real"))
    assert Engine(cache).first_request(adapter) is None
    cache.unlink()
    os.mkfifo(cache, 0o600)
    assert Engine(cache).first_request(adapter) is None


def test_without_a_place_for_the_file_nothing_is_remembered(adapter: Adapter) -> None:
    engine = Engine(Path("/proc/kvtier/lora_adapters.json"))
    engine.first_request(adapter)
    engine.read()
    assert engine.digests.is_read(adapter)
