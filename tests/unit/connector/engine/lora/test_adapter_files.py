"""What is known of an adapter's files: their digest, and the stat that shows their changes."""

from pathlib import Path

import pytest

from kvtier_connector.engine.lora import adapter_files
from kvtier_connector.engine.lora.adapter_files import FileStat, adapter_digest, stat_adapter
from tests.unit.connector.engine.lora.test_adapter_digests import CONFIG, EXT, FUSE, WEIGHTS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / CONFIG).write_text("{}")
    (tmp_path / WEIGHTS).write_bytes(b"weights")
    return tmp_path


@pytest.mark.parametrize("field", FileStat._fields)
def test_every_field_of_a_stat_counts(field: str, folder: Path) -> None:
    stat = stat_adapter(folder)
    config, weights = stat.files
    value = weights._asdict()[field]
    other = stat._replace(files=(config, weights._replace(**{field: value * 2})))
    assert other.digest() != stat.digest() == stat_adapter(folder).digest()
    assert stat._replace(folder="/elsewhere").digest() != stat.digest()


def test_the_digest_of_an_adapter_is_that_of_earlier_versions(folder: Path) -> None:
    """Another one for the same files would lose what was stored for the adapter."""
    (folder / "README.md").write_text("not a part of it")
    (folder / "b.pt").write_bytes(b"")
    assert adapter_digest(folder).hex() == "b35cb113e353fa8f8f258f9418e221a418d39181f1dee9580430e846e90e4330"


def test_names_and_lengths_are_a_part_of_the_digest(folder: Path) -> None:
    digests = {adapter_digest(folder)}
    (folder / WEIGHTS).write_bytes(b"weight")
    digests.add(adapter_digest(folder))
    (folder / WEIGHTS).rename(folder / "other.safetensors")
    digests.add(adapter_digest(folder))
    (folder / CONFIG).unlink()
    digests.add(adapter_digest(folder))
    assert len(digests) == 4
    (folder / "other.safetensors").rename(folder / "other.txt")
    with pytest.raises(FileNotFoundError, match="no adapter weights"):
        adapter_digest(folder)


@pytest.mark.parametrize(("age_ns", "shows"), [(0, False), (2 * 10**9 - 1, False), (2 * 10**9, True)])
def test_a_change_shows_two_seconds_after_the_last_one(folder: Path, age_ns: int, shows: bool) -> None:
    stat = stat_adapter(folder)
    last_ns = max(file.ctime_ns for file in stat.files)
    assert stat.shows_changes_from(last_ns + age_ns) is shows


def test_one_file_that_is_not_reliable_is_enough(folder: Path) -> None:
    stat = stat_adapter(folder)
    for types, is_reliable in (((EXT, EXT), True), ((EXT, FUSE), False), ((FUSE, EXT), False)):
        files = tuple(file._replace(file_system=each) for file, each in zip(stat.files, types, strict=True))
        assert stat._replace(files=files).is_reliable is is_reliable


def test_the_type_of_a_file_system_is_known() -> None:
    assert adapter_files._file_system(Path("/dev/shm")) == 0x01021994, "tmpfs"
    assert adapter_files._file_system(Path("/proc/self/stat")) == 0x9FA0
    with pytest.raises(FileNotFoundError):
        adapter_files._file_system(Path("/nowhere"))
